"""Forwards over particles: what a stock model sees of them, and what attention it gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from particle_cases import NUM_SLOTS, SCALING, Case, locations_of, make_case, runner_of
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch_calls import Calls, Launch

from sglang_smc.models import supported
from sglang_smc.models.attention import ParticleAttention
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward

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
        self.tokens, self.positions, self.batch = tokens, positions, batch
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
        self.case, dtype = case, case.keys.dtype
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
        return Chains(self.tokens, self.case.starts, slots, locations_of(self.case))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "get_parallel", lambda: SimpleNamespace(tp_size=1))


def case(num_columns: int = 5, **shape: Any) -> Case:
    return make_case(
        [40, 3, 12], [[-1, 0, 5], [9, None, 2], [0, 0, None]], num_columns=num_columns, **shape
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_columns", [1, 2, 9])
def test_after_each_token_of_a_chain(num_columns: int, dtype: torch.dtype) -> None:
    h = Harness(case(num_columns, dtype=dtype))
    output = h.run("chain_logits")
    assert output.shape == (*h.slots.shape, 4 * 64)
    h.case.assert_close(output.view(h.case.query.shape))
    assert h.model.batch.forward_mode == ForwardMode.TARGET_VERIFY


@pytest.mark.parametrize("num_columns", [1, 2, 9])
def test_after_the_last_token_alone(num_columns: int) -> None:
    h = Harness(case(num_columns))
    output = h.run("next_logits")
    assert output.shape == (*h.case.starts.shape, 4 * 64)
    last = h.case._replace(query=h.case.query[:, :, -1:], starts=h.case.starts + num_columns - 1)
    last.assert_close(output.view(last.query.shape))
    mode = ForwardMode.DECODE if num_columns == 1 else ForwardMode.EXTEND
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
    alone, h = Harness(given), Harness(given)
    alone.forward._merges = False
    expected = alone.run(name)
    assert torch.allclose(h.run(name), expected, atol=1e-6)
    assert len(h.model.tokens) < len(alone.model.tokens)


@pytest.mark.parametrize(
    ("num_columns", "mode", "names"),
    [
        (1, ForwardMode.DECODE, ["clamp_max"]),
        (2, ForwardMode.EXTEND, ["add", "clamp_max", "clone"]),
        (9, ForwardMode.TARGET_VERIFY, ["add", "clamp_max", "clone"]),
    ],
)
def test_a_forward_is_prepared_in_few_launches(
    num_columns: int, mode: ForwardMode, names: list[str]
) -> None:
    """Positions within the table, and slots of each step in one piece to those of a chain."""
    h = Harness(case(num_columns))
    by_step = h.slots.permute(2, 0, 1).contiguous()
    chains = h.chains(by_step.permute(1, 2, 0))
    with Calls() as calls:
        h.forward._batch(mode, chains)
    assert sorted(calls.names) == names


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
    runner.use_mla_backend = change.get("use_mla_backend", False)
    runner.is_hybrid_swa = change.get("is_hybrid_swa", False)
    runner.token_to_kv_pool = SimpleNamespace(
        dtype=change.get("dtype", torch.float32),
        start_layer=0,
        layer_num=1,
        get_key_buffer=lambda layer: change.get("buffer", torch.zeros(8, 2, 64)),
    )
    with pytest.raises(ValueError, match=message):
        ParticleForward(runner, torch.zeros(8, 8), "torch", max_columns=9)


def test_unsupported_layers_are_refused() -> None:
    h = Harness(case())
    h.model.layer.use_irope = True
    with pytest.raises(ValueError, match="chunked attention"):
        h.run("next_logits")


def of_head(h: Harness, attention: Any) -> Harness:
    """The model as a block head, without a key for the first token."""
    h.model.layer.attn_type = AttentionType.ENCODER_ONLY
    needs: dict[str, Any] = {"first_key": 1, "blocks": True}
    h.forward.attn_backend = ParticleAttention(h.runner, h.case.tails, attention, **needs)
    return h


@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("name", ["next_logits", "chain_logits"])
@pytest.mark.parametrize("num_columns", [1, 2, 9])
def test_with_triton_nothing_waits_for_the_device(
    name: str, num_columns: int, is_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without data run through all of it; they refuse to tell the host a value."""
    for launched in ("particle_attention._attend_spans", "spans._join_spans"):
        monkeypatch.setattr(f"sglang_smc.kernels.attention.{launched}", Launch())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    one, other = (Harness(case(num_columns), how) for how in ("torch", "triton"))
    if is_head:
        one, other = of_head(one, "torch"), of_head(other, "triton")
    waiting, h = fake(one, mode), fake(other, mode)
    with mode:
        columns = () if name == "next_logits" else (num_columns,)
        assert h.run(name).shape == (*h.case.starts.shape, *columns, 4 * 64)
        with pytest.raises(DynamicOutputShapeException):
            waiting.run(name)


def fake(h: Harness, mode: FakeTensorMode) -> Harness:
    parts = h.case._asdict()
    tensors = {k: mode.from_tensor(v) for k, v in parts.items() if isinstance(v, torch.Tensor)}
    h.case = h.case._replace(**tensors)
    h.tokens, h.slots = mode.from_tensor(h.tokens), mode.from_tensor(h.slots)
    return h
