"""Forwards over particles: what a stock model sees of them, and what attention it gets."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from fake_cuda import Account
from particle_cases import NUM_SLOTS, SCALING, Case, context_of, make_case, runner_of
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from sglang_smc.kv.transfer import each_tensor
from sglang_smc.models.attention import ParticleAttention
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward

pytestmark = pytest.mark.usefixtures("one_rank")
LAST_POSITION = 99


class OneLayer:
    """Attention alone as a model; it keeps what it was called with."""

    def __init__(self, case: Case) -> None:
        q_heads, kv_heads, head_dim = case.query.shape[3], *case.keys.shape[1:]
        self.layer = RadixAttention(q_heads, head_dim, SCALING, kv_heads, layer_id=0)
        query = case.query.flatten(0, 2).flatten(1)
        self.keys = self.values = torch.zeros(len(query), kv_heads, head_dim)
        # As on a GPU, where rotary embeddings work in place: a slice of what a projection made.
        self.query = torch.cat([query, query.new_full((len(query), 64), float("nan"))], dim=1)
        self.query = self.query[:, : query.shape[1]]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> Any:
        self.tokens = tokens
        self.positions = positions
        self.batch = batch
        # Tokens are the numbers of rows, of which some may be left out.
        rows = slice(None) if len(tokens) == len(self.query) else tokens
        hidden = self.layer(self.query[rows], self.keys[rows], self.values[rows], batch)
        metadata = LogitsMetadata.from_forward_batch(batch)
        nobody: Any = None
        pruned = LogitsProcessor._get_pruned_states(nobody, hidden, None, None, metadata)
        return SimpleNamespace(next_token_logits=pruned[0], hidden_states=None)


class Harness:
    """A forward over a real KV pool, in which the new tokens' keys are yet to be written."""

    def __init__(self, case: Case, attention: Any = "torch") -> None:
        self.case = case
        dtype = case.keys.dtype
        kv_heads, head_dim = case.keys.shape[1:]
        pool = MHATokenToKVPool(
            NUM_SLOTS - 1, 1, dtype, kv_heads, head_dim, 1, "cpu", enable_memory_saver=False
        )
        self.model = OneLayer(case)
        self.slots = self._new_slots()
        for name, buffer in zip(("keys", "values"), pool.get_kv_buffer(0), strict=True):
            buffer.copy_(getattr(case, name))
            setattr(self.model, name, buffer[self.slots.flatten()].clone())
            buffer[self.slots.flatten()] = float("nan")
        heads = case.query.shape[3], kv_heads
        self.runner = runner_of(
            case.req_to_token, pool, dtype, heads, context_len=LAST_POSITION + 1
        )
        self.runner.model = self.model
        self.forward = ParticleForward(self.runner, case.tails, attention, max_columns=9)
        self.tokens = torch.arange(self.slots.numel()).view_as(self.slots)

    def _new_slots(self) -> torch.Tensor:
        """Slots ``[G, N, C]`` of the new tokens, 0 for what stands in the prefix already."""
        case = self.case
        position = case.starts.unsqueeze(2) + torch.arange(case.query.shape[2])
        place = position % case.tails.shape[1]
        slots = case.tails[case.particle_rows.unsqueeze(2), place].long()
        behind = position >= case.committed.view(-1, 1, 1)
        return slots.where(behind & case.present.unsqueeze(2), 0)

    def run(self, name: str) -> torch.Tensor:
        return getattr(self.forward, name)(self.chains(self.slots))

    def chains(self, slots: torch.Tensor) -> Chains:
        return Chains(self.tokens, self.case.starts, slots, context_of(self.case).locations)


def case(num_columns: int = 5, **shape: Any) -> Case:
    return make_case(
        [40, 3, 12], [[-1, 0, 5], [9, None, 2], [0, 0, None]], num_columns=num_columns, **shape
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [1, 2, 9])
@pytest.mark.parametrize("name", ["next_logits", "chain_logits"])
def test_logits_of_chains(name: str, num_columns: int, dtype: torch.dtype) -> None:
    """After each token, or after the last alone."""
    h = Harness(case(num_columns, dtype=dtype))
    output = h.run(name)
    asked = h.case
    mode = ForwardMode.TARGET_VERIFY
    shape = asked.query.shape[:3]
    if name == "next_logits":
        mode = ForwardMode.DECODE if num_columns == 1 else ForwardMode.EXTEND
        starts = asked.starts + num_columns - 1
        asked = asked._replace(query=asked.query[:, :, -1:], starts=starts)
        shape = shape[:2]
    assert output.shape == (*shape, 4 * 64)
    asked.assert_close(output.view(asked.query.shape))
    assert h.model.batch.forward_mode == mode


def test_what_the_model_is_told() -> None:
    h = Harness(make_case([98], [[0, -1]], num_columns=3))
    h.run("chain_logits")
    assert torch.equal(h.model.tokens, h.tokens.flatten())
    assert h.model.positions.tolist() == [98, 99, 99, 97, 98, 99], "within the rotary table"
    assert torch.equal(h.model.batch.out_cache_loc, h.slots.flatten())


@pytest.mark.parametrize("name", ["next_logits", "chain_logits"])
@pytest.mark.parametrize("num_columns", [1, 2, 9])
def test_particles_with_one_slot_are_run_once(name: str, num_columns: int) -> None:
    """A copy has the slots, and so the logits, of the particle that it copies."""
    whole = case(num_columns)
    copy = torch.tensor([0, 0, 2])
    parts = {"tails": whole.tails.clone(), "query": whole.query[:, copy]}
    parts["tails"][whole.particle_rows] = whole.tails[whole.particle_rows[:, copy]]
    given = whole._replace(starts=whole.starts[:, copy], present=whole.present[:, copy], **parts)
    alone = Harness(given)
    h = Harness(given)
    alone.forward.merges = False
    expected = alone.run(name)
    assert torch.allclose(h.run(name), expected, atol=1e-6)
    assert len(h.model.tokens) < len(alone.model.tokens)


@pytest.mark.parametrize("num_columns", [1, 2, 9])
def test_a_forward_is_prepared_in_few_launches(num_columns: int) -> None:
    """Positions within the table, and slots of each step in one piece to those of a chain."""
    h = Harness(case(num_columns))
    by_step = h.slots.permute(2, 0, 1).contiguous()
    chains = h.chains(by_step.permute(1, 2, 0))
    with Account() as account:
        h.forward._batch(ForwardMode.EXTEND, chains)
    positions = ["clamp_max"] if num_columns == 1 else ["add", "clamp_max", "clone"]
    assert sorted(account.calls) == positions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_hybrid_swa": True}, "--disable-hybrid-swa-memory"),
        ({"use_mla_backend": True, "dtype": torch.float8_e4m3fn}, "--kv-cache-dtype auto"),
        ({"dtype": torch.uint8}, "--kv-cache-dtype auto"),
        ({"buffer": torch.zeros(8, 2, 1, 64)}, "SGLANG_USE_HND_KVCACHE"),
    ],
)
def test_unsupported_caches_are_refused(change: dict[str, Any], message: str) -> None:
    runner = Harness(case()).runner
    given = {"dtype": torch.float32, "buffer": torch.zeros(8, 2, 64), **change}
    pool = SimpleNamespace(dtype=given.pop("dtype"), start_layer=0, layer_num=1)
    pool.get_key_buffer = Mock(return_value=given.pop("buffer"))
    vars(runner).update(given, token_to_kv_pool=pool)
    with pytest.raises(ValueError, match=message):
        ParticleForward(runner, torch.zeros(8, 8), "torch", max_columns=9)


@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("name", ["next_logits", "chain_logits"])
@pytest.mark.parametrize("num_columns", [1, 2, 9])
def test_with_triton_nothing_waits_for_the_device(
    name: str, num_columns: int, is_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without data run through all of it; they refuse to tell the host a value."""
    for launched in ("particle_attention._attend_spans", "spans._join_spans"):
        monkeypatch.setattr(f"sglang_smc.kernels.attention.{launched}", MagicMock())
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def harness(attention: Any) -> Harness:
        h = Harness(case(num_columns), attention)
        if is_head:
            h.model.layer.attn_type = AttentionType.ENCODER_ONLY
            needs: dict[str, Any] = {"first_key": 1, "blocks": True}
            h.forward.attn_backend = ParticleAttention(h.runner, h.case.tails, attention, **needs)
        h.case, h.tokens, h.slots = each_tensor(mode.from_tensor, (h.case, h.tokens, h.slots))
        return h

    waiting = harness("torch")
    h = harness("triton")
    with mode:
        columns = () if name == "next_logits" else (num_columns,)
        assert h.run(name).shape == (*h.case.starts.shape, *columns, 4 * 64)
        with pytest.raises(DynamicOutputShapeException):
            waiting.run(name)
