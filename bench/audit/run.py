"""Audit SGLang's algorithms and ours, and measure which faults `sglang-smc audit` finds.

    .venv/bin/python bench/audit --correct --answers 120 --copies 30 --publish

Servers on this machine's CPU: correct ones, SMC's approximate modes, and SGLang's workers and ours
with a fault each (`faults/`), of verification or of KV, which are asked for copies alone.
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
import study
from audit.faults.audit_faults import KV, OWN, STOCK
from intervals import wilson
from pair.task import held_out
from results import markdown_table, provenance

from sglang_smc.options.server import CPU_OVERLAP_ENV
from sglang_smc_tools.demo.serving import Launch, ServerError, reason_in, running
from sglang_smc_tools.real.models import CACHE, MODELS, checkpoint
from sglang_smc_tools.testing import audit, audit_texts
from sglang_smc_tools.testing.audit_pressure import sweep
from sglang_smc_tools.testing.checks import PROMPTS
from sglang_smc_tools.testing.copies import copies_of
from sglang_smc_tools.testing.endpoint import Endpoint, open_endpoint
from sglang_smc_tools.testing.report import Result, as_dict

FAULTS = Path(__file__).with_name("faults")
TOKENS = 43  # of an answer, as the shipped pair gives
_CPU = {"device": "cpu", "dtype": "float32", "context_length": 1024, "log_level": "error"}
_CPU |= {"max_running_requests": 32, "model_path": str(study.PAIR / "target")}


class AuditedServer(NamedTuple):
    """A server under audit."""

    name: str
    arguments: Mapping[str, Any] = MappingProxyType({})
    fault: str = ""
    copies: bool = False  # whether it is asked for copies alone
    environment: Mapping[str, str] = MappingProxyType({})
    is_swept: bool = False  # whether requests have all depths, and weights are loaded between them
    prompts: int = len(PROMPTS)
    adapters: str = ""  # of LoRA, a letter each: the audited one, and those of others beside it

    @property
    def slug(self) -> str:
        return study.slug_of(self.name)

    @property
    def is_lossless(self) -> bool:
        return self.arguments.get("speculative_smc_mode", "exact") == "exact" and not self.fault


def _own(algorithm: str, draft: str = "", topk: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the arguments of an algorithm, with a tree of ``topk`` at each of four steps."""
    found = {"speculative_algorithm": algorithm, **more}
    if draft:
        found["speculative_draft_model_path"] = str(study.PAIR / draft)
    if topk:
        found |= {"speculative_num_steps": 4, "speculative_eagle_topk": topk}
        found["speculative_num_draft_tokens"] = 5 if topk == 1 else 16
    return found


def _smc(mode: str, draft: str = "draft") -> dict[str, Any]:
    fixed = {"speculative_num_steps": 8, "speculative_smc_adaptive": "off"}
    return _own("SMC", draft, speculative_smc_mode=mode, **fixed)


def _shape(num_particles: int, num_steps: int) -> dict[str, int]:
    return {"speculative_smc_num_particles": num_particles, "speculative_num_steps": num_steps}


def _copying(name: str, fault: str = "") -> AuditedServer:
    """Return a server that is asked for copies alone, by its name in `COPYING`."""
    more = {"copies": True, "environment": _RETRACTING if fault == "retracted" else {}}
    return AuditedServer(
        f"{name} copying{fault and f' with {fault}'}", COPYING[name], fault, **more
    )


CHAIN = _own("STANDALONE", "draft", 1)
EAGLE_TREE = _own("EAGLE3", "eagle3", 4)
_ONE_CHAIN = _smc("exact") | _shape(1, 8)
_MATCHES = _smc("exact", "") | {"speculative_smc_ngram_matches": True}
_ONE_STEP = {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
_FEW_SLOTS = {"max_total_tokens": 8192, "chunked_prefill_size": 256}  # retracts under load
_RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
_NO_RADIX = {"disable_radix_cache": True}
_PAGES = {"page_size": 16}
_HOST = {"max_total_tokens": 4096, "enable_hierarchical_cache": True, "hicache_ratio": 3.0}
COPYING = {"STANDALONE": CHAIN, "EAGLE-3": EAGLE_TREE, "SMC exact": _smc("exact")}
COPYING = {name: arguments | _FEW_SLOTS for name, arguments in COPYING.items()}
SIMULATED = AuditedServer("simulated")
COARSE = ("bfloat16", "float16")
_HEADS = "eagle3", "mtp", "dflash", "dspark"  # of the shipped pair
_REAL = {"model_path": "smollm2", "max_total_tokens": 16_384}
_REAL_HEAD = str(CACHE / "smollm2-eagle3")  # as bench/README.md makes it
#: Of SmolLM2, likewise; few rows of the target and few prompts, for a CPU's sake.
REAL: dict[str, dict[str, Any]] = {
    "AR": {},
    "EAGLE-3 tree": _own("EAGLE3", _REAL_HEAD, 4),
    "NGRAM": _own("NGRAM"),
    "exact by n-grams": _MATCHES | _shape(2, 4),
    "exact by eagle3": _smc("exact", _REAL_HEAD) | _shape(2, 3),
}
#: Names of correct servers that answer by rows of the target, and their arguments.
LOSSLESS: dict[str, dict[str, Any]] = {
    "AR": {},
    "AR without overlap": {"disable_overlap_schedule": True},
    "AR without radix cache": _NO_RADIX,
    "AR of pages": _PAGES,
    "AR with host cache": _HOST,
    "STANDALONE chain": CHAIN,
    "STANDALONE chain without radix cache": CHAIN | _NO_RADIX,
    "STANDALONE chain of pages": CHAIN | _PAGES,
    "STANDALONE tree": _own("STANDALONE", "draft", 4),
    "EAGLE-3 chain": _own("EAGLE3", "eagle3", 1),
    "EAGLE-3 tree": EAGLE_TREE,
    "EAGLE-3 tree without radix cache": EAGLE_TREE | _NO_RADIX,
    "NGRAM": _own("NGRAM"),
    "NGRAM without radix cache": _own("NGRAM") | _NO_RADIX,
    "DFLASH": _own("DFLASH", "dflash"),
    "SMC exact": _smc("exact"),
    "SMC exact without radix cache": _smc("exact") | _NO_RADIX,
    "SMC exact of pages": _smc("exact") | _PAGES,
    "SMC exact with host cache": _smc("exact") | _HOST,
    "SMC exact N=1": _ONE_CHAIN,
    "SMC exact N=16 K=4": _smc("exact") | _shape(16, 4),
    **{f"SMC exact by {head}": _smc("exact", head) for head in _HEADS},
    "SMC exact by n-grams": _MATCHES,
}
SERVERS = (
    SIMULATED,
    *(AuditedServer(name, arguments) for name, arguments in LOSSLESS.items()),
    AuditedServer("SMC exact overlapped", _smc("exact"), environment={CPU_OVERLAP_ENV: "1"}),
    AuditedServer("SMC exact of all depths", _smc("exact"), is_swept=True),
    AuditedServer("AR with adapters", adapters="abc"),
    AuditedServer("SMC exact with adapters", _smc("exact") | _shape(2, 4), adapters="abc"),
    *(
        AuditedServer(f"SmolLM2 {name}", {**more, **_REAL}, prompts=2)
        for name, more in REAL.items()
    ),
    AuditedServer("SMC auto", _smc("auto")),
    AuditedServer("SMC default", _smc("smc")),
    *(AuditedServer(f"AR in {dtype}", {"dtype": dtype}) for dtype in COARSE),
    *(
        AuditedServer(f"SMC exact in {dtype}", {**_smc("exact"), "dtype": dtype})
        for dtype in COARSE
    ),
    *(AuditedServer(f"STANDALONE with {fault}", CHAIN, fault) for fault in STOCK),
    AuditedServer("STANDALONE of one step with bonus", {**CHAIN, **_ONE_STEP}, "bonus"),
    *(AuditedServer(f"SMC of one chain with {fault}", _ONE_CHAIN, fault) for fault in OWN),
    *map(_copying, COPYING),
    AuditedServer(
        "STANDALONE retracting", COPYING["STANDALONE"], copies=True, environment=_RETRACTING
    ),
    *(_copying("STANDALONE", fault) for fault in KV[:-1]),
    *(_copying("SMC exact", fault) for fault in KV[:-2]),
    _copying("EAGLE-3", KV[-1]),
)


def measure(server: AuditedServer, options: argparse.Namespace) -> dict[str, Any]:
    """Audit a server so often; return the first audit and those that failed, or what went wrong."""
    begin = time.monotonic()
    facts = {"name": server.name, "fault": server.fault, "is_lossless": server.is_lossless}
    settings = {k: v for k, v in {**_CPU, **server.arguments}.items() if not k.endswith("path")}
    settings |= {**server.environment, "answers": options.answers, "copies": options.copies}
    facts |= provenance(settings)
    try:
        audits = list(simulated(options) if server is SIMULATED else audited(server, options))
    except ServerError as error:
        log = options.output_dir / f"{server.slug}.log"
        reason = reason_in(log.read_text(errors="replace"), str(error))
        return {**facts, "error": f"does not start: {reason}", "audits": []}
    except ValueError as error:
        return {**facts, "error": f"stops: {error}", "audits": []}
    facts |= {"num_audits": len(audits), "seconds": round(time.monotonic() - begin, 1)}
    return {**facts, "audits": [audits[0], *(one for one in audits[1:] if not one["passed"])]}


def audited(server: AuditedServer, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start a server, and audit it."""
    from audit.adapters import make_adapter  # imports torch

    path = os.pathsep.join(filter(None, (str(FAULTS), os.environ.get("PYTHONPATH", ""))))
    arguments = {**_CPU, **server.arguments}
    if (name := arguments["model_path"]) in MODELS:
        arguments["model_path"] = str(checkpoint(name))
    folder = options.output_dir
    how = {"target": arguments["model_path"], "scale": 0.1}
    names = enumerate(server.adapters, 4)
    if paths := [make_adapter(folder / name, rank=n, seed=n, **how) for n, name in names]:
        arguments["lora_paths"] = [f"{Path(path).name}={path}" for path in paths]
    given = {"PYTHONPATH": path, "AUDIT_FAULT": server.fault, **server.environment}
    launch = Launch(arguments, given, log=folder / f"{server.slug}.log")
    total = options.audits * most(server, options)
    with running(launch) as (url,), study.bar(total=total, disable=None, leave=False) as line:
        for seed in range(options.audits):
            end = time.monotonic() + 60 * options.minutes
            others = {"model": server.adapters[:1], "adapters": server.adapters}
            endpoint = open_endpoint(url, deadline=end, on_answers=line.update, **others)
            endpoint.client.deadline = end + 60 * options.minutes
            if server.is_swept:
                sweep(endpoint)
                endpoint.weights = arguments["model_path"]
            if server.copies:
                yield copied(endpoint, options.copies, seed)
                continue
            copies = () if server.fault else copies_of(options.copies, 6, seed)
            how = {"num_answers": options.answers, "seed": seed}
            prompts = prompts_of(seed)[: server.prompts]
            yield as_dict(audit.audit(endpoint, prompts, copies, **how).results)


def most(server: AuditedServer, options: argparse.Namespace) -> int:
    """Return the most answers of one audit."""
    if server.copies:
        return audit_texts.num_copies(options.copies)
    return audit.most_answers(options.answers, PROMPTS, 0 if server.fault else options.copies)


def copied(endpoint: Endpoint, count: int, seed: int) -> dict[str, Any]:
    """Return the checks of copies, and with how few answers one of them would have failed."""
    copies = copies_of(count, 6, seed)
    samples = audit_texts.ask_copies(endpoint, copies)
    how = {"rounding": endpoint.rounding, "level": audit.LEVEL, "seed": seed}

    def first(size: int) -> list[Result]:
        some = [each[:size] for each in samples]
        return audit_texts.judge_copies(copies[:size], some, **how)[0]

    failing = (size for size in range(1, count + 1) if any(one.failed for one in first(size)))
    until = next(failing, 0) * len(audit_texts.WIDTHS)
    return as_dict(first(count), answers_until_found=until)


def prompts_of(seed: int) -> Sequence[str]:
    """Return the prompts of an audit: the tool's own for the first, else questions."""
    some = range(len(PROMPTS) * seed, len(PROMPTS) * (seed + 1))
    return [held_out(index).question for index in some] if seed else PROMPTS


def simulated(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Audit tokens that are drawn from known distributions, sharp and flat ones."""
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(300, 64)) * draw.uniform(0.5, 6.0, (300, 1))
    logs = np.sort(scores - np.logaddexp.reduce(scores, 1, keepdims=True))[:, ::-1]
    for seed in range(options.simulated):
        draw = np.random.default_rng(seed)
        size = TOKENS * options.answers
        tokens = [_drawn(draw, logs, round(size * check.share)) for check in audit.CHECKS]
        pairs = *zip(audit.CHECKS, tokens, strict=True), (audit.TOGETHER, [*chain(*tokens)])
        results = [audit.result_of(*pair) for pair in pairs]
        for width in audit_texts.WIDTHS:
            edge = _copied(draw, options.copies, width > 1)
            results.append(audit_texts.result_of_copies(width, edge, 1e-3, audit.LEVEL))
        yield as_dict(results)


def _copied(draw: np.random.Generator, size: int, is_loaded: bool) -> audit_texts.Copied:
    """Draw the answers to copies at the edge of what rounding may do."""
    greedy = 3 * size // 4
    gaps = 3e-3 * (draw.random(greedy * TOKENS) < audit_texts.STRAY)
    tails = draw.random((size - greedy) * TOKENS)
    lacks = draw.random((2, size)) < 0.3
    alone = lacks[1] if is_loaded else lacks[1, :0]
    columns = gaps, tails, np.zeros(size, bool), lacks[0], alone
    return audit_texts.Copied(greedy, *(column.tolist() for column in columns))


def _drawn(draw: np.random.Generator, logs: np.ndarray, size: int) -> list[audit.Compared]:
    ranks = draw.random(size)
    laws = logs[draw.integers(len(logs), size=size)]
    masses = np.exp(laws)
    token = (masses.cumsum(1) < ranks[:, None]).sum(1).clip(max=63)
    innovations = laws[range(size), token] - (masses * laws).sum(1)
    places = np.minimum(draw.geometric(0.6, size) - 1, 4)
    most = laws[:, 0] - (masses * laws).sum(1)
    columns = ranks, innovations, token == 0, masses[:, 0], places, most
    return list(map(audit.Compared, *(column.tolist() for column in columns)))


def row_of(told: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    audits = told["audits"]
    is_lossless = "yes" if told["is_lossless"] else "no"
    if not audits:
        return [told["name"], is_lossless, "", "none", told["error"].replace("|", "/"), "", ""]
    checks = _with(audits, "fail") or ["none"]
    if undecided := _with(audits[:1], "not enough data"):
        checks[-1] += f"; too few tokens: {', '.join(undecided)}"
    first = audits[0]
    total = told.get("num_audits", len(audits))
    failed = sum(not audit["passed"] for audit in audits)
    _, low, high, _ = wilson(failed, total)
    share = f"{failed} of {total}" + f" ({low:.1%} to {high:.1%})" * (total > 1)
    answers = sum(one["num_answers"] for one in first["results"] if one["check"] != "together")
    columns = str(answers), share, ", ".join(checks), _shift(first), _corrupted(first)
    return [told["name"], is_lossless, *columns]


def _with(audits: Sequence[dict[str, Any]], verdict: str) -> list[str]:
    results = chain(*(audit["results"] for audit in audits))
    return sorted({one["check"] for one in results if one["verdict"] == verdict})


def _shift(told: dict[str, Any]) -> str:
    found = (one for one in told["results"] if one["check"] == "sampled" and one["standard_error"])
    return "".join(f"{one['estimate']:+.3f} ± {2 * one['standard_error']:.3f}" for one in found)


def _corrupted(told: dict[str, Any]) -> str:
    """Return how many copies are corrupted, or within how many that is found."""
    if (until := told.get("answers_until_found")) is not None:
        return f"found within {until}" if until else "nothing found"
    some = [one for one in told["results"] if one["check"].startswith("copies")]
    wrong = sum(round(one["num_answers"] * (one["estimate"] or 0.0)) for one in some)
    return f"{wrong} of {sum(one['num_answers'] for one in some)}" if some else ""


def told_of(server: AuditedServer, folder: Path) -> dict[str, Any]:
    """Return what a folder has of a server, empty for nothing."""
    path = folder / f"{server.slug}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_table(folder: Path) -> None:
    """Write ``audit.md`` of all results in a folder: servers without a fault, then those with."""
    parts = list[str]()
    head = "server,lossless,answers,audits failed,checks failed,log p + H at T = 1,corrupted copies"
    for title, has_fault in (("Servers", False), ("Faults", True)):
        some = [server for server in SERVERS if bool(server.fault) == has_fault]
        rows = [row_of(told) for one in some if (told := told_of(one, folder))]
        parts.append(f"## {title}\n\n{markdown_table(head.split(','), rows)}\n")
    (folder / "audit.md").write_text("\n".join(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Audit the servers; return exit status 0 if it completes."""
    made = study.parser("audit", __doc__ or "")
    add = made.add_argument
    positive = study.positive
    add("--answers", type=positive, default=400, help="of an audit")
    add("--copies", type=positive, default=100, help="under each load")
    add("--audits", type=positive, default=1, help="of each server")
    add("--minutes", type=positive, default=15, help="of an audit, at most")
    add("--correct", action="store_true", help="no servers with a fault")
    add("--simulated", type=positive, default=800, help="audits without a server")
    study.add_selection(made)
    options = made.parse_args(argv)
    return study.main_of(lambda: run(options), study.GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    some = study.selected(SERVERS, options.only)
    servers = [one for one in some if not (options.correct and one.fault)]
    if options.list:
        print(*(server.slug for server in servers), sep="\n")
        return
    study.prepare_folder(options.output_dir)
    left = [one for one in servers if options.fresh or not told_of(one, options.output_dir)]
    asked = options.audits * sum(most(one, options) for one in left if one is not SIMULATED)
    print(f"{len(left)} servers, at most {asked} answers; {options.minutes} minutes an audit.")
    with study.bar(total=len(servers), unit=" servers", disable=None) as line:
        for server in servers:
            if server in left:
                told = json.dumps(measure(server, options), indent=1)
                (options.output_dir / f"{server.slug}.json").write_text(told + "\n")
            line.write("  ".join(row_of(told_of(server, options.output_dir))))
            line.update()
    write_table(options.output_dir)
    if options.publish:
        from sglang_smc.upstream import SUPPORTED, release  # imports SGLang

        folder = study.PUBLISHED / "audit" / (release() if release() != SUPPORTED[-1] else "")
        study.copy(options.output_dir.glob("*.json"), folder)
        write_table(folder)
