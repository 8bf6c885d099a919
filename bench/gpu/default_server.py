"""Measure a server with default settings: two models, the algorithm, and no other argument.

It captures SGLang's prefill graphs and all rounds, and sizes its pool by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gpu.cases import DRAFT, SPEED_8B, TARGET, write_models
from gpu.machine import free_mib
from gpu.stages import Attempt, Case, Places
from speed.engines import Launch
from speed.presets import FIRST_TOKEN
from speed.remote import Work, running
from study import PAIR, code_fingerprint

DEFAULT = "default"
#: 8B of dummy weights, some 60 prefill graphs and as many of rounds, and all kernels compiled.
SECONDS = 150.0
CHAT = Work(
    [list(range(FIRST_TOKEN, FIRST_TOKEN + 256))],
    [{"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 128, "ignore_eos": True}],
)


def default_case(places: Places, device: str) -> Case:
    """Return the case: the server's start, its memory and one chat request."""
    launch = launch_of(places, device)
    identity = {"default": len(launch.arguments), **code_fingerprint()}
    arguments = ", ".join(f"{name}={value!r}" for name, value in launch.arguments.items())
    run = partial(run_default, launch, places, device)
    return Case(DEFAULT, {DEFAULT: identity}, SECONDS, run, f"sglang.Engine({arguments})")


def launch_of(places: Places, device: str) -> Launch:
    """Return the launch of 8B + 1B, or of the shipped pair on a CPU."""
    on_cpu = device == "cpu"
    folder = PAIR if on_cpu else places.models / SPEED_8B.pair.name
    arguments = {
        "model_path": str(folder / TARGET),
        "speculative_draft_model_path": str(folder / DRAFT),
        "speculative_algorithm": "SMC",
    }
    return Launch(arguments if on_cpu else {**arguments, "load_format": "dummy"}, {})


def run_default(
    launch: Launch, places: Places, device: str, missing: Sequence[str], attempt: Attempt
) -> None:
    """Start it and send requests; the second answer counts, as the first may compile kernels."""
    if device != "cpu":
        write_models(SPEED_8B.pair, places.models)
    began = time.monotonic()
    with running(launch, places.logs / f"{DEFAULT}.log", 0.5) as engine:
        attempt.started = True
        seconds = time.monotonic() - began
        (told, *_) = engine.exchange({"info": True})["info"]
        engine.ask(CHAT)
        sample = engine.ask(CHAT)
        (info,) = sample.infos
        found = {
            "start_seconds": seconds,
            "first_ms": 1000 * sample.first[0],
            "round_ms": 1000 * sample.decode_seconds / sample.rounds,
            "tokens_per_second": sample.decode_tokens / sample.decode_seconds,
            "free_mib": free_mib(),
            "memory": told["smc"]["memory"],
        }
        attempt.add(DEFAULT, {**found, "wrong": faults(found, info, on_gpu=device != "cpu")})


def faults(found: Mapping[str, Any], info: Mapping[str, Any], *, on_gpu: bool) -> list[str]:
    """Return the faults as sentences, if any."""
    wrong = [] if found["memory"] else ["it says nothing of its memory"]
    rounds, replayed = info["spec_smc_rounds_ct"], info.get("spec_smc_replayed_ct")
    if on_gpu and replayed != rounds:
        wrong.append(f"{replayed} of {rounds} rounds were replayed")
    return wrong
