"""The three engines that answer, on the CPU: the target, the draft, and SMC with both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fidelity.grid import SIZES
from fidelity.measure import Asker, Reply, Request, prompt_ids
from study import BenchError

CONCURRENCY = 64
#: The same for all three; part of what makes answers comparable.
COMMON: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "random_seed": 0,
    "max_running_requests": CONCURRENCY,
    "context_length": 1024,
    # Room for 64 requests of eight particles that share nothing.
    "max_total_tokens": 196_608,
    "skip_server_warmup": True,
    "disable_cuda_graph": True,
    "watchdog_timeout": 600,
    "log_level": "error",
}
#: What the SMC engine adds.
SMC: dict[str, Any] = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": SIZES["num_steps"],
    "speculative_smc_num_particles": SIZES["num_particles"],
}


def settings(name: str) -> dict[str, Any]:
    """The keywords of `sgl.Engine` but for the models."""
    return COMMON | (SMC if name == "smc" else {})


def arguments(name: str, pair: Path) -> dict[str, Any]:
    """The keywords of `sgl.Engine` for the engine ``name``."""
    if name != "smc":
        return {**settings(name), "model_path": str(pair / name)}
    return {
        **settings(name),
        "model_path": str(pair / "target"),
        "speculative_draft_model_path": str(pair / "draft"),
    }


class EngineAsker:
    """Asks an offline `sgl.Engine`, which schedules as many requests at a time as it may."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer_manager.tokenizer

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Yield answers as they complete. While the caller looks at one, the others run on."""
        loop = self._engine.loop
        pending = {loop.create_task(self._reply(request)) for request in requests}
        try:
            while pending:
                first = asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                done, pending = loop.run_until_complete(first)
                for task in done:
                    yield task.result()
        finally:
            for task in pending:
                task.cancel()

    async def _reply(self, request: Request) -> Reply:
        ids, asked = prompt_ids(self._tokenizer, request.index), request.sampling_params
        try:
            answer = await self._engine.async_generate(input_ids=ids, sampling_params=asked)
        except ValueError as error:  # how SGLang reports a request that it refuses
            raise BenchError(f"The engine refused {asked}: {error}") from error
        return Reply(request.index, answer["text"], answer["output_ids"], answer["meta_info"])


@contextlib.contextmanager
def running(name: str, pair: Path) -> Iterator[Asker]:
    """The engine ``name`` for the ``with`` block."""
    with started(arguments(name, pair)) as asker:
        yield asker


@contextlib.contextmanager
def started(
    keywords: dict[str, Any], asker: Callable[[Any], Asker] = EngineAsker
) -> Iterator[Asker]:
    """The engine of these keywords for the ``with`` block, asked by ``asker``."""
    # Dozens on what this machine lacks would tear the progress bars; processes inherit the second.
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    import sglang  # takes seconds, which --list and --help need not wait for

    engine = sglang.Engine(**keywords)
    try:
        yield asker(engine)
    finally:
        engine.shutdown()
