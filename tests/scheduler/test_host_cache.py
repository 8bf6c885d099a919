"""Prefixes come back from the host, and from files, with the draft's KV beside the target's.

A seeded text and its evidence depend on every key of both models: were one of them not what it was
before the pool was full, some text would differ.
"""

import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from head_laws import DFLASH, EAGLE3
from in_process import SMC, Reply, Server
from model_families import MTP, make_model
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput, UpdateWeightFromDiskReqInput
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host import base
from tiny_models import smc_arguments

from sglang_smc.server import hooks

SLOTS = 300  # of the pool: two of the prompts, and their particles
SERVER: dict[str, Any] = {
    "num_particles": 3,
    "num_steps": 3,
    "max_lag": 16,
    "max_total_tokens": SLOTS,
    "enable_hierarchical_cache": True,
}
STORAGE = {
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16}',
    "hicache_storage_prefetch_policy": "wait_complete",
}


def asked(index: int) -> dict[str, Any]:
    draw = random.Random(index)
    own = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": index}
    own |= {"custom_params": {"smc": SMC[index % len(SMC)]}}
    prompt = [5 + index, *(draw.randrange(2, 64) for _ in range(63))]
    return {"input_ids": prompt, "sampling_params": own}


REQUESTS = [asked(index) for index in range(6)]
LEAVING = {1, 4}


def check(replies: list[Reply], known: list[Reply]) -> None:
    """Check texts and their evidence against those of the same requests before."""
    assert [reply.output_ids for reply in replies] == [reply.output_ids for reply in known]
    for reply, other in zip(replies, known, strict=True):
        evidence = other.meta.get("spec_smc_log_evidence")
        assert reply.meta.get("spec_smc_log_evidence") == pytest.approx(evidence, abs=1e-4)


def came_back(replies: list[Reply], tier: str = "host") -> int:
    """Prompt tokens that came back."""
    return sum((reply.meta["cached_tokens_details"] or {}).get(tier, 0) for reply in replies)


@pytest.fixture(autouse=True, scope="module")
def small_machine() -> Iterator[None]:
    """Let SGLang leave none of this machine's memory to others, who may have taken it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def begin(
    start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Server]:
    """Start a server with a small pool, over a pair of families or kinds of drafts."""

    def begin(target: str, draft: str, **arguments: Any) -> Server:
        path = tmp_path_factory.mktemp("pair")
        of_target = make_model(path / "target", target, 3)
        of_draft = make_model(path / "draft", draft, 2, of_target)
        pair = of_target, None if draft == MTP else of_draft
        return start(**smc_arguments(*pair, **SERVER, **arguments), overlap=True)

    return begin


@pytest.mark.parametrize(
    ("target", "draft", "policy", "ratio", "page"),
    [
        ("llama", "llama", "write_through", 6.0, 1),
        ("deepseek_v3", MTP, "write_back", 6.0, 4),
        ("llama", EAGLE3, "write_back", 6.0, 16),
        ("llama", DFLASH, "write_through", 1.2, 4),  # the host is full, too
    ],
)
def test_a_prefix_comes_back_from_the_host(
    begin: Callable[..., Server], target: str, draft: str, policy: str, ratio: float, page: int
) -> None:
    how = {"hicache_write_policy": policy, "hicache_ratio": ratio}
    server = begin(target, draft, **how, page_size=page)
    first = [server.generate(**one) for one in REQUESTS]
    assert came_back(first) == 0
    # One after another, so that rounds of others run while a prefix is copied.
    second = server.play(REQUESTS, aborted=LEAVING, after=3)
    assert came_back(second) > (SLOTS // 2 if ratio > 2 else 0)
    check(*([some[i] for i in range(len(some)) if i not in LEAVING] for some in (second, first)))
    server.flush()
    again = server.generate(**REQUESTS[0])
    assert came_back([again]) == 0
    check([again], first[:1])
    longer = REQUESTS[0] | {"input_ids": [*REQUESTS[0]["input_ids"], *again.output_ids]}
    found = server.generate(**longer)
    assert found.meta["cached_tokens"] == (64 + 12 - 2) // page * page
    server.flush()
    check([found], [server.generate(**longer)])


def test_an_update_leaves_nothing_of_the_weights_before(begin: Callable[..., Server]) -> None:
    """It arrives while the last prompt is copied to the host."""
    how = {"hicache_ratio": 6.0, "hicache_write_policy": "write_through"}
    server = begin("llama", "llama", **how, page_size=1)
    first = server.send(**REQUESTS[0])
    server.run_until(lambda: first.end is not None)
    assert server.scheduler.tree_cache.ongoing_write_through
    path = server.scheduler.server_args.model_path
    done = server.ask(UpdateWeightFromDiskReqInput(model_path=path, load_format="auto"))
    assert done.success, done.message
    again = server.generate(**REQUESTS[0])
    assert again.meta["cached_tokens"] == 0
    check([again], [first])
    refused = server.ask(AttachHiCacheStorageReqInput(hicache_storage_backend="file"))
    assert (refused.success, "weights" in refused.message) == (False, True)


@pytest.mark.parametrize(("draft", "page"), [("llama", 1), (EAGLE3, 16)])
def test_a_prefix_comes_back_from_files(
    start: Callable[..., Server], tmp_path: Path, draft: str, page: int
) -> None:
    """They are the weights', whatever the served model's name; a folder that is gone costs hits."""
    target = make_model(tmp_path / "target", "llama", 3)
    files = tmp_path / "files"
    how = smc_arguments(target, make_model(tmp_path / "draft", draft, 2, target), **SERVER)
    how |= {"page_size": page, "hicache_ratio": 1.2, "file_storage_path": str(files), **STORAGE}
    server = start(**how, overlap=True)
    first = [server.generate(**one) for one in REQUESTS]
    assert came_back(first, "storage") == 0
    again = server.generate(**REQUESTS[0])  # the host is too small for all
    assert came_back([again], "storage") >= 48
    server.flush()
    second = server.play(REQUESTS[:3], aborted=LEAVING, after=3)
    assert came_back(second[::2], "storage") >= 2 * 48
    check([again, *second[::2]], [first[0], *first[:3:2]])
    refused = server.ask(UpdateWeightFromDiskReqInput(model_path=target, load_format="auto"))
    assert (refused.success, "storage" in refused.message) == (False, True)

    server = start(**how, served_model_name="another", overlap=True)
    again = server.generate(**REQUESTS[0])
    assert came_back([again], "storage") >= 48
    check([again], first[:1])
    server.flush()
    for file in files.glob("*.draft_*"):
        file.write_bytes(b"")  # as a full disk leaves it without our hook
    again = server.generate(**REQUESTS[0])
    assert came_back([again], "storage") == 0
    check([again], first[:1])
    server.flush()
    assert came_back([server.generate(**REQUESTS[0])], "storage") >= 48
    server.flush()
    rmtree(files)
    files.touch()  # no folder can be written there
    check([server.generate(**REQUESTS[1])], first[1:2])
    server.flush()
    assert came_back([server.generate(**REQUESTS[1])], "storage") == 0


def test_a_full_disk_leaves_whole_files_or_none(tmp_path: Path) -> None:
    """What is left behind a page's first 4,096 bytes fails as the file is closed."""
    hooks.install(hooks.SMC)
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    ranks |= dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    flags = ("is_mla_model", "enable_storage_metrics", "is_page_first_layout")
    config = HiCacheStorageConfig(**ranks, **dict.fromkeys(flags, False), model_name="model")
    storage = HiCacheFile(config, str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (100, 5000):
        page = torch.arange(size).to(torch.uint8)
        there = torch.empty(size, dtype=torch.uint8)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 4096 * 4096, hard))
        try:
            is_stored = storage.set("key", page)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not is_stored and list(tmp_path.iterdir()) == []
        assert storage.get("key", there) is None
        assert storage.set("key", page) and storage.get("key", there) is not None
        assert there.equal(page)
        (stored,) = tmp_path.iterdir()
        stored.unlink()
