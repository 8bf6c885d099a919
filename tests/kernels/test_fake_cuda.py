"""What a server captures, at its real sizes on fake CUDA tensors: no wait, no copy, few launches.

Rounds that a server may capture are lines of `ROUNDS`; their limits stand beside them.
"""

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from fake_cuda import VOCAB_SIZE, fake_cuda, trace_round
from torch.utils._pytree import tree_leaves

from sglang_smc.kv.rounds import round_bytes
from sglang_smc.ops.interface import Ops
from sglang_smc.options.server import SMCConfig
from sglang_smc.round.batch import RoundShape, shape_of_any, shape_of_server
from sglang_smc.smc.distribution import FilterKinds
from sglang_smc.state.population import recorded_logprobs


class Limits(NamedTuple):
    """The most that a round may take at N = K = 8 and V = 128,256, beside the models."""

    launches: int  # calls of torch that are more than views, and kernels
    moved: float  # MB a group that calls of torch read and write
    peak: float  # MB a group alive at once, the models' logits among them


class Case(NamedTuple):
    """A round that a server captures, or might."""

    config: SMCConfig
    more: dict[str, Any]  # fields of its shape, beside those of what it captures now
    limits: Limits

    @property
    def shape(self) -> RoundShape:
        return shape_of_server(self.config)._replace(**self.more)


FILTERS = {"kinds": FilterKinds(filtered=True, greedy=True)}
ANYTHING = shape_of_any(SMCConfig(), None, recorded_logprobs(VOCAB_SIZE))._asdict()
GREEDY = {"walks": False, "branches": True}
# One request of a batch asks for log-probabilities, or edits logits.
SHOWN = {"edits": True, "logprobs": recorded_logprobs(VOCAB_SIZE)}
ROUNDS = {
    "smc": Case(SMCConfig(), {}, Limits(188, 1, 61)),
    "exact": Case(SMCConfig(mode="exact"), {}, Limits(252, 5.5, 94)),
    "mixed": Case(SMCConfig(mode="mixed"), {}, Limits(252, 5.5, 94)),
    "smc, filtered": Case(SMCConfig(), FILTERS, Limits(238, 1, 61)),
    "exact, filtered": Case(SMCConfig(mode="exact"), FILTERS, Limits(302, 5.5, 94)),
    "powered": Case(SMCConfig(power=2.0), {}, Limits(216, 1, 61)),
    "edited": Case(SMCConfig(), {"edits": True}, Limits(208, 1.5, 63)),
    "shown": Case(SMCConfig(), SHOWN, Limits(259, 76, 81)),
    "shown, filtered": Case(SMCConfig(), {**SHOWN, **FILTERS}, Limits(309, 76, 81)),
    "exact, shown": Case(SMCConfig(mode="exact"), SHOWN, Limits(323, 81, 115)),
    "greedy": Case(SMCConfig(mode="exact"), GREEDY, Limits(297, 34, 64)),
    "anything": Case(SMCConfig(), ANYTHING, Limits(531, 124, 121)),
}


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 8) for name in ROUNDS), ("anything", 1), ("anything", 48)]
)
def test_a_captured_round_asks_little_of_the_device(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch, kernels: Ops
) -> None:
    case = ROUNDS[name]
    found, limits = trace_round(monkeypatch, case.config, case.shape, size, kernels), case.limits
    moved, peak = found.num_bytes / size / 1e6, found.peak / size / 1e6
    by_name = Counter(call.name for call in found.calls).most_common()
    assert 100 < len(found.calls) <= limits.launches, by_name
    assert moved <= limits.moved
    assert 50 < peak <= limits.peak
    tensors = [one for one in tree_leaves(found.outcome) if one is not None]
    assert all(one.device.type == "cuda" for one in tensors)


@pytest.mark.parametrize(
    ("mode", "num_particles", "num_steps"),
    [("smc", 8, 8), ("exact", 16, 4), ("mixed", 4, 1), ("smc", 1, 12), ("exact", 8, 8)],
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


def test_arguments_on_the_host_are_refused(monkeypatch: pytest.MonkeyPatch, kernels: Ops) -> None:
    """Other mistakes are in `unit/test_host_sync.py`."""
    with fake_cuda(monkeypatch) as (_, account):
        on_device = torch.ones(3, dtype=torch.int64, device="cuda")
        with pytest.raises(AssertionError, match="reads the host's memory"):
            kernels.round_seeds(on_device, torch.ones(3).long())
        with pytest.raises(AssertionError, match="is copied"), account:
            torch.index_put_(on_device, (on_device * 0,), torch.tensor(2))
