"""Parse the command line of ``sglang-smc check`` and run the checks."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_smc.command.program import command, number, positive
from sglang_smc_tools.commands import bar, prompts_in
from sglang_smc_tools.testing import checks, report
from sglang_smc_tools.testing.checks import FEW, PROMPTS
from sglang_smc_tools.testing.model import SMCPair, connect, started
from sglang_smc_tools.testing.report import Result

CHECKS = {
    "equal-models": checks.check_equal_models,
    "evidence": checks.check_evidence,
    "draft-distribution": checks.check_draft_law,
    "exact-answers": checks.check_exact_answers,
}
WITH_FEW = ("draft-distribution", "exact-answers")  # prompts: many answers to each
NAMES = (*CHECKS, *(f"distribution-of-{mode}" for mode in ("exact", "smc", "auto")))


def _run(arguments: argparse.Namespace) -> int:
    """Print all results; return the exit status: 0 if nothing failed, 1 if a check failed."""
    begin = time.monotonic()
    _check(arguments)
    prompts = prompts_in(arguments.prompts) if arguments.prompts else PROMPTS
    with _models(arguments) as pair:
        results = run(pair, prompts, arguments.only, arguments.scale, arguments.seed)
    seconds = time.monotonic() - begin
    print(f"{report.as_text(results)} {seconds:.0f} s.")
    if arguments.json:
        about = {"seed": arguments.seed, "scale": arguments.scale, "seconds": round(seconds, 1)}
        arguments.json.write_text(json.dumps(report.as_dict(results, **about), indent=2) + "\n")
    return int(any(result.failed for result in results))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc check",
        description="Tests that the answers of SMC, with your pair of models, have the target's "
        "distribution, on a running server (--url) or on its own (--target and --draft).",
    )
    add = result.add_argument
    add("--url", help="a running SMC server, such as http://localhost:30000")
    add("--draft-url", help="a server of the draft alone, which two checks use")
    add("--api-key", help="the server's API key")
    add("--target", help="a model folder, for servers that this command starts")
    add("--draft", help="the draft's folder, likewise")
    add("--device", help="device of these servers; default: as SGLang")
    add("--dtype", default="auto", help="their dtype; default auto")
    add("--tp-size", type=positive, default=1, help="their --tp-size; default 1")
    add("--num-particles", type=positive, default=8, help="their N; default 8")
    add("--num-steps", type=positive, default=8, help="their K; default 8")
    add("--prompts", type=Path, help="a text file, one prompt a line")
    add("--only", type=_names, default=NAMES, help=f"checks, of {', '.join(NAMES)}; default all")
    times = "factor of the number of answers: 4 halves each error; default 1"
    add("--scale", type=number(float, 0.1, 1000), default=1.0, help=times)
    add("--seed", type=int, default=0, help="first seed of the answers; default 0")
    add("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    return result


def run(
    pair: SMCPair,
    prompts: Sequence[str] = PROMPTS,
    only: Sequence[str] = NAMES,
    scale: float = 1.0,
    seed: int = 0,
) -> list[Result]:
    """Run the checks ``only``, in the order of `NAMES`, with a progress bar on a terminal."""
    results = []
    with bar(unit=" answers", disable=None, leave=False) as line:
        for model in filter(None, pair):
            model.on_answers = line.update
        for name in (name for name in NAMES if name in only):
            line.set_description(name)
            results.append(_result(name, pair, prompts, scale, seed))
    return results


def _result(name: str, pair: SMCPair, prompts: Sequence[str], scale: float, seed: int) -> Result:
    """Run one check with ``scale`` times its own number of answers, each with seeds of its own."""
    smc, draft = pair
    check: Any = CHECKS.get(name, checks.check_mode)
    defaults = check.__kwdefaults__
    how = {"seed": seed + defaults["seed"]}
    if name == "equal-models":
        smc = smc if smc.same_models or not (draft and draft.settings) else draft
    else:
        how["num_answers"] = round(scale * defaults["num_answers"])
    if "draft" in defaults:
        how["draft"] = draft
    if name not in CHECKS:
        how["mode"] = name.removeprefix("distribution-of-")
    return check(smc, prompts=prompts[:FEW] if name in WITH_FEW else prompts, **how)


@contextlib.contextmanager
def _models(arguments: argparse.Namespace) -> Iterator[SMCPair]:
    if arguments.url:
        smc = connect(arguments.url, api_key=arguments.api_key)
        draft = None
        if arguments.draft_url:
            url = arguments.draft_url
            key = arguments.api_key
            draft = connect(url, api_key=key, needs_smc=False)
        yield SMCPair(smc, draft)
        return
    names = ("device", "dtype", "tp_size")
    given = {name: getattr(arguments, name) for name in names}
    given["speculative_num_steps"] = arguments.num_steps
    given["speculative_smc_num_particles"] = arguments.num_particles
    with started(arguments.target, arguments.draft, **given) as pair:
        yield pair


def _check(arguments: argparse.Namespace) -> None:
    own = bool(arguments.target), bool(arguments.draft)
    if bool(arguments.url) == any(own) or any(own) != all(own):
        raise ValueError(
            "needed: either --url of a running SMC server, or both --target and --draft, for "
            "servers that this command starts."
        )
    if arguments.draft_url and not arguments.url:
        raise ValueError("--draft-url goes with --url; own servers know their draft. Leave it out.")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(NAMES)}")
    return names


main = command(parser, _run)
