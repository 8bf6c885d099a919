"""Run smoke tests: a default server, and engines in every mode with every kind of request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dummies import FIRST_TOKEN
from gpu.cases import SPEED_8B, write_models
from gpu.engines import STOP_SECONDS, shown, without_models
from gpu.machine import free_mib
from gpu.runner import Attempt, Case, Entry, Places
from pair.task import check, held_out, messages
from speed.grid import CHAIN, SPECULATION, Launch
from speed.remote import EngineError, RemoteEngine, Work, running
from study import PAIR, code_fingerprint, digest

from sglang_smc.options.server import MODES, RESAMPLING_METHODS

NUM_PROBLEMS = 16
#: Far beyond the problems of bench/demo.py and bench/fidelity.
FIRST_PROBLEM = 2_000_000
ANSWER_TOKENS = 160
START_SECONDS = 40.0
#: SGLang compiles some kernels for the KV of models this small at their first start.
COMPILE_SECONDS = 45.0
#: bfloat16 has 8 bits: logits of 20 are exact to 0.1. A larger difference is an error.
TOLERANCE = 0.15
FIRST_ROUND = 9  # tokens
REFERENCE, SAME = "smc-torch", "log-probabilities"
#: Kinds of requests that SGLang's own speculation supports.
KNOWN = ("plain", "greedy", "top-p", "top-k", "top-p and top-k")

Prompts = Sequence[Sequence[int]]


def smoke_cases(places: Places, *, device: str) -> list[Case]:
    """Return a server with default settings, then an engine for each way to run rounds."""
    engines = [one for one in ENGINES if device != "cpu" or one.on_a_cpu]
    return [default_case(places, device), *(_case(one, places, device) for one in engines)]


# --- Kinds of requests, and the invariants of their answers

NEW_TOKENS = 48
PLAIN: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": NEW_TOKENS}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)  # beside `PLAIN`
    asks: Mapping[str, Any] = field(default_factory=dict)  # of `Engine.generate`
    smc: Mapping[str, Any] = field(default_factory=dict)  # of custom_params
    replays: bool = True  # whether a captured graph supports all of it

    @property
    def sampling_params(self) -> dict[str, Any]:
        custom = {"custom_params": {"smc": dict(self.smc)}} if self.smc else {}
        return {**PLAIN, **self.params, **custom}


STOCK = (
    Kind("plain"),
    Kind("greedy", {"temperature": 0.0}),
    Kind("seed", {"sampling_seed": 5}),
    Kind("top-p", {"top_p": 0.9}),
    Kind("top-k", {"top_k": 20}),
    Kind("min-p", {"min_p": 0.05}),
    Kind("top-p and top-k", {"top_p": 0.95, "top_k": 20}),
    Kind(
        "penalties",
        {"frequency_penalty": 0.2, "presence_penalty": 0.2, "repetition_penalty": 1.05},
    ),
    Kind("bias", {"logit_bias": {"7": 0.5}}),
    Kind("min-tokens", {"min_new_tokens": 8}),
    Kind("log-probabilities", asks=LOGPROBS),
    Kind("stop string", {"stop": ["####"]}, replays=False),
    Kind("grammar", {"regex": "[0-9]{2,4}"}, replays=False),
)
OURS = (
    *(Kind(f"mode {mode}", smc={"mode": mode}) for mode in MODES),
    *(
        Kind(f"{method} resampling", smc={"mode": "smc", "resampling_method": method})
        for method in RESAMPLING_METHODS
    ),
    Kind("resampling at tokens", smc={"mode": "smc", "resample_at": "token"}),
    Kind("fewer particles", smc={"num_particles": 4, "num_steps": 4}),
    Kind("power", smc={"mode": "smc", "power": 2.0}),
    Kind("particles", smc={"mode": "smc", "return_particles": True}, replays=False),
)


def question(kinds: Sequence[Kind], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return `Engine.generate` keywords for one request of each kind, in one batch."""
    asks = {
        key: [kind.asks.get(key, type(value)()) for kind in kinds]
        for key, value in LOGPROBS.items()
    }
    return {
        "input_ids": [list(prompts[place % len(prompts)]) for place in range(len(kinds))],
        "sampling_params": [kind.sampling_params for kind in kinds],
        **asks,
    }


def judged(kind: Kind, answer: Mapping[str, Any], *, graphs: bool) -> dict[str, Any]:
    """Return an answer's counters, and its faults."""
    info = answer["meta_info"]
    found = {
        "tokens": info["completion_tokens"],
        "rounds": info.get("spec_smc_rounds_ct"),
        "replayed": info.get("spec_smc_replayed_ct"),
    }
    return {**found, "wrong": faults(kind, answer, found, graphs=graphs)}


def faults(
    kind: Kind, answer: Mapping[str, Any], found: Mapping[str, Any], *, graphs: bool
) -> list[str]:
    """Return the faults as sentences, if any."""
    info = answer["meta_info"]
    wrong = []
    if (info["finish_reason"] or {}).get("type") not in ("stop", "length"):
        wrong.append(f"it ended with {info['finish_reason']}")
    if not 0 < found["tokens"] <= kind.sampling_params["max_new_tokens"]:
        wrong.append(f"it has {found['tokens']} tokens")
    if info.get("spec_smc_nan_ct"):
        wrong.append("its logits were not numbers")
    if kind.asks and len(info["output_token_logprobs"]) != found["tokens"]:
        wrong.append(f"{len(info['output_token_logprobs'])} log-probabilities")
    if graphs and kind.replays and found["replayed"] != found["rounds"]:
        wrong.append(f"{found['replayed']} of {found['rounds']} rounds were replayed")
    return wrong


# --- A server with default settings: two models, the algorithm, and no other argument

DEFAULT = "default"
#: 8B of dummy weights, some 60 prefill graphs and as many of rounds, and all kernels compiled.
DEFAULT_SECONDS = 150.0
CHAT = Work(
    [list(range(FIRST_TOKEN, FIRST_TOKEN + 256))],
    [{"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 128, "ignore_eos": True}],
)


def default_case(places: Places, device: str) -> Case:
    """Return the case of 8B + 1B, or of the shipped pair on a CPU; it sizes its pool itself."""
    on_cpu = device == "cpu"
    folder = PAIR if on_cpu else places.models / SPEED_8B.pair.name
    arguments = {
        "model_path": str(folder / "target"),
        "speculative_draft_model_path": str(folder / "draft"),
        "speculative_algorithm": "SMC",
    }
    launch = Launch(arguments if on_cpu else {**arguments, "load_format": "dummy"}, {})
    identity = {"default": len(launch.arguments), **code_fingerprint()}
    run = partial(run_default, launch, places, device)
    return Case(DEFAULT, {DEFAULT: identity}, DEFAULT_SECONDS, run, shown(launch))


def run_default(
    launch: Launch, places: Places, device: str, missing: Sequence[str], attempt: Attempt
) -> None:
    """Record its start, its memory and one chat request, the second: the first may compile."""
    if device != "cpu":
        write_models(SPEED_8B.pair, places.models)
    began = time.monotonic()
    with running(launch, places.logs / f"{DEFAULT}.log", STOP_SECONDS) as engine:
        attempt.started = True
        seconds = time.monotonic() - began
        (told, *_) = engine.exchange({"info": True})["info"]
        engine.ask(CHAT)
        sample = engine.ask(CHAT)
    memory, (info,) = told["smc"]["memory"], sample.infos
    rounds, replayed = info["spec_smc_rounds_ct"], info.get("spec_smc_replayed_ct")
    wrong = [] if memory else ["it says nothing of its memory"]
    if device != "cpu" and replayed != rounds:
        wrong.append(f"{replayed} of {rounds} rounds were replayed")
    found = {
        "start_seconds": seconds,
        "first_ms": 1000 * sample.first[0],
        "round_ms": 1000 * sample.decode_seconds / sample.rounds,
        "tokens_per_second": sample.decode_speed,
        "free_mib": free_mib(),
        "memory": memory,
        "wrong": wrong,
    }
    attempt.add(DEFAULT, found)


# --- Engines over the shipped pair, which is trained, so that texts are meaningful


@dataclass(frozen=True)
class SmokeEngine:
    """An engine's own settings."""

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
        return list(ASKS)[: None if self.is_smc else 3]

    @property
    def kinds(self) -> list[Kind]:
        """Return the supported kinds of requests."""
        if self.engine and not self.is_smc:
            return [kind for kind in STOCK if kind.name in KNOWN]
        return [*STOCK, *(OURS if self.is_smc else ())]


SMC = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": 8,
    "speculative_smc_num_particles": 8,
}
EAGER = {"speculative_smc_round_graph": "off"}
TORCH = {"speculative_smc_kernels": "torch"}
#: Torch's operations first: the reference of the others.
ENGINES = (
    SmokeEngine(REFERENCE, {**SMC, **EAGER, **TORCH}, on_a_cpu=True),
    SmokeEngine("smc-kernels", {**SMC, **EAGER}),
    SmokeEngine("smc-graphs", SMC),
    SmokeEngine("ar", on_a_cpu=True),
    SmokeEngine("standalone", SPECULATION[CHAIN]),
)


def _case(one: SmokeEngine, places: Places, device: str) -> Case:
    launch = launch_of(one, device)
    identity = {"tests": digest([Path(__file__)]), **code_fingerprint()}
    identity["engine"] = without_models(launch)
    return Case(
        one.slug,
        {f"{one.slug} {part}": identity for part in one.parts},
        START_SECONDS + (COMPILE_SECONDS if one.slug == REFERENCE else 0.0),
        partial(run_engine, one, launch, places),
        shown(launch),
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
    with running(launch, places.logs / f"smoke-{one.slug}.log", STOP_SECONDS) as engine:
        attempt.started = True
        for part in one.parts:
            name = f"{one.slug} {part}"
            if name in missing:
                found = ASKS[part](engine, one, prompts)
                if part == SAME:
                    found |= against(found, attempt.records.of(attempt.stage))
                attempt.add(name, found)


def prompts_of(number: int) -> list[list[int]]:
    """Return the chat prompts of problems as token ids."""
    from transformers import AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    chats = [messages(held_out(FIRST_PROBLEM + place)) for place in range(number)]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]


def answers(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> Entry:
    """Count right answers in each mode: too few to compare, enough to detect a broken mode."""
    found: Entry = {"of": len(prompts)}
    wrong: list[str] = []
    items = [held_out(FIRST_PROBLEM + place) for place in range(len(prompts))]
    for mode in MODES if one.is_smc else ("plain",):
        smc = {"mode": mode} if one.is_smc else {}
        kind = Kind(mode, {"max_new_tokens": ANSWER_TOKENS}, smc=smc)
        told = ask(engine, [kind] * len(prompts), prompts)
        right = sum(check(answer["text"], item) for answer, item in zip(told, items, strict=True))
        found[f"right in {mode}"] = right
        if right < len(prompts) // 2:
            wrong.append(f"{mode}: {right} of {len(prompts)} are right")
        verdicts = [judged(kind, answer, graphs=one.has_graphs) for answer in told]
        wrong += [f"{mode}: {fault}" for verdict in verdicts for fault in verdict["wrong"]]
    return {**found, "wrong": wrong}


def each_kind(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> Entry:
    """Send one request of each kind, alone; a rejection counts as a fault."""
    found = {}
    for kind in one.kinds:
        try:
            (answer,) = ask(engine, [kind], prompts)
            found[kind.name] = judged(kind, answer, graphs=one.has_graphs)
        except RefusedError as error:
            found[kind.name] = {"tokens": 0, "wrong": [str(error)]}
    return summary(found)


def all_kinds(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> Entry:
    """Send one request of each kind in one batch: modes, filters and edits share it."""
    # A batch with a grammar or a stop string is not replayed.
    return together(engine, one.kinds, prompts, graphs=False)


def known_kinds(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> Entry:
    """Send all kinds that need no host decision in one batch, so that graphs run them."""
    asked = [kind for kind in one.kinds if kind.replays]
    return together(engine, asked, prompts, graphs=one.has_graphs)


def together(
    engine: RemoteEngine, asked: Sequence[Kind], prompts: Prompts, *, graphs: bool
) -> Entry:
    pairs = zip(asked, ask(engine, asked, prompts), strict=True)
    return summary({kind.name: judged(kind, one, graphs=graphs) for kind, one in pairs})


def summary(found: Mapping[str, Entry]) -> Entry:
    wrong = [f"{name}: {fault}" for name, one in found.items() for fault in one["wrong"]]
    return {"kinds": len(found), "wrong": wrong, "of": found}


def logprobs(engine: RemoteEngine, one: SmokeEngine, prompts: Prompts) -> Entry:
    """Return greedy texts of a few rounds, with their log-probabilities."""
    kind = Kind("greedy", {"temperature": 0.0, "max_new_tokens": 24}, LOGPROBS)
    told = ask(engine, [kind] * len(prompts), prompts)
    lines = [answer["meta_info"]["output_token_logprobs"] for answer in told]
    return {"lines": [[[token, logprob] for logprob, token, *_ in line] for line in lines]}


#: The parts of an engine; the last two are SMC's.
ASKS = {
    "answers": answers,
    "kinds": each_kind,
    "all kinds at once": all_kinds,
    "kinds that graphs know at once": known_kinds,
    SAME: logprobs,
}


class RefusedError(EngineError):
    """The engine rejected a request."""


def ask(engine: RemoteEngine, asked: Sequence[Kind], prompts: Prompts) -> list[dict[str, Any]]:
    """Return an answer of each kind; raise RefusedError if the engine rejects a request."""
    found = engine.exchange({"generate": question(asked, prompts)})
    if "refused" in found:
        raise RefusedError(f"refused: {found['refused']}")
    return found["answers"]


def against(found: Entry, known: Mapping[str, Entry]) -> Entry:
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
