"""What every test needs: quiet thread pools, bench/ within reach, no GPU tests without a GPU.

And what several need: tiny models, and real engines with SGLang's strict memory checks on.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import warm

# Before torch starts its pool. SGLang runs several processes; on few cores their pools fight each
# other, and a tiny model becomes a hundred times slower. Child processes inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# SGLang compiles some functions (routing of experts, penalties), for seconds in each process; here
# only a cold `running_server` does, as users' servers do.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
warm.install()  # engines and servers start in a second

# The same examples everywhere, however slow the machine.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")

# Folders of which one process runs all, since they share a server.
SHARED_SERVER = tuple(
    f"tests/{folder}/" for folder in ("clients", "faults", "kits", "operations", "server")
)

# The benchmarks are scripts that import each other by name. Last, so that they hide nothing.
sys.path.append(str(Path(__file__).resolve().parent / "bench"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run tests marked `nightly` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    # Not by `keywords`, where the name of the checkout's own folder counts.
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(optionalhook=True)  # without xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several test processes one runs all of a file, or of a folder that shares a server."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((folder for folder in SHARED_SERVER if file.startswith(folder)), file)

    return Scheduling(config, log)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's groups of ranks have one."""
    from sglang_smc.models import supported

    monkeypatch.setattr(supported, "get_parallel", lambda: SimpleNamespace(tp_size=1))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A tiny random model, made once for each set of arguments."""
    from tiny_models import make_tiny_model

    folder: Path = tmp_path_factory.mktemp("models")
    made: dict[str, str] = {}

    def make(**arguments: Any) -> str:
        key = "-".join(f"{name}{value}" for name, value in sorted(arguments.items()))
        if key not in made:
            made[key] = make_tiny_model(folder / key, **arguments)
        return made[key]

    return make


@pytest.fixture(
    scope="session", params=[pytest.param("in turn", marks=pytest.mark.nightly), "overlapped"]
)
def schedule(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the environment of a server with results at once, or a round late as on a GPU."""
    from sglang_smc.options.server import CPU_OVERLAP_ENV

    return {CPU_OVERLAP_ENV: str(int(request.param == "overlapped"))}


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Start engines by keyword, one at a time: asking for another shuts the last one down."""
    import sglang
    from tiny_models import ENGINE_DEFAULTS, STRICT_CHECKS

    from sglang_smc.options.server import CPU_OVERLAP_ENV

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
