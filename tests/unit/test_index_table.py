"""Whoever has kept the table of KV slots gets the one that the worker puts in its place.

On a GPU, stock attention backends read it in a prefill; with the former they would read other
tokens' KV, and nothing would say so. On a CPU no backend does, so here the runner is asked.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc import upstream
from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.options.server import SMCConfig
from sglang_smc.worker import SMCWorker

ROWS, LONGEST, SLOTS, VOCAB = 5, 40, 2000, 16


def test_the_translator_reads_the_workers_table(monkeypatch: pytest.MonkeyPatch) -> None:
    if not upstream.IS_NEWER:
        return pytest.skip("0.5.17 has no translator of indices")
    place = SimpleNamespace(attn_dcp_size=1, dcp_enabled=False)
    monkeypatch.setattr("sglang.srt.mem_cache.kv_index_translator.get_parallel", lambda: place)
    former = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
    pool, allocator = SimpleNamespace(req_to_token=former), SimpleNamespace(size=SLOTS)
    # A target's runner as SGLang leaves it, before the worker is told of the pools.
    runner: Any = SimpleNamespace(
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=object(),
        page_size=1,
        device="cpu",
        is_draft_worker=False,
        model_config=SimpleNamespace(vocab_size=VOCAB),
    )
    runner.init_kv_index_translator = partial(ModelRunner.init_kv_index_translator, runner)
    runner.init_kv_index_translator()
    worker: Any = object.__new__(SMCWorker)
    worker.config, worker.device, worker._ops = SMCConfig(num_particles=2), "cpu", TORCH
    worker._target_worker = SimpleNamespace(model_runner=runner)
    worker._draft_worker = SimpleNamespace(alloc_memory_pool=lambda **_: None)
    worker.alloc_memory_pool(None, pool, allocator)
    assert pool.req_to_token is not former
    assert runner.kv_index_translator.req_to_token is pool.req_to_token
