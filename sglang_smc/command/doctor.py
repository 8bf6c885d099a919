"""Run ``sglang-smc doctor``: check this machine, or a pair of models on a device."""

from __future__ import annotations

import argparse
import json
import logging
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from sglang_smc.command import extensions, machine
from sglang_smc.command.machine import FAIL, HERE, Finding, warning
from sglang_smc.command.program import command, number, positive
from sglang_smc.options.server import DEFAULTS, LAG, SMCConfig


def run(options: argparse.Namespace) -> int:
    """Print all findings; return the exit status: 0 if nothing failed, 1 if something did."""
    _check(options)
    found = []
    with _without_log():
        for finding in examine(options):
            found.append(finding)
            if not options.json:
                print(as_text(finding), flush=True)
    if options.json:
        print(json.dumps([as_dict(finding) for finding in found], indent=2))
    return int(any(finding.level == FAIL for finding in found))


@contextmanager
def _without_log() -> Iterator[None]:
    """Suppress SGLang's log lines and warnings: relevant problems are reported as findings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def as_text(finding: Finding) -> str:
    """Return the level and the finding, and the remedy below."""
    marked = [("", line) for line in f"{finding.about}: {finding.found}".splitlines()]
    marked += [("-> ", line) for line in finding.do.splitlines()]
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}  # paths
    blocks = [
        textwrap.wrap(line, 90, initial_indent=mark, subsequent_indent=" " * len(mark), **whole)
        for mark, line in marked
    ]
    text = textwrap.indent("\n".join("\n".join(block) for block in blocks), " " * 10)
    return f"{finding.level:10}{text.lstrip()}"


def as_dict(finding: Finding) -> dict[str, Any]:
    return {name: value for name, value in finding._asdict().items() if value not in ("", None)}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc doctor",
        description="Checks versions, device and hooks of this installation; with --target and "
        "--draft also whether the pair fits together, and onto a device. No model is loaded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    models = "a model folder, or the name of one that sglang-smc plan knows, such as llama-3.1-8b"
    add("--target", metavar="DIR", help=f"{models}; alone, also one of docs/drafts.md, such as "
        "Qwen/Qwen3.8-27B, for its published drafts")  # fmt: skip
    add("--draft", metavar="DIR", help="the same, or the folder of a head, or ngram; "
        "without it mtp, the target's own MTP layer")  # fmt: skip
    add("--device", default=HERE, help="device of the pair: h100, or another that sglang-smc plan "
        "--help lists, or here")  # fmt: skip
    add("--tp", type=positive, default=1, help="tensor-parallel devices")
    add("--requests", type=positive, default=8, help="requests that should fit at once")
    add("--context", type=positive, help="tokens of a request, with its answer; default 4096, or "
        "what the target takes")  # fmt: skip
    chosen = "default: what a server in mode exact chooses for the pair"
    add("--num-particles", type=positive, help=f"N; {chosen}")
    add("--num-steps", type=positive, help=f"K; {chosen}")
    add("--max-lag", type=positive, default=LAG, help="as --speculative-smc-max-lag")
    share = number(float, 0, 1, is_open=True)
    add("--mem-fraction", type=share, help="share of memory for weights and KV; default 0.7 on a "
        "CPU, and on a GPU what SGLang takes of so much memory")  # fmt: skip
    trust = "run code that comes with the models, as a server with this flag does"
    add("--trust-remote-code", action="store_true", help=trust)
    add("--kernels", action="store_true", help="instead run each kernel against its torch "
        "reference, on this machine's GPU")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of lines")
    return result


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError unless the arguments are consistent with each other."""
    if options.draft and not options.target:
        raise ValueError("--draft goes with --target; give both, or neither.")
    if options.kernels and options.target:
        raise ValueError("--kernels looks at no models; leave out --target and --draft.")
    if options.device != HERE and not options.target:
        raise ValueError("--device goes with --target and --draft; give both.")
    if options.target:
        _pair_check().check(options)
    steps = options.num_steps or DEFAULTS.num_steps
    particles = options.num_particles or DEFAULTS.num_particles
    SMCConfig(num_particles=particles, num_steps=steps, max_lag=options.max_lag).validate()


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield all findings, each as soon as it is available."""
    if options.kernels:
        steps = options.num_steps or DEFAULTS.num_steps
        particles = options.num_particles or DEFAULTS.num_particles
        yield from machine.kernel_findings(particles, steps)
        return
    failed = False
    for finding in machine.findings():
        failed = failed or finding.level == FAIL
        yield finding
    if not options.target:
        return
    if failed:
        yield warning("pair", "not looked at", "Fix what failed above first.")
        return
    yield from _pair_check().findings(options)


def _pair_check() -> ModuleType:
    """Return the tools' module that checks a pair; raise ValueError if it is not installed."""
    found = extensions.loaded(extensions.DOCTOR, "pair")
    if found is None:
        raise ValueError(
            f"--target and --draft are checked by {extensions.PACKAGE}, which is not installed. "
            f"{extensions.INSTALL} Without them doctor checks installation and device."
        )
    return found


main = command(parser, run)
