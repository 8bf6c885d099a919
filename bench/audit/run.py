"""Measure which faults `sglang-smc audit` finds, and which correct servers it passes.

    .venv/bin/python bench/audit                      # all servers, a file of results for each
    .venv/bin/python bench/audit --only 'smc-*' --publish

Servers of the shipped pair on this machine's CPU, one after the other: correct ones, SMC's
approximate modes, and SGLang's workers and ours with a fault each (`faults/`), of verification or
of KV: those are asked for copies alone. How often a correct one fails, `simulated` tells.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from audit.faults.audit_faults import KV, OWN, STOCK
from intervals import wilson
from pair.task import held_out
from results import markdown_table, provenance
from study import (
    GOES_ON,
    PAIR,
    PUBLISHED,
    add_selection,
    copy,
    main_of,
    parser,
    positive,
    prepare_folder,
    selected,
    slug_of,
)

from sglang_smc.tools.demo.serving import Launch, running
from sglang_smc.tools.testing.audit import CHECKS, LEVEL, TOGETHER, Compared, audit, result_of
from sglang_smc.tools.testing.audit_texts import (
    STRAY,
    WIDTHS,
    Copied,
    ask_copies,
    judge_copies,
    result_of_copies,
)
from sglang_smc.tools.testing.checks import PROMPTS
from sglang_smc.tools.testing.copies import copies_of
from sglang_smc.tools.testing.endpoint import Endpoint, open_endpoint
from sglang_smc.tools.testing.report import Result, as_dict

FAULTS = Path(__file__).with_name("faults")
TOKENS = 43  # of an answer, as the shipped pair gives
_CPU = {"device": "cpu", "dtype": "float32", "context_length": 1024, "log_level": "error"}
_CPU |= {"max_running_requests": 32, "model_path": str(PAIR / "target")}


class Server(NamedTuple):
    """A server under audit."""

    name: str
    arguments: Mapping[str, Any] = MappingProxyType({})
    fault: str = ""
    is_lossless: bool = True
    copies: bool = False  # whether it is asked for copies alone

    @property
    def slug(self) -> str:
        return slug_of(self.name)


def _own(algorithm: str, draft: str = "", topk: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the arguments of an algorithm, with a tree of ``topk`` at each of four steps."""
    found = {"speculative_algorithm": algorithm, **more}
    if draft:
        found["speculative_draft_model_path"] = str(PAIR / draft)
    if topk:
        found |= {"speculative_num_steps": 4, "speculative_eagle_topk": topk}
        found["speculative_num_draft_tokens"] = 5 if topk == 1 else 16
    return found


def _smc(mode: str) -> dict[str, Any]:
    return _own("SMC", "draft", speculative_num_steps=8, speculative_smc_mode=mode)


CHAIN = _own("STANDALONE", "draft", 1)
_ONE_CHAIN = {**_smc("exact"), "speculative_smc_num_particles": 1}
_ONE_STEP = {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
_FEW_SLOTS = {"max_total_tokens": 8192, "chunked_prefill_size": 256}  # retracts under load
COPYING = {
    "STANDALONE": CHAIN | _FEW_SLOTS,
    "EAGLE-3": _own("EAGLE3", "eagle3", 4) | _FEW_SLOTS,
    "SMC exact": _smc("exact") | _FEW_SLOTS,
}
SIMULATED = Server("simulated")
COARSE = ("bfloat16", "float16")
SERVERS = (
    SIMULATED,
    Server("AR"),
    Server("STANDALONE chain", CHAIN),
    Server("EAGLE-3 chain", _own("EAGLE3", "eagle3", 1)),
    Server("EAGLE-3 tree", _own("EAGLE3", "eagle3", 4)),
    Server("NGRAM", _own("NGRAM")),
    Server("SMC exact", _smc("exact")),
    Server("SMC auto", _smc("auto"), is_lossless=False),
    Server("SMC default", _smc("smc"), is_lossless=False),
    *(Server(f"AR in {dtype}", {"dtype": dtype}) for dtype in COARSE),
    *(Server(f"SMC exact in {dtype}", {**_smc("exact"), "dtype": dtype}) for dtype in COARSE),
    *(Server(f"STANDALONE with {fault}", CHAIN, fault, is_lossless=False) for fault in STOCK),
    Server("STANDALONE of one step with bonus", {**CHAIN, **_ONE_STEP}, "bonus", False),
    *(Server(f"SMC of one chain with {fault}", _ONE_CHAIN, fault, False) for fault in OWN),
    *(Server(f"{name} copying", arguments, copies=True) for name, arguments in COPYING.items()),
    *(
        Server(f"{name} copying with {fault}", COPYING[name], fault, False, copies=True)
        for name, faults in (("STANDALONE", KV[:-1]), ("SMC exact", KV[:-1]), ("EAGLE-3", KV[-1:]))
        for fault in faults
    ),
)


def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Audit a server so often, and return the first audit and those that failed."""
    begin = time.monotonic()
    audits = list(simulated(options) if server is SIMULATED else audited(server, options))
    facts = {"name": server.name, "fault": server.fault, "is_lossless": server.is_lossless}
    facts |= {"num_audits": len(audits), "seconds": round(time.monotonic() - begin, 1)}
    settings = {k: v for k, v in {**_CPU, **server.arguments}.items() if not k.endswith("path")}
    kept = [audits[0], *(one for one in audits[1:] if not one["passed"])]
    return {**facts, "audits": kept, **provenance({"answers": options.answers, **settings})}


def audited(server: Server, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start a server, and audit it."""
    path = os.pathsep.join(filter(None, (str(FAULTS), os.environ.get("PYTHONPATH", ""))))
    launch = Launch(
        {**_CPU, **server.arguments},
        {"PYTHONPATH": path, "AUDIT_FAULT": server.fault},
        log=options.output_dir / f"{server.slug}.log",
    )
    with running(launch) as (url,):
        for seed in range(options.audits):
            how = {"num_answers": options.answers, "seed": seed}
            if server.copies:
                yield copied(open_endpoint(url), options.copies, seed)
                continue
            yield as_dict(audit(open_endpoint(url), prompts_of(seed), **how).results)


def copied(endpoint: Endpoint, count: int, seed: int) -> dict[str, Any]:
    """Return the checks of copies, and with how few answers one of them would have failed."""
    copies = copies_of(count, 6, seed)
    samples = ask_copies(endpoint, copies)

    def first(size: int) -> list[Result]:
        some = [each[:size] for each in samples]
        return judge_copies(copies[:size], some, endpoint.rounding, LEVEL, seed)[0]

    failing = (size for size in range(1, count + 1) if any(one.failed for one in first(size)))
    until = next(failing, 0) * len(WIDTHS)
    return as_dict(first(count), answers_until_found=until)


def prompts_of(seed: int) -> Sequence[str]:
    """Return the prompts of an audit: the tool's own for the first, else questions."""
    if seed == 0:
        return PROMPTS
    return [held_out(len(PROMPTS) * seed + index).question for index in range(len(PROMPTS))]


def simulated(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Audit tokens that are drawn from known distributions, sharp and flat ones."""
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(300, 64)) * draw.uniform(0.5, 6.0, (300, 1))
    logs = np.sort(scores - np.logaddexp.reduce(scores, 1, keepdims=True))[:, ::-1]
    for seed in range(options.simulated):
        draw = np.random.default_rng(seed)
        sizes = (round(TOKENS * check.share * options.answers) for check in CHECKS)
        tokens = [_drawn(draw, logs, size) for size in sizes]
        pairs = *zip(CHECKS, tokens, strict=True), (TOGETHER, [*chain(*tokens)])
        results = [result_of(*pair) for pair in pairs]
        for width in WIDTHS:
            edge = _copied(draw, options.copies, width > 1)
            results.append(result_of_copies(width, edge, 1e-3, LEVEL))
        yield as_dict(results)


def _copied(draw: np.random.Generator, size: int, is_loaded: bool) -> Copied:
    """Draw the answers to copies at the edge of what rounding may do."""
    greedy = 3 * size // 4
    gaps = 3e-3 * (draw.random(greedy * TOKENS) < STRAY)
    tails, lacks = draw.random((size - greedy) * TOKENS), draw.random((2, size)) < 0.3
    alone = lacks[1] if is_loaded else lacks[1, :0]
    columns = gaps, tails, np.zeros(size, bool), lacks[0], alone
    return Copied(greedy, *(column.tolist() for column in columns))


def _drawn(draw: np.random.Generator, logs: np.ndarray, size: int) -> list[Compared]:
    ranks, laws = draw.random(size), logs[draw.integers(len(logs), size=size)]
    masses = np.exp(laws)
    token = (masses.cumsum(1) < ranks[:, None]).sum(1).clip(max=63)
    innovations = laws[range(size), token] - (masses * laws).sum(1)
    places = np.minimum(draw.geometric(0.6, size) - 1, 4)
    columns = ranks, innovations, token == 0, masses[:, 0], places
    return list(map(Compared, *(column.tolist() for column in columns)))


def row_of(told: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    audits = told["audits"]
    failed = sum(not audit["passed"] for audit in audits)
    checks = {
        one["check"] for each in audits for one in each["results"] if one["verdict"] == "fail"
    }
    sampled = audits[0]["results"][0]
    if (until := audits[0].get("answers_until_found")) is None:
        gap = f"{sampled['estimate']:+.3f} ± {2 * sampled['standard_error']:.3f}"
    else:
        gap = f"found within {until} copies" if until else "nothing found"
    is_lossless = "yes" if told["is_lossless"] else "no"
    names = ", ".join(sorted(checks)) or "none"
    total = told.get("num_audits", len(audits))
    _, low, high, _ = wilson(failed, total)
    share = f"{failed} of {total}" + f" ({low:.1%} to {high:.1%})" * (total > 1)
    return [told["name"], is_lossless, share, names, gap]


def write_table(folder: Path) -> None:
    """Write ``audit.md`` of all results in a folder."""
    found = [folder / f"{server.slug}.json" for server in SERVERS]
    rows = [row_of(json.loads(path.read_text())) for path in found if path.exists()]
    headers = (
        "server",
        "lossless",
        "audits failed",
        "checks that failed",
        "log p + H at T = 1; copies",
    )
    (folder / "audit.md").write_text(markdown_table(headers, rows) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Audit the servers; return exit status 0 if it completes."""
    made = parser("audit", __doc__ or "")
    made.add_argument("--answers", type=positive, default=400, help="of an audit")
    made.add_argument("--copies", type=positive, default=100, help="under each load")
    made.add_argument("--audits", type=positive, default=1, help="of each server")
    made.add_argument("--simulated", type=positive, default=800, help="audits without a server")
    add_selection(made)
    options = made.parse_args(argv)
    return main_of(lambda: run(options), GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    servers = selected(SERVERS, options.only)
    if options.list:
        print(*(server.slug for server in servers), sep="\n")
        return
    prepare_folder(options.output_dir)
    for server in servers:
        path = options.output_dir / f"{server.slug}.json"
        if options.fresh or not path.exists():
            path.write_text(json.dumps(measure(server, options), indent=1) + "\n")
        print(*row_of(json.loads(path.read_text())), sep="  ", flush=True)
    write_table(options.output_dir)
    if options.publish:
        results = (*options.output_dir.glob("*.json"), options.output_dir / "audit.md")
        copy(results, PUBLISHED / "audit")
