"""What rounds of a mixture of experts cost by the table of the start, beside rounds of requests.

A clock counts the experts that the target's rows visit, whose weights a GPU reads: no time passes.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from in_process import Server
from model_families import make_family
from sglang.srt.layers.moe import topk
from tiny_models import make_tiny_model, smc_arguments

from sglang_smc import process
from sglang_smc.options.policy import Policy
from sglang_smc.options.request import OFF, Budget
from sglang_smc.round import costs
from sglang_smc.round.play import ServedRound

TOP = Budget(8, 2)
SIZES = {"num_particles": 8, "num_steps": 2, "mode": "exact", "adaptive": "on"}
FEW = {"max_running_requests": 4, "max_lag": 16}
EXPERTS = {
    "num_experts": 64,
    "num_local_experts": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 1,
}


class Played(NamedTuple):
    """A round of requests."""

    budget: Budget | None
    size: int
    experts: int  # visited, in all layers
    nodes: int  # distinct ones of all requests


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Played]]:
    """Rounds of requests; time is the number of experts visited."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now, thread_time=lambda: clock.now)
    select = topk.select_experts
    play = ServedRound.play
    rounds: list[Played] = []

    def counted(*args: Any, **more: Any) -> Any:
        chosen = select(*args, **more)
        clock.now += chosen.topk_ids.unique().numel()
        return chosen

    def noted(self: ServedRound, inputs: Any, shape: Any, reqs: Any = (), *args: Any) -> Any:
        before = clock.now
        outcome = play(self, inputs, shape, reqs, *args)
        nodes = (
            len(reqs) * (shape.num_steps + 1)
            if outcome.num_nodes is None
            else sum(outcome.num_nodes)
        )
        if reqs:
            rounds.append(Played(shape.budget, len(reqs), int(clock.now - before), int(nodes)))
        return outcome

    monkeypatch.setattr(costs, "time", clock)
    monkeypatch.setattr(costs, "_SECONDS", math.inf)
    monkeypatch.setattr(topk, "select_experts", counted)
    monkeypatch.setattr(ServedRound, "play", noted)
    yield rounds


def answered(server: Server, size: int) -> None:
    draw = random.Random(size)
    for _ in range(size):
        prompt = [draw.randrange(2, 64) for _ in range(12)]
        own = {"max_new_tokens": 24, "ignore_eos": True}
        server.send(input_ids=prompt, sampling_params=own)
    server.finish()


def test_rounds_cost_what_the_table_says(
    start: Callable[..., Server],
    tmp_path: Path,
    played: list[Played],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red where measured rows are all of one token, which visit the same few experts."""
    target = make_family(tmp_path / "target", "qwen3_moe", **EXPERTS)
    draft = make_tiny_model(tmp_path / "draft", scale=0.9)
    server = start(**smc_arguments(target, draft, **SIZES, **FEW))
    policy = process.active.policy
    assert policy is not None
    monkeypatch.setattr(Policy, "choose", lambda *_, **__: None)
    seconds: dict[tuple[int, Budget], float] = {}
    for size in (1, 4):
        for budget in (TOP, Budget(1, 2), OFF):
            policy.budget = budget
            played.clear()
            answered(server, size)
            full = [one for one in played[1:] if (one.size, one.budget) == (size, budget)]
            true = fmean(one.experts for one in full)
            nodes = fmean(one.nodes for one in full) / size
            told = policy.costs.round(size, budget, TOP, num_nodes=nodes)
            assert told == pytest.approx(true, rel=0.25)
            seconds[size, budget] = true
    assert seconds[1, TOP] > 1.5 * seconds[1, Budget(1, 2)], "rows are not free"
