"""A server sleeps: its memory is released, holds rubbish, and is resumed under the same addresses.

A stand-in plays torch_memory_saver, which needs a GPU: what is allocated within a region is filled
with NaN (and -1) as the region is paused, and comes back where it has a backup on the CPU.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import SMC, Server, running
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from sglang.srt.utils import torch_memory_saver_adapter as adapter
from tiny_models import smc_arguments
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_smc.cpu import platform
from sglang_smc.patches.ingress import generate_request
from sglang_smc.patches.weights import release_memory, released, resume_memory

KINDS = [*SMC, {"resample_at": "token", "ess_threshold": 1.0}]


class Recorder(TorchDispatchMode):
    """Notes the storage of each tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.made[storage.data_ptr()] = StorageWeakRef(storage)
        return result


class MemorySaver:
    """`torch_memory_saver.torch_memory_saver`, on a CPU."""

    enabled = True

    def __init__(self) -> None:
        self.made: dict[tuple[str, bool], dict[int, StorageWeakRef]] = defaultdict(dict)
        self.kept: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with Recorder() as recorder:
            yield
        self.made[tag, enable_cpu_backup] |= recorder.made

    def bytes_of(self, tag: str, has_backup: bool) -> list[torch.Tensor]:
        alive = (ref for ref in self.made[tag, has_backup].values() if not ref.expired())
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in alive]
        return [torch.empty(0, dtype=torch.uint8).set_(each) for each in storages]

    def pause(self, tag: str) -> None:
        backed = self.bytes_of(tag, True)
        self.kept[tag] = [(each, each.clone()) for each in backed]
        for each in backed + self.bytes_of(tag, False):
            each.fill_(0xFF)

    def resume(self, tag: str) -> None:
        for each, kept in self.kept.pop(tag):
            each.copy_(kept)


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> MemorySaver:
    made = MemorySaver()
    monkeypatch.setattr(adapter, "_memory_saver", made)
    monkeypatch.delitem(platform._ALLOWED, "enable_memory_saver")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def answers(server: Server) -> list[list[int]]:
    replies = []
    for seed, smc in enumerate(KINDS):
        params = {"max_new_tokens": 24, "sampling_seed": seed, "custom_params": {"smc": smc}}
        replies.append(server.send(input_ids=[5 + seed, *range(20, 31)], sampling_params=params))
    server.finish()
    return [reply.output_ids for reply in replies]


@pytest.mark.parametrize("cycles", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_texts_are_the_same_after_a_sleep(
    saver: MemorySaver, pair: tuple[str, str], tiny: Callable[..., str], cycles: int
) -> None:
    """As a trainer has it: clients leave, all is released, then weights come, then the KV cache."""
    folders = tiny(seed=3, vocab_size=64, scale=0.3), pair[0]
    sizes = {"num_particles": 4, "num_steps": 3, "max_lag": 32, "page_size": 4}
    with running(**smc_arguments(*pair, **sizes, enable_memory_saver=True)) as server:
        texts = {pair[0]: answers(server)}
        draft: Any = server.scheduler.draft_worker.draft_worker
        models = server.scheduler.tp_worker.model_runner.model, draft.model_runner.model
        target, of_draft = (dict(model.named_parameters()) for model in models)
        for cycle in range(cycles):
            load = [server.send(input_ids=[9, place, *range(20, 31)]) for place in range(5)]
            server.step(4)
            for one in load:
                server.abort(one)
            server.finish()
            server.ask(ReleaseMemoryOccupationReqInput(tags=["kv_cache", "weights"]))
            assert all(weight.isnan().all() for weight in (target | of_draft).values())
            server.ask(ResumeMemoryOccupationReqInput(tags=["weights"]))
            assert all(weight.isnan().all() for weight in target.values())
            assert not any(weight.isnan().any() for weight in of_draft.values())
            folder = folders[cycle % 2]
            update = UpdateWeightFromDiskReqInput(model_path=folder, load_format="auto")
            loaded = server.ask(update)
            assert loaded.success, loaded.message
            server.ask(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
            found = answers(server)
            assert texts.setdefault(folder, found) == found
            server.flush()
        assert texts[folders[0]] != texts[folders[1]]


class Manager(SimpleNamespace):
    """A tokenizer's manager, whose scheduler keeps books of what it is asked for."""

    async def flush_cache(self) -> Any:
        with pytest.raises(ValueError, match="Memory is released"):  # one that comes meanwhile
            generate_request(self.take, self, GenerateReqInput(text="t1"))
        return SimpleNamespace(success=not self.busy)

    async def take(self, _: Any, obj: Any, __: Any) -> None:
        self.asked.append(obj.tags)
        await asyncio.sleep(0)


def test_what_would_end_a_scheduler_is_refused() -> None:
    manager: Any = Manager(busy=True, asked=[])
    own = {"enable_memory_saver": False, "device": "cuda"}
    manager.server_args = SimpleNamespace(speculative_algorithm="SMC", **own)

    def call(hook: Any, *tags: str, times: int = 1) -> None:
        async def at_once() -> None:
            each = (SimpleNamespace(tags=list(tags) or None) for _ in range(times))
            await asyncio.gather(*(hook(manager.take, manager, one) for one in each))

        asyncio.run(at_once())

    with pytest.raises(ValueError, match="start it with --enable-memory-saver"):
        call(release_memory)
    manager.server_args.enable_memory_saver = True
    with pytest.raises(ValueError, match="Requests run or wait"):
        call(release_memory)
    manager.busy = False
    for hook, tags, told in (
        (release_memory, ["kv"], "allowed now: cuda_graph, kv_cache, weights"),
        (resume_memory, ["weights"], "allowed now: none"),
        (resume_memory, [], "allowed now: none"),
    ):
        with pytest.raises(ValueError, match=told):
            call(hook, *tags)
    assert manager.asked == []
    call(release_memory, "kv_cache")
    call(release_memory)
    with pytest.raises(ValueError, match="allowed now: none"):
        call(release_memory, "kv_cache")
    with pytest.raises(ValueError, match=r"Memory is released \(cuda_graph, kv_cache, weights\)"):
        generate_request(manager.take, manager, GenerateReqInput(text="t1"))
    with pytest.raises(ValueError, match="allowed now: cuda_graph, kv_cache"):
        call(resume_memory, "weights", times=2)
    call(resume_memory)
    expected = [["kv_cache"], ["cuda_graph", "weights"], ["weights"], ["cuda_graph", "kv_cache"]]
    assert manager.asked == expected
    assert not released(manager)
