"""The batched CPU attention against a float64 loop over rows, heads and queries."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from baselines.cpu_speculation.attention import DraftStep, tree_of
from particle_cases import attend_by_hand, runner_of
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_smc.cpu import attention
from sglang_smc.cpu.attention import LONG_ROW, CpuAttentionBackend
from sglang_smc.models.softmax import Softmax

pytestmark = pytest.mark.usefixtures("one_rank")
HEAD_DIM = 16
NUM_SLOTS = 4096
LONG = LONG_ROW + 6


class Harness:
    """A backend over a real KV pool, with rows laid out at random slots."""

    def __init__(
        self, prefix_lens, query_lens, *, heads=(4, 2), dtype=torch.float32, share=0, kv_dtype=None
    ):
        q_heads, kv_heads = heads
        generator = torch.Generator().manual_seed(0)
        self.prefix_lens = list(prefix_lens)
        self.query_lens = list(query_lens)
        self.layer = RadixAttention(q_heads, HEAD_DIM, 0.3, kv_heads, layer_id=0)
        self.pool = MHATokenToKVPool(
            NUM_SLOTS, 1, kv_dtype or dtype, kv_heads, HEAD_DIM, 1, "cpu", enable_memory_saver=False
        )
        self.sinks: torch.Tensor | None = None
        self.hidden: list[int] = []  # new tokens that no other sees, in the reference
        self.table, self.rows = self._layout(share, generator)
        for buffer in self.pool.get_kv_buffer(0):
            buffer.fill_(float("nan"))  # whatever no row owns is poison: reading it shows
            for row, prefix in zip(self.rows, self.prefix_lens, strict=True):
                fresh = torch.randn(prefix, *buffer.shape[1:], generator=generator)
                buffer[self.table[row, :prefix].long()] = fresh.to(buffer.dtype)
        self.q, self.k, self.v = (
            torch.randn(sum(self.query_lens), heads, HEAD_DIM, generator=generator).to(dtype)
            for heads in (q_heads, kv_heads, kv_heads)
        )
        self.runner = runner_of(self.table, self.pool, dtype, heads)
        self.backend = CpuAttentionBackend(self.runner)

    def _layout(self, share, generator):
        """Rows of the table in scrambled order; the first ``share`` slots are everybody's."""
        kv_lens = [p + n for p, n in zip(self.prefix_lens, self.query_lens, strict=True)]
        slots = iter((torch.randperm(NUM_SLOTS, generator=generator) + 1).tolist())
        table = torch.full((2 * len(kv_lens), max(kv_lens) + 5), 10**8, dtype=torch.int32)
        rows = torch.randperm(len(table), generator=generator)[: len(kv_lens)]
        shared = [next(slots) for _ in range(share)]
        for row, kv_len in zip(rows, kv_lens, strict=True):
            own = [next(slots) for _ in range(kv_len - share)]
            table[row, :kv_len] = torch.tensor(shared + own)
        return table, rows

    def batch(self, mode, **fields) -> Any:
        prefix = torch.tensor(self.prefix_lens)
        query = torch.tensor(self.query_lens)
        new = [
            self.table[row, p : p + n]
            for row, p, n in zip(self.rows, self.prefix_lens, self.query_lens, strict=True)
        ]
        given = {
            "forward_mode": mode,
            "req_pool_indices": self.rows,
            "seq_lens": prefix + query,
            "extend_prefix_lens": prefix.int(),
            "extend_seq_lens": query.int(),
            "input_ids": torch.zeros(len(self.q)),
            "out_cache_loc": torch.cat(new).long(),
            "spec_info": None,
        }
        return SimpleNamespace(**(given | fields))

    def run(self, mode, **fields):
        batch = self.batch(mode, **fields)
        self.backend.init_forward_metadata(batch)
        options = {} if self.sinks is None else {"sinks": self.sinks}
        flat = self.q.flatten(1)
        output = self.backend.forward(flat, self.k, self.v, self.layer, batch, **options)
        return output.view_as(self.q)

    def reference(self):
        """Softmax attention in float64, one query at a time."""
        keys = self.pool.get_key_buffer(0).double()
        values = self.pool.get_value_buffer(0).double()
        keys *= self.layer.k_scale_float or 1.0
        values *= self.layer.v_scale_float or 1.0
        window = self.layer.sliding_window_size
        softmax = Softmax(self.layer.scaling, self.layer.logit_cap, self.sinks)
        output = []
        queries = iter(self.q)
        for row, prefix, length in zip(self.rows, self.prefix_lens, self.query_lens, strict=True):
            for seen in range(prefix + 1, prefix + length + 1):
                hidden = [prefix + node for node in self.hidden]
                first = max(seen - 1 - window, 0) if window > -1 else 0
                slots = self.table[row, [p for p in range(first, seen) if p not in hidden]].long()
                output.append(attend_by_hand(next(queries), keys[slots], values[slots], softmax))
        return torch.stack(output)

    def assert_matches(self, result):
        tolerance = 1e-5 if self.q.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            result.double(), self.reference(), atol=tolerance, rtol=tolerance
        )


@pytest.fixture(params=[(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
def heads(request):
    return request.param


DECODE = ForwardMode.DECODE
EXTEND = ForwardMode.EXTEND
VERIFY = ForwardMode.TARGET_VERIFY
BATCHES: dict[str, tuple[ForwardMode, list[int], list[int]]] = {
    # mode, cached lengths, new tokens
    "decode from nothing": (DECODE, [0], [1]),
    "decode ragged": (DECODE, [3, 40, 1, 17], [1] * 4),
    "decode of equal lengths": (DECODE, [9, 9, 9], [1] * 3),
    "decode of particles that share slots": (DECODE, [30, 33, 31], [1] * 3),
    "extend from nothing": (EXTEND, [0, 0, 0], [5, 2, 9]),
    "extend ragged": (EXTEND, [4, 0, 11, 90], [5, 1, 3, 30]),
    "extend long": (EXTEND, [0], [LONG]),
    "extend long behind a prefix": (EXTEND, [21], [LONG]),
    "extend long beside short": (EXTEND, [3, 0, 7, 40], [2, LONG, 2, LONG + 1]),
    "verify one": (VERIFY, [6], [5]),
    "verify ragged": (VERIFY, [3, 25, 1, 11], [5] * 4),
    "verify as stock": (VERIFY, [3, 25, 1], [5] * 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BATCHES)
def test_attention_is_softmax_of_each_query(name, heads, dtype):
    """Of a stock verify batch ``seq_lens`` is what is cached, and the batch says the width."""
    mode, prefix_lens, query_lens = BATCHES[name]
    h = Harness(prefix_lens, query_lens, heads=heads, dtype=dtype, share=28 * ("share" in name))
    stock = name == "verify as stock"
    absent = ("extend_prefix_lens", "extend_seq_lens") if stock or mode == DECODE else ()
    cached = {"seq_lens": torch.tensor(prefix_lens)} if stock else {}
    h.assert_matches(h.run(mode, **dict.fromkeys(absent), **cached))


def test_read_without_write():
    """A layer that shares another's cache brings no keys of its own."""
    h = Harness([3, 8], [1, 1])
    written = h.run(DECODE)
    again = h.backend.forward(h.q.flatten(1), None, None, h.layer, h.batch(DECODE))
    torch.testing.assert_close(again.view_as(written), written)


@pytest.mark.parametrize(("mode", "width"), [(DECODE, 1), (VERIFY, 5)])
def test_all_particles_are_one_call(mode, width, monkeypatch):
    attend = Mock(wraps=attention.attend)
    monkeypatch.setattr(attention, "attend", attend)
    h = Harness(range(10, 42), [width] * 32)
    h.run(mode)
    assert [call.args[0].shape for call in attend.mock_calls] == [(32, 2, 2 * width, HEAD_DIM)]


def test_unknown_arguments_are_refused():
    """As are layers that `check_layer` refuses, which unit/test_models.py shows one by one."""
    h = Harness([3], [1])
    batch = h.batch(DECODE)
    h.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="score_mod="):
        h.backend.forward(h.q.flatten(1), h.k, h.v, h.layer, batch, score_mod=1)


@pytest.mark.parametrize("batch", ["decode ragged", "extend ragged", "extend long beside short"])
@pytest.mark.parametrize("window", [1, 8, 50, 1000, -1])
def test_windows_caps_and_sinks(batch, window, heads):
    h = Harness(*BATCHES[batch][1:], heads=heads)
    h.layer.sliding_window_size = window
    if window == -1:
        h.layer.logit_cap = 2.0
        h.sinks = torch.linspace(-1, 2, heads[0])
    h.assert_matches(h.run(EXTEND))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_and_values_in_8_bits(heads, kv_dtype):
    """They are divided by the layer's scales where they are stored, and multiplied when read."""
    h = Harness([3, 40], [2, LONG], heads=heads, kv_dtype=kv_dtype)
    h.layer.k_scale = torch.tensor(0.5)
    h.layer.v_scale = torch.tensor(0.25)
    h.layer.k_scale_float = 0.5
    h.layer.v_scale_float = 0.25
    key = h.k.clone()
    stored = h.table[h.rows[0], 3].long()
    h.assert_matches(h.run(EXTEND))
    assert torch.equal(h.pool.get_key_buffer(0)[stored], (key[0] / 0.5).to(kv_dtype))


#: Of five new tokens, whom each follows: a root, its two children, and a grandchild of each.
PARENTS = [-1, 0, 0, 1, 2]


def test_a_tree_s_tokens_see_their_ancestors(heads):
    """As chains of which only the last tokens are compared."""
    prefix_lens = [6, 1, 70]
    width = len(PARENTS)
    sees = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        sees[node] |= sees[PARENTS[node]]
    lines = [torch.cat([torch.ones(width, p, dtype=torch.bool), sees], 1) for p in prefix_lens]
    mask = torch.cat([line.flatten() for line in lines])
    tree = SimpleNamespace(custom_mask=mask, tree_topk=2, draft_token_num=width)
    h = Harness(prefix_lens, [width] * 3, heads=heads)
    cached = {"seq_lens": torch.tensor(prefix_lens), "extend_seq_lens": None}
    h.backend.tree_of = tree_of
    found = h.run(VERIFY, spec_info=tree, **cached)
    for node, ancestors in enumerate(sees):
        h.hidden = (~ancestors).nonzero().flatten().tolist()
        wanted = h.reference()[node::width]
        torch.testing.assert_close(found[node::width].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("topk", "step"), [(1, 0), (1, 2), (3, 0), (3, 1)])
def test_a_draft_s_pass_sees_the_text_and_its_own_branch(heads, topk, step):
    """Rows of another table, where branches stand behind the text as SGLang lays them out."""
    num_steps = 3
    texts = [5, 1, 40]
    lengths = [text + step for text in texts for _ in range(topk)]
    h = Harness(lengths, [1] * len(lengths), heads=heads)
    table = torch.full((3, 40 + topk * num_steps), 10**8, dtype=torch.int32)
    for row, text in enumerate(texts):
        for branch in range(topk):
            source = h.table[h.rows[row * topk + branch]]
            own = h.table[h.rows[row * topk], :text] if branch else source[:text]
            source[:text] = own  # a request's branches share its text
            table[row, :text] = own
            start = text + branch * num_steps
            table[row, start : start + step + 1] = source[text : text + step + 1]
    h.runner.req_to_token_pool.req_to_token = table
    h.backend = DraftStep(h.runner, topk, num_steps, step)
    rows = torch.arange(3)
    seq_lens = torch.tensor(texts)
    h.assert_matches(h.run(DECODE, req_pool_indices=rows, seq_lens=seq_lens))
