"""What a server captures, at its real sizes on fake CUDA tensors: no wait, no copy, few launches.

Rounds that a server may capture are lines of `ROUNDS`; their limits stand beside them.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from fake_cuda import VOCAB_SIZE, fake_cuda, trace_round
from fake_llama import layer_pass
from torch.utils._pytree import tree_leaves

from sglang_smc.kernels.attention import work
from sglang_smc.kernels.attention.particle_attention import particle_attention
from sglang_smc.kv.rounds import round_bytes
from sglang_smc.options.request import OFF, without_drafts
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import RoundShape, shape_of_any, shape_of_server
from sglang_smc.round.graph import Kinds
from sglang_smc.smc.ledger import AttentionContext, KVLocations
from sglang_smc.smc.ops import MOST_SKINNY_ROWS, Ops
from sglang_smc.smc.settings import Need
from sglang_smc.state.logprobs import recorded_logprobs
from sglang_smc_tools.plan.shapes import from_config

FILTERS = {"needs": {Need.FILTERS}}
ANYTHING = shape_of_any(SMCConfig(), None, recorded_logprobs(VOCAB_SIZE))._asdict()
GREEDY = {"needs": {Need.TREES}, "without": {Need.VERIFIES}}
# One request of a batch asks for log-probabilities, or edits logits.
EDITS = {"needs": {Need.EDITS}}
SHOWN = EDITS | {"logprobs": recorded_logprobs(VOCAB_SIZE)}
SHOWN_FILTERED = SHOWN | {"needs": {Need.EDITS, Need.FILTERS}}
EXACT = SMCConfig(mode="exact")
AUTO = SMCConfig(mode="auto")
POWERS, POWERS_OF_EXACT = (
    Kinds.of(config, recorded_logprobs(VOCAB_SIZE)).powers._asdict()
    for config in (SMCConfig(), EXACT)
)
#: Rounds that a server captures, or might: its configuration, fields of the shape beside those of
#: what it captures now, and the most that a round may take at N = K = 8 and V = 128,256, beside the
#: models: launches (calls of torch that are more than views, and kernels), MB a group that calls of
#: torch read and write, and MB a group alive at once, the models' logits among them.
ROUNDS: dict[str, tuple[SMCConfig, dict[str, Any], int, float, float]] = {
    "smc": (SMCConfig(), {}, 98, 1, 61),
    "exact": (EXACT, {}, 124, 5.5, 94),
    "auto": (AUTO, {}, 124, 5.5, 94),
    "smc, filtered": (SMCConfig(), FILTERS, 118, 1, 61),
    "exact, filtered": (EXACT, FILTERS, 144, 5.5, 94),
    "powered": (SMCConfig(power=2.0, proposal="draft"), {}, 122, 1, 61),
    "edited": (SMCConfig(), EDITS, 117, 1.5, 63),
    "shown": (SMCConfig(), SHOWN, 168, 76, 81),
    "shown, filtered": (SMCConfig(), SHOWN_FILTERED, 137, 76, 81),
    "exact, shown": (EXACT, SHOWN, 194, 81, 115),
    "greedy": (EXACT, GREEDY, 207, 34, 64),
    "off": (without_drafts(SMCConfig()), {"budget": OFF, **FILTERS}, 49, 1, 0.8),
    "powers": (SMCConfig(), POWERS, 249, 9, 95),
    "exact, powers": (EXACT, POWERS_OF_EXACT, 303, 19, 95),
    "anything": (SMCConfig(), ANYTHING, 365, 124, 121),
}


def shape_of(
    config: SMCConfig, needs: Iterable[Need] = (), without: Iterable[Need] = (), **more: Any
) -> RoundShape:
    shape = shape_of_server(config)._replace(**more)
    return shape.needing(shape.needs.difference(without).union(needs))


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 8) for name in ROUNDS), ("anything", 1), ("anything", 48)]
)
def test_a_captured_round_asks_little_of_the_device(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch, kernels: Ops
) -> None:
    config, more, launches, moved, peak = ROUNDS[name]
    shape = shape_of(config, **more)
    found = trace_round(monkeypatch, config, shape, size, kernels)
    assert launches / 2 < len(found.calls) <= launches, Counter(found.calls).most_common()
    assert found.num_bytes / size / 1e6 <= moved
    assert peak / 2 < found.peak / size / 1e6 <= peak, found.peak / size
    tensors = [one for one in tree_leaves(found.outcome) if one is not None]
    assert all(one.device.type == "cuda" for one in tensors)


@pytest.mark.parametrize(
    ("mode", "num_particles", "num_steps"),
    [("smc", 8, 8), ("exact", 16, 4), ("auto", 4, 1), ("smc", 1, 12), ("exact", 8, 8)],
)
def test_memory_is_what_the_arithmetic_says(
    mode: str, num_particles: int, num_steps: int, monkeypatch: pytest.MonkeyPatch, kernels: Ops
) -> None:
    config = SMCConfig(mode=mode, num_particles=num_particles, num_steps=num_steps)
    found = trace_round(monkeypatch, config, shape_of_server(config), 4, kernels)
    sizes = num_particles, num_steps, VOCAB_SIZE
    expected = 4 * round_bytes(*sizes, verifies=not config.weighs)
    assert found.peak == pytest.approx(expected, rel=0.15)
    shape = shape_of_any(config, None, recorded_logprobs(VOCAB_SIZE))
    found = trace_round(monkeypatch, config, shape, 4, kernels)
    expected = 4 * round_bytes(*sizes, mixes=True)
    assert found.peak == pytest.approx(expected, rel=0.15)


FUSED = ["_skinny", "_attend_spans", "_skinny", "_skinny", "_skinny"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("size", "num_columns", "layers"),
    [
        *((size, num_columns, "sglang") for size, num_columns in ((1, 1), (48, 2))),
        *((size, num_columns, "fused") for size, num_columns in ((1, 1), (1, 2), (4, 2), (48, 1))),
        (1, 1, "fused-int8"),
    ],
)
def test_a_layer_of_a_draft_pass_takes_few_launches(
    num_columns: int, size: int, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where a pass launches more than the layer's products, norms and attention.

    Or reads other weights than the planner says.
    """
    launches, read, overlap = layer_pass(monkeypatch, num_columns, size, layers=layers)
    print(*launches)
    if layers != "sglang" and 8 * size * num_columns <= MOST_SKINNY_ROWS:
        assert launches == FUSED and overlap == 5
    else:
        assert launches.count("mm") == 4 and len(launches) <= 8, launches
    model = from_config("llama-3.2-1b")
    model = model.fused_in_int8() if layers == "fused-int8" else model
    assert read * model.num_layers == model.bytes_read(8 * size * num_columns, with_head=False)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("size", "attends"), [(1, ["_join_spans"]), (8, [])])
def test_a_layer_of_verification_rotates_and_writes_in_its_attention(
    size: int, attends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where SGLang's kernels rotate or store, which took two launches more."""
    launches, _, _ = layer_pass(monkeypatch, 9, size, layers="sglang")
    print(*launches)
    first, second, *_ = (nth for nth, name in enumerate(launches) if name == "mm")
    assert launches[first + 1 : second] == ["_attend_spans", *attends]


@pytest.mark.parametrize("size", [1, 8])
def test_attention_of_many_requests_has_no_partial_results(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification by Llama 8B on an H100: red where more than queries and output is kept."""
    monkeypatch.setattr(work, "chip_of", lambda _: work.H100)
    with fake_cuda(monkeypatch) as (_, account):
        query = torch.empty(size, 8, 9, 32, 128, dtype=torch.bfloat16, device="cuda")
        cache = query.new_empty(64, 8, 128)
        table = torch.zeros(8 * size, 512, dtype=torch.int32, device="cuda")
        rows = torch.zeros(size, 8, dtype=torch.int64, device="cuda")
        first = rows[:, 0].contiguous()
        locations = KVLocations(first, first, rows, max_tail=265)
        context = AttentionContext(table, table, locations, rows)
        with account:
            particle_attention(query, cache, cache, context, max_prefix=8192, scaling=0.1)
    parts = account.peak - 2 * query.nbytes
    joins = account.calls.count("_join_spans")
    assert parts == joins == 0 if size == 8 else parts > 4 * query.nbytes and joins == 1


def test_arguments_on_the_host_are_refused(monkeypatch: pytest.MonkeyPatch, kernels: Ops) -> None:
    """Other mistakes are in `unit/test_host_sync.py`."""
    with fake_cuda(monkeypatch) as (_, account):
        on_device = torch.ones(3, dtype=torch.int64, device="cuda")
        with pytest.raises(AssertionError, match="reads the host's memory"):
            kernels.round_seeds(on_device, torch.ones(3).long())
        with pytest.raises(AssertionError, match="is copied"), account:
            torch.index_put_(on_device, (on_device * 0,), torch.tensor(2))
