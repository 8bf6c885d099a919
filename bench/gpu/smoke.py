"""Run smoke tests: a default server, and engines in every mode with every kind of request."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from answers import prompt_ids
from dummies import FIRST_TOKEN
from gpu.engines import SPEED_8B
from pair.task import check, held_out, messages
from results import gpu
from speed.conditions import EngineStart, conditions
from speed.grid import DRAFT, TARGET, settings_of, write_models
from speed.remote import InvalidRequestError, RemoteEngine, Work, running
from speed.runner import Attempt, Case, Entry
from study import PAIR, REPOSITORY, BenchError, code_fingerprint, digest

from sglang_smc.options.server import MODES, RESAMPLING_METHODS
from sglang_smc_tools.demo.serving import Launch

NUM_PROBLEMS = 16
ANSWER_TOKENS = 160
#: Far beyond the problems of the demo and of the studies.
FIRST_PROBLEM = 2_000_000
START_SECONDS = 65.0
#: SGLang compiles some kernels for the KV of models this small at their first start.
COMPILE_SECONDS = 45.0
AUDIT_MINUTES = 0.75
AUDIT_SECONDS = 45.0
ON_A_CPU_MINUTES = 6.0  # for as many answers
#: bfloat16 has 8 bits: logits of 20 are exact to 0.1. A larger difference is an error.
TOLERANCE = 0.15
FIRST_ROUND = 9  # tokens
REFERENCE = "smc-torch"
SAME = "log-probabilities"
GRAPHS = "smc-graphs"
CLIENT = "OpenAI's client"
AUDIT = "audit"
MOST_WORDS = 1500

Prompts = Sequence[Sequence[int]]


def smoke_cases(work: Path, *names: str, device: str) -> list[Case]:
    """Return these engines, `DEFAULT` for a server with default settings; on a CPU that run there.

    Engines of kernels are torch's there.
    """
    here = dict.fromkeys(ON_A_CPU.get(name, name) if device == "cpu" else name for name in names)
    made = (default_case if name == DEFAULT else partial(_case, name) for name in here)
    return [make(work, device) for make in made]


#: Each kernel against torch.
DOCTOR = ("-m", "sglang_smc.command", "doctor")
#: At many sizes: the draft's attention, the products of its layers, verification.
TESTS = {
    name: ("-m", "pytest", "-q", f"tests/kernels/test_{file}.py", *more)
    for name, file, *more in (
        ("rotates", "particle_attention", "-k", "rotates"),
        ("skinny", "skinny"),
        ("verify", "verify"),
    )
}


#: With what the tests compile, side by side.
COMMAND_SECONDS = {"doctor": 30.0, "tests": 115.0}


def command_cases(*names: str, device: str) -> list[Case]:
    """Return ``doctor``, or the ``tests``, which compile side by side."""
    doctor = DOCTOR if device == "cpu" else (*DOCTOR, "--kernels")
    every = {"doctor": {"doctor": doctor}, "tests": TESTS}
    code = {"device": device, **code_fingerprint()}
    return [
        Case(
            slug,
            {name: {"command": words, **code} for name, words in every[slug].items()},
            COMMAND_SECONDS[slug],
            partial(run_commands, every[slug]),
            "; ".join(f"python {' '.join(words)}" for words in every[slug].values()),
        )
        for slug in names
    ]


def run_commands(commands: Mapping[str, Sequence[str]], attempt: Attempt) -> None:
    """Run the missing commands at once; record how each ends, and its last words."""
    attempt.started = True
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(_started(commands[name])) for name in attempt.missing}
        with ThreadPoolExecutor() as pool:
            told = {pool.submit(one.communicate): name for name, one in running.items()}
            for done in as_completed(told):
                name = told[done]
                last = done.result()[0][-MOST_WORDS:]
                wrong = [last] if running[name].returncode else []
                seconds = time.monotonic() - began
                attempt.add(name, {"seconds": seconds, "told": last, "wrong": wrong})


@contextlib.contextmanager
def _started(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a Python command in the repository, and end it with the block."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


LAYERS = ("bench/gpu/layers.py",)
#: What is timed of a draft, by name: its layers over the rows of one request with 8 particles, or
#: over the most that fused layers take; and seconds, with what is compiled.
LAYER_CASES = {"m8": ("8", 24.0), "m64": ("64", 24.0), "lm-head": ("lm-head", 15.0)}


def layer_cases(*names: str, device: str) -> list[Case]:
    """Return cases of a draft's layers, which say on what `device` they run themselves."""
    found = []
    for name in names:
        given, seconds = LAYER_CASES[name]
        part = f"layers-{name}"
        words = (*LAYERS, given)
        identity = {"command": words, "device": device, **code_fingerprint()}
        run = partial(run_layers, part, words)
        found.append(Case(part, {part: identity}, seconds, run, f"python {' '.join(words)}"))
    return found


def run_layers(name: str, words: Sequence[str], attempt: Attempt) -> None:
    """Record the line that a command prints; raise BenchError if it fails."""
    attempt.started = True
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise BenchError((done.stdout + done.stderr)[-MOST_WORDS:])
    attempt.add(name, json.loads(done.stdout.splitlines()[-1]))


def ended(words: Sequence[str]) -> Entry:
    """Run a Python command in the repository; return its last words, as faults if it fails."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    last = (done.stdout + done.stderr)[-MOST_WORDS:]
    return {"told": last, "wrong": [last] if done.returncode else []}


# --- Kinds of requests, and the invariants of their answers

PLAIN: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": 48}
EXACT = {"custom_params": {"smc": {"mode": "exact"}}}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}


class Kind(NamedTuple):
    """One kind of request."""

    name: str
    params: Mapping[str, Any] = {}  # beside `PLAIN`
    asks: Mapping[str, Any] = {}  # of `Engine.generate`
    replays: bool = True  # whether a captured graph supports all of it


def smc(name: str, **asked: Any) -> Kind:
    """Return a kind of SMC request."""
    return Kind(name, {"custom_params": {"smc": asked}})


_PENALTIES = {"frequency_penalty": 0.2, "presence_penalty": 0.2, "repetition_penalty": 1.05}
STOCK = (
    Kind("plain"),
    Kind("greedy", {"temperature": 0.0}),
    Kind("top-p", {"top_p": 0.9}),
    Kind("top-k", {"top_k": 20}),
    Kind("top-p and top-k", {"top_p": 0.95, "top_k": 20}),
    Kind("seed", {"sampling_seed": 5}),
    Kind("min-p", {"min_p": 0.05}),
    Kind("penalties", _PENALTIES),
    Kind("bias", {"logit_bias": {"7": 0.5}}),
    Kind("min-tokens", {"min_new_tokens": 8}),
    Kind("log-probabilities", asks=LOGPROBS),
    Kind("stop string", {"stop": ["####"]}, replays=False),
    Kind("grammar", {"regex": "[0-9]{2,4}"}, replays=False),
)
OURS = (
    *(smc(f"mode {mode}", mode=mode) for mode in MODES),
    *(smc(f"{how} resampling", mode="smc", resampling_method=how) for how in RESAMPLING_METHODS),
    smc("resampling at tokens", mode="smc", resample_at="token"),
    smc("fewer particles", num_particles=4, num_steps=4),
    smc("power", mode="smc", power=2.0),
    smc("particles", mode="smc", return_particles=True)._replace(replays=False),
)


def ask(engine: RemoteEngine, kinds: Sequence[Kind], prompts: Prompts) -> list[dict[str, Any]]:
    """Return an answer of each kind, from one batch; raise RefusedError if one is rejected."""
    question = {
        "input_ids": [list(prompts[place % len(prompts)]) for place in range(len(kinds))],
        "sampling_params": [{**PLAIN, **kind.params} for kind in kinds],
    }
    for key, value in LOGPROBS.items():
        question[key] = [kind.asks.get(key, type(value)()) for kind in kinds]
    return engine.generate(**question)


def not_replayed(info: Mapping[str, Any]) -> list[str]:
    """Return the fault of an answer that has rounds outside of graphs."""
    rounds = info.get("spec_smc_rounds_ct")
    replayed = info.get("spec_smc_replayed_ct")
    return [] if replayed == rounds else [f"{replayed} of {rounds} rounds were replayed"]


def judged(kind: Kind, answer: Mapping[str, Any], *, graphs: bool) -> Entry:
    """Return an answer's counters, and its faults as sentences."""
    info = answer["meta_info"]
    tokens = info["completion_tokens"]
    most = {**PLAIN, **kind.params}["max_new_tokens"]
    faults = {
        f"it ended with {info['finish_reason']}": (info["finish_reason"] or {}).get("type")
        not in ("stop", "length"),
        f"it has {tokens} tokens": not 0 < tokens <= most,
        "its logits were not numbers": info.get("spec_smc_nan_ct"),
        "a token has no log-probability": kind.asks
        and len(info["output_token_logprobs"]) != tokens,
    }
    wrong = [fault for fault, holds in faults.items() if holds]
    wrong += not_replayed(info) if graphs and kind.replays else []
    counters = ("spec_smc_rounds_ct", "spec_smc_replayed_ct")
    return {"tokens": tokens, **{name: info.get(name) for name in counters}, "wrong": wrong}


# --- A server with default settings: two models, the algorithm, and no other argument

DEFAULT = "default"
#: 8B of dummy weights, some 60 prefill graphs and as many of rounds, and all kernels compiled.
DEFAULT_SECONDS = 150.0
CHAT = Work(
    [list(range(FIRST_TOKEN, FIRST_TOKEN + 256))],
    [{"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 128, "ignore_eos": True}],
)


def default_case(work: Path, device: str) -> Case:
    """Return the case of 8B + 1B, or of the shipped pair on a CPU; it sizes its pool itself."""
    folder = PAIR if device == "cpu" else work / "models" / SPEED_8B.pair.name
    arguments = {
        "model_path": str(folder / TARGET),
        "speculative_draft_model_path": str(folder / DRAFT),
        "speculative_algorithm": "SMC",
        **({} if device == "cpu" else {"load_format": "dummy"}),
    }
    launch = Launch(arguments)
    identity = {"default": len(arguments), **code_fingerprint()}
    run = partial(run_default, launch, work, device)
    return Case(DEFAULT, {DEFAULT: identity}, DEFAULT_SECONDS, run, str(launch))


def run_default(launch: Launch, work: Path, device: str, attempt: Attempt) -> None:
    """Record its start, its memory and one chat request, the second: the first may compile."""
    if device != "cpu":
        write_models(SPEED_8B.pair, work / "models")
    began = time.monotonic()
    with running(launch, work / "logs" / f"{DEFAULT}.log") as engine:
        attempt.started = True
        seconds = time.monotonic() - began
        memory = engine.internal_state()["smc"]["memory"]
        engine.ask(CHAT)
        sample = engine.ask(CHAT)
        found = {"conditions": conditions(engine, EngineStart(time.time() - seconds, seconds))}
    (info,) = sample.infos
    free = gpu("memory.free")
    found |= {
        "start_seconds": seconds,
        "first_ms": 1000 * sample.first[0],
        "round_ms": 1000 * sample.round_seconds,
        "tokens_per_second": sample.decode_speed,
        "free_mib": free and int(free["memory.free"].split()[0]),
        "memory": memory,
        "wrong": [] if memory else ["it says nothing of its memory"],
    }
    found["wrong"] += not_replayed(info) if device != "cpu" else []
    attempt.add(DEFAULT, found)


# --- Engines over the shipped pair, which is trained, so that texts are meaningful

SMC = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": 8,
    "speculative_smc_num_particles": 8,
}
EAGER = {**SMC, "speculative_smc_round_graph": "off"}
#: The engines' own settings; torch's operations first: the reference of the others.
ENGINES: dict[str, dict[str, Any]] = {
    REFERENCE: {**EAGER, "speculative_smc_kernels": "torch"},
    "smc-kernels": EAGER,
    GRAPHS: SMC,
    "smc-head": {**SMC, "speculative_draft_model_path": str(PAIR / "eagle3")},
    "ar": {},
}
ON_A_CPU = dict.fromkeys(("smc-kernels", GRAPHS, "smc-head"), REFERENCE)


def _case(name: str, work: Path, device: str) -> Case:
    launch = launch_of(name, device)
    identity = {"tests": digest([Path(__file__)]), **code_fingerprint()}
    identity |= {"engine": settings_of(launch)}
    parts = ("answers", "kinds", "all kinds at once")
    parts += ("kinds that graphs know at once", SAME) if name.startswith("smc-") else ()
    is_audited = name == (REFERENCE if device == "cpu" else GRAPHS)
    parts += (CLIENT, AUDIT) if is_audited else ()
    return Case(
        name,
        {f"{name} {part}": identity for part in parts},
        START_SECONDS + COMPILE_SECONDS * (name == REFERENCE) + AUDIT_SECONDS * is_audited,
        partial(run_engine, name, launch, work),
        str(launch),
    )


def launch_of(name: str, device: str) -> Launch:
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
        "log_level": "info",
    }
    if device == "cpu":
        arguments["disable_cuda_graph"] = True
    else:
        arguments |= {
            "mem_fraction_static": 0.5,
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": [1, 16, 32],
        }
    if ENGINES[name]:
        arguments |= {"speculative_draft_model_path": str(PAIR / "draft"), **ENGINES[name]}
    return Launch(arguments)


def run_engine(name: str, launch: Launch, work: Path, attempt: Attempt) -> None:
    """Run the missing parts of one engine."""
    prompts = [prompt_ids(held_out(FIRST_PROBLEM + place)) for place in range(NUM_PROBLEMS)]
    began = time.time()
    with running(launch, work / "logs" / f"smoke-{name}.log") as engine:
        attempt.started = True
        start = EngineStart(began, time.time() - began)
        for one in attempt.missing:
            found = run_part(engine, name, one.removeprefix(f"{name} "), prompts)
            if "lines" in found:
                reference = attempt.records.of(attempt.stage).get(f"{REFERENCE} {SAME}")
                found |= against(found["lines"], reference and reference.get("lines"))
            attempt.add(one, {**found, "conditions": conditions(engine, start)})


def run_part(engine: RemoteEngine, name: str, part: str, prompts: Prompts) -> Entry:
    """Return the result of one part of an engine.

    The kinds of requests share a batch twice: all of them, which is not replayed, as a grammar or a
    stop string is decided on the host; and those that graphs run.
    """
    graphs = "speculative_smc_round_graph" not in ENGINES[name]
    kinds = (*STOCK, *OURS) if name.startswith("smc-") else STOCK
    if part == "answers":
        return answers(engine, name, prompts, graphs=graphs)
    if part == SAME:
        return logprobs(engine, prompts)
    if part == CLIENT:
        return client(engine.url)
    if part == AUDIT:
        minutes = ON_A_CPU_MINUTES if name == REFERENCE else AUDIT_MINUTES
        words = ("audit", engine.url, "--minutes", f"{minutes}", "--params", json.dumps(EXACT))
        return ended(("-m", "sglang_smc.command", *words))
    if part == "kinds":
        found = {kind.name: alone(engine, kind, prompts, graphs=graphs) for kind in kinds}
    else:
        graphs_only = part != "all kinds at once"
        kinds = [kind for kind in kinds if kind.replays or not graphs_only]
        pairs = zip(kinds, ask(engine, kinds, prompts), strict=True)
        found = {kind.name: judged(kind, a, graphs=graphs and graphs_only) for kind, a in pairs}
    wrong = [f"{kind}: {fault}" for kind, one in found.items() for fault in one["wrong"]]
    return {"kinds": len(found), "wrong": wrong, "of": found}


def client(url: str) -> Entry:
    """Ask as OpenAI's client does: a stream, and two answers with log-probabilities."""
    from openai import OpenAI

    create = OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions.create
    asked: dict[str, Any] = {"model": "default", "messages": messages(held_out(FIRST_PROBLEM))}
    asked |= {"temperature": 0.7, "max_tokens": ANSWER_TOKENS}
    stream = create(**asked, stream=True)
    text = "".join(one.choices[0].delta.content or "" for one in stream if one.choices)
    whole = create(**asked, n=2, logprobs=True, top_logprobs=3)
    faults = {
        "its stream is empty": not text,
        f"n = 2 gives {len(whole.choices)} answers": len(whole.choices) != 2,
        "a token has no log-probability": any(not one.logprobs.content for one in whole.choices),
    }
    return {
        "text": " ".join(text.split()),
        "wrong": [fault for fault, holds in faults.items() if holds],
    }


def alone(engine: RemoteEngine, kind: Kind, prompts: Prompts, *, graphs: bool) -> Entry:
    """Send one request of a kind; a rejection counts as a fault."""
    try:
        (answer,) = ask(engine, [kind], prompts)
    except InvalidRequestError as error:
        return {"tokens": 0, "wrong": [str(error)]}
    return judged(kind, answer, graphs=graphs)


def answers(engine: RemoteEngine, name: str, prompts: Prompts, *, graphs: bool) -> Entry:
    """Count right answers in each mode: too few to compare, enough to detect a broken mode."""
    found: Entry = {"of": len(prompts), "wrong": []}
    for mode in MODES if name.startswith("smc-") else ("plain",):
        kind = Kind(mode) if mode == "plain" else smc(mode, mode=mode)
        kind = kind._replace(params={**kind.params, "max_new_tokens": ANSWER_TOKENS})
        told = ask(engine, [kind] * len(prompts), prompts)
        items = (held_out(FIRST_PROBLEM + place) for place in range(len(told)))
        right = sum(check(answer["text"], item) for answer, item in zip(told, items, strict=True))
        found[f"right in {mode}"] = right
        faults = [f for answer in told for f in judged(kind, answer, graphs=graphs)["wrong"]]
        if right < len(prompts) // 2:
            faults.append(f"{right} of {len(prompts)} are right")
        found["wrong"] += [f"{mode}: {fault}" for fault in faults]
    return found


def logprobs(engine: RemoteEngine, prompts: Prompts) -> Entry:
    """Return greedy texts of a few rounds, with their log-probabilities."""
    kind = Kind("greedy", {"temperature": 0.0, "max_new_tokens": 24}, LOGPROBS)
    told = ask(engine, [kind] * len(prompts), prompts)
    lines = [answer["meta_info"]["output_token_logprobs"] for answer in told]
    return {"lines": [[[token, logprob] for logprob, token, *_ in line] for line in lines]}


Lines = Sequence[Sequence[Sequence[float]]]


def against(found: Lines, reference: Lines | None) -> Entry:
    """Compare log-probabilities of the first round with those of torch's operations.

    Tokens are compared up to the first differing one: if two likely tokens are nearly equal,
    rounding decides, and the texts diverge without an error.
    """
    if reference is None:
        return {}
    apart = 0.0
    tokens = 0
    wrong = []
    for ours, theirs in zip(found, reference, strict=True):
        for (token, logprob), (other, expected) in zip(ours[:FIRST_ROUND], theirs, strict=False):
            if token != other:
                break
            apart = max(apart, abs(logprob - expected))
            tokens += 1
    if not tokens:
        wrong.append("no text begins as with torch's operations")
    if apart > TOLERANCE:
        wrong.append(f"log-probabilities differ by {apart:.3g}, more than {TOLERANCE}")
    return {"largest_difference": apart, "compared_tokens": tokens, "wrong": wrong}
