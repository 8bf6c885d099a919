"""Run smoke tests: engines in every mode, the requests of a chat, and matching numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpu import kinds
from gpu.default_server import default_case
from gpu.kinds import Kind
from gpu.stages import Attempt, Case, Places
from pair.task import check, held_out, messages
from speed.engines import SPECULATION, Launch
from speed.grid import CHAIN
from speed.remote import EngineError, RemoteEngine, running
from study import PAIR, code_fingerprint, digest

from sglang_smc.options.server import MODES

SMC_SETTINGS = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": 8,
    "speculative_smc_num_particles": 8,
}
NUM_PROBLEMS = 16
#: Far beyond the problems of bench/demo.py and bench/fidelity.
FIRST_PROBLEM = 2_000_000
ANSWER_TOKENS = 160
ANSWERS, KINDS, MIXED, SAME = "answers", "kinds", "all kinds at once", "log-probabilities"
REPLAYED = "kinds that graphs know at once"
#: bfloat16 has 8 bits: logits of 20 are exact to 0.1. A larger difference is an error.
TOLERANCE = 0.15
FIRST_ROUND = 9  # tokens
REFERENCE = "smc-torch"
KNOWN = ("plain", "greedy", "top-p", "top-k", "top-p and top-k")
START_SECONDS = 40.0
#: SGLang compiles some kernels for the KV of models this small at their first start.
COMPILE_SECONDS = 45.0


@dataclass(frozen=True)
class SmokeEngine:
    """An engine over the shipped pair, which is small and trained, so that texts are meaningful."""

    slug: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    on_a_cpu: bool = False

    @property
    def is_smc(self) -> bool:
        return self.engine.get("speculative_algorithm") == "SMC"

    @property
    def has_graphs(self) -> bool:
        """Return whether rounds are replayed."""
        return self.is_smc and "speculative_smc_round_graph" not in self.engine

    @property
    def parts(self) -> list[str]:
        return [ANSWERS, KINDS, MIXED, *([REPLAYED, SAME] if self.is_smc else [])]


EAGER = {"speculative_smc_round_graph": "off"}
TORCH = {"speculative_smc_kernels": "torch"}
#: Torch's operations first: the reference of the others.
ENGINES = (
    SmokeEngine(REFERENCE, {**SMC_SETTINGS, **EAGER, **TORCH}, on_a_cpu=True),
    SmokeEngine("smc-kernels", {**SMC_SETTINGS, **EAGER}),
    SmokeEngine("smc-graphs", SMC_SETTINGS),
    SmokeEngine("ar", on_a_cpu=True),
    SmokeEngine("standalone", SPECULATION[CHAIN]),
)


def smoke_cases(places: Places, *, device: str) -> list[Case]:
    """Return a server with default settings, then an engine for each way to run rounds."""
    engines = [one for one in ENGINES if device != "cpu" or one.on_a_cpu]
    return [default_case(places, device), *(_case(one, places, device) for one in engines)]


def _case(one: SmokeEngine, places: Places, device: str) -> Case:
    launch = launch_of(one, device)
    engine = {k: v for k, v in launch.arguments.items() if not k.endswith("model_path")}
    identity = {"engine": engine, "tests": digest([Path(__file__), Path(kinds.__file__)])}
    identity |= code_fingerprint()
    arguments = ", ".join(f"{name}={value!r}" for name, value in launch.arguments.items())
    return Case(
        one.slug,
        {f"{one.slug} {part}": identity for part in one.parts},
        START_SECONDS + (COMPILE_SECONDS if one.slug == REFERENCE else 0.0),
        partial(run_engine, one, launch, places),
        f"sglang.Engine({arguments})",
    )


def launch_of(one: SmokeEngine, device: str) -> Launch:
    """Return the launch of an engine with small settings, which starts quickly."""
    arguments: dict[str, Any] = {
        "model_path": str(PAIR / "target"),
        "device": device,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "random_seed": 0,
        "context_length": 1024,
        "max_running_requests": 32,
        "max_total_tokens": 131_072,
        "skip_server_warmup": True,
        "watchdog_timeout": 300,
        "log_level": "error",
    }
    if device == "cpu":
        arguments["disable_cuda_graph"] = True
    else:
        arguments |= {
            "mem_fraction_static": 0.5,
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": [1, 16, 32],
        }
    if one.engine:
        arguments |= {"speculative_draft_model_path": str(PAIR / "draft"), **one.engine}
    return Launch(arguments, {})


def run_engine(
    one: SmokeEngine, launch: Launch, places: Places, missing: Sequence[str], attempt: Attempt
) -> None:
    """Run the missing parts of one engine."""
    prompts = prompts_of(NUM_PROBLEMS)
    asks = {ANSWERS: answers, KINDS: each_kind, MIXED: all_kinds, REPLAYED: known_kinds}
    asks[SAME] = logprobs
    with running(launch, places.logs / f"smoke-{one.slug}.log", 0.5) as engine:
        attempt.started = True
        for part in one.parts:
            name = f"{one.slug} {part}"
            if name in missing:
                found = asks[part](engine, one, prompts)
                if part == SAME:
                    found |= against(found, attempt.records.of(attempt.stage))
                attempt.add(name, found)


def prompts_of(number: int) -> list[list[int]]:
    """Return the chat prompts of problems as token ids."""
    from transformers import AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                messages(held_out(FIRST_PROBLEM + place)),
                tokenize=False,
                add_generation_prompt=True,
            ),
            add_special_tokens=False,
        )
        for place in range(number)
    ]


Prompts = Sequence[Sequence[int]]


def answers(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> dict[str, Any]:
    """Count right answers in each mode: too few to compare, enough to detect a broken mode."""
    found: dict[str, int] = {}
    wrong: list[str] = []
    rounds = replayed = 0
    for mode in MODES if one.is_smc else ("plain",):
        kind = Kind(
            mode, {"max_new_tokens": ANSWER_TOKENS}, smc={"mode": mode} if one.is_smc else {}
        )
        told = ask(engine, kinds.question([kind] * len(prompts), prompts))
        items = [held_out(FIRST_PROBLEM + place) for place in range(len(prompts))]
        verdicts = [kinds.judged(kind, answer, graphs=one.has_graphs) for answer in told]
        found[f"right in {mode}"] = sum(
            check(answer["text"], item) for answer, item in zip(told, items, strict=True)
        )
        wrong += [f"{mode}: {fault}" for verdict in verdicts for fault in verdict["wrong"]]
        if found[f"right in {mode}"] < len(prompts) // 2:
            wrong.append(f"{mode}: {found[f'right in {mode}']} of {len(prompts)} are right")
        rounds += sum(verdict["rounds"] or 0 for verdict in verdicts)
        replayed += sum(verdict["replayed"] or 0 for verdict in verdicts)
    return {"of": len(prompts), **found, "rounds": rounds, "replayed": replayed, "wrong": wrong}


def kinds_of(one: SmokeEngine) -> list[Kind]:
    """Return the request kinds; for SGLang's own speculation only those that it supports."""
    if one.engine and not one.is_smc:
        return [kind for kind in kinds.STOCK if kind.name in KNOWN]
    return [*kinds.STOCK, *(kinds.OURS if one.is_smc else ())]


def each_kind(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> dict[str, Any]:
    """Send one request of each kind, alone."""
    found = {}
    for kind in kinds_of(one):
        began = time.monotonic()
        verdict = judged_alone(engine, kind, prompts, graphs=one.has_graphs)
        found[kind.name] = {**verdict, "seconds": time.monotonic() - began}
    return summary(found)


def judged_alone(
    engine: RemoteEngine, kind: Kind, prompts: Prompts, *, graphs: bool
) -> dict[str, Any]:
    """Check one request; a rejection counts as a fault."""
    question = kinds.question([kind], prompts)
    found = engine.exchange({"generate": question})
    if "refused" in found:
        return {"tokens": 0, "wrong": [f"refused: {found['refused']}"]}
    return kinds.judged(kind, found["answers"][0], graphs=graphs)


def all_kinds(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> dict[str, Any]:
    """Send one request of each kind in one batch: modes, filters and edits share it."""
    asked = kinds_of(one)
    told = ask(engine, kinds.question(asked, prompts))
    pairs = zip(asked, told, strict=True)
    # A batch with a grammar or a stop string is not replayed.
    return summary({kind.name: kinds.judged(kind, answer, graphs=False) for kind, answer in pairs})


def known_kinds(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> dict[str, Any]:
    """Send all kinds that need no host decision in one batch, so that graphs run them."""
    asked = [kind for kind in kinds_of(one) if kind.replays]
    pairs = zip(asked, ask(engine, kinds.question(asked, prompts)), strict=True)
    return summary(
        {kind.name: kinds.judged(kind, answer, graphs=one.has_graphs) for kind, answer in pairs}
    )


def summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    wrong = [f"{name}: {fault}" for name, one in found.items() for fault in one["wrong"]]
    return {"kinds": len(found), "wrong": wrong, "of": found}


def logprobs(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> dict[str, Any]:
    """Return greedy texts of a few rounds, with their log-probabilities."""
    kind = Kind("greedy", {"temperature": 0.0, "max_new_tokens": 24}, kinds.LOGPROBS)
    told = ask(engine, kinds.question([kind] * len(prompts), prompts))
    lines = [answer["meta_info"]["output_token_logprobs"] for answer in told]
    return {"lines": [[[token, logprob] for logprob, token, *_ in line] for line in lines]}


def ask(engine: RemoteEngine, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all answers; raise EngineError if the engine rejects a request."""
    found = engine.exchange({"generate": question})
    if "refused" in found:
        raise EngineError(f"refused: {found['refused']}")
    return found["answers"]


def against(found: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compare log-probabilities of the first round with those of torch's operations."""
    reference = known.get(f"{REFERENCE} {SAME}", {}).get("lines")
    if reference is None:
        return {}
    apart, tokens = compared(reference, found["lines"])
    wrong = []
    if not tokens:
        wrong.append("no text begins as with torch's operations")
    if apart > TOLERANCE:
        wrong.append(f"log-probabilities differ by {apart:.3g}, more than {TOLERANCE}")
    return {"largest_difference": apart, "compared_tokens": tokens, "wrong": wrong}


Line = Sequence[Sequence[float]]


def compared(reference: Sequence[Line], found: Sequence[Line]) -> tuple[float, int]:
    """Return the largest difference in the first round, and the number of compared tokens.

    Tokens are compared up to the first differing one: if two likely tokens are nearly equal,
    rounding decides, and the texts diverge without an error.
    """
    apart, tokens = 0.0, 0
    for ours, theirs in zip(found, reference, strict=True):
        for (token, logprob), (other, expected) in zip(ours[:FIRST_ROUND], theirs, strict=False):
            if token != other:
                break
            apart, tokens = max(apart, abs(logprob - expected)), tokens + 1
    return apart, tokens
