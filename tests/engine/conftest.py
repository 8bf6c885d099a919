"""Real `sgl.Engine`s on the CPU, with SGLang's strict memory checks on."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import ENGINE_DEFAULTS, make_tiny_model

from sglang_smc.algorithm import CPU_OVERLAP_ENV

STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A tiny random model, made once for each set of arguments."""
    folder: Path = tmp_path_factory.mktemp("models")
    made: dict[str, str] = {}

    def make(**arguments: Any) -> str:
        key = "-".join(f"{name}{value}" for name, value in sorted(arguments.items()))
        if key not in made:
            made[key] = make_tiny_model(folder / key, **arguments)
        return made[key]

    return make


@pytest.fixture(params=["in turn", "overlapped"])
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Results reach the scheduler at once, or one round late as they do on a GPU."""
    monkeypatch.setenv(CPU_OVERLAP_ENV, str(int(request.param == "overlapped")))
    return request.param


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Start engines by keyword, one at a time: asking for another shuts the last one down."""
    import sglang

    os.environ.update(STRICT_CHECKS)
    running: dict[str, Any] = {}

    def start(**arguments: Any) -> Any:
        key = repr((sorted(arguments.items()), os.environ.get(CPU_OVERLAP_ENV)))
        if key not in running:
            while running:
                running.popitem()[1].shutdown()
            running[key] = sglang.Engine(**{**ENGINE_DEFAULTS, **arguments})
        return running[key]

    yield start
    for engine in running.values():
        engine.shutdown()
