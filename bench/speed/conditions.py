"""Record the conditions of a measurement: releases, clocks, and what its engine's start took."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from results import gpu
from speed.remote import RemoteEngine
from speed.runner import Entry

from sglang_smc.command.machine import installed

#: As they are just after the last sample.
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


class EngineStart(NamedTuple):
    """An engine's start."""

    began: float  # seconds since the epoch
    seconds: float


def conditions(engine: RemoteEngine, start: EngineStart) -> Entry:
    """Return the conditions of a result, None for what this SGLang or machine does not tell.

    ``capture_seconds`` include compiling what a captured round launches first.
    """
    state = engine.internal_state()
    num_kernels, seconds = compiled_since(start.began)
    captures = state.get("startup_time", {}).get("cuda_graph")
    return {
        "triton": installed("triton"),
        "clocks": gpu(*CLOCKS),
        "draft_layers": state.get("smc", {}).get("settings", {}).get("draft_layers"),
        "start_seconds": start.seconds,
        "capture_seconds": captures and sum(captures.values()),
        "compiled_kernels": num_kernels,
        "compile_seconds": seconds,
    }


def compiled_since(began: float) -> tuple[int, float]:
    """Return how many kernels Triton has compiled since then, and their seconds in all.

    By its cache: a kernel's source is written before its first pass, its metadata after the last.
    """
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    seconds = []
    for source in folder.glob("*/*.source"):
        metadata = source.with_suffix(".json")
        ended = metadata.stat().st_mtime if metadata.exists() else 0.0
        if ended >= began:
            seconds.append(ended - source.stat().st_mtime)
    return len(seconds), sum(seconds)
