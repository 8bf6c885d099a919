"""Which passes of a draft run by fused layers: by stand-ins for passes and their clock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_smc.proposers import layer_choice
from sglang_smc.proposers.layer_choice import (
    REPLAYS,
    CapturedWay,
    LayerChoice,
    LayerTrial,
    PassClock,
    Times,
)
from sglang_smc.proposers.layer_trials import trials
from sglang_smc.smc.ledger import Ledger

VOCAB_SIZE = 50


class Time:
    """A clock that passes alone advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def clock(self) -> PassClock:
        return PassClock(lambda: None, lambda: self.seconds)


def way(
    time: Time,
    tokens: torch.Tensor,
    milliseconds: float,
    change: Callable[[torch.Tensor, int], torch.Tensor] = lambda logits, nth: logits,
) -> CapturedWay:
    """A pass whose logits follow from its tokens; ``change`` spoils some replays."""
    logits = torch.zeros(len(tokens), 3)
    count = [0]

    def replay() -> None:
        time.seconds += milliseconds / 1000
        row = torch.stack([tokens.float(), tokens.cos(), torch.full(tokens.shape, -torch.inf)], 1)
        logits.copy_(change(row, count[0]))
        count[0] += 1

    return CapturedWay(logits, replay)


def trial(time: Time, num_rows: int, sglang: float, fused: float, **changes: Any) -> LayerTrial:
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    ways = {"sglang": sglang, "in_order": 2 * fused, "overlapped": fused}
    found = {name: way(time, tokens, of, *changes.get(name, ())) for name, of in ways.items()}
    return LayerTrial(num_rows, tokens, VOCAB_SIZE, **found)


def test_a_size_is_fused_where_that_is_clearly_faster() -> None:
    """2 % is noise. A size between two is padded to the larger one; beyond all SGLang's run."""
    time = Time()
    choice = LayerChoice()
    assert not choice.fuses(8) and choice.is_open
    of_rows = {8: (2.0, 1.0), 16: (2.0, 1.96), 32: (2.0, 1.5), 64: (1.0, 2.0)}
    choice.make([trial(time, rows, *of) for rows, of in of_rows.items()], time.clock())
    fused = {rows for rows in range(1, 100) if choice.fuses(rows)}
    assert fused == {*range(1, 9), *range(17, 33)} and not choice.is_open
    told = choice.as_dict()
    assert told["reason"] is None
    times = {one["rows"]: (one["sglang"], one["fused"]) for one in told["passes"]}
    assert {rows: pytest.approx(of) for rows, of in of_rows.items()} == times
    assert [one["layers"] for one in told["passes"]] == ["fused", "sglang", "fused", "sglang"]


def last_bit(logits: torch.Tensor, nth: int) -> torch.Tensor:
    """One of the last replays ends in another bit, as where launches race."""
    return torch.where(
        logits.isfinite() & (nth == REPLAYS - 2), logits.nextafter(logits + 1), logits
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"overlapped": last_bit}, "over 16 rows launches that overlap give other bits"),
        (dict.fromkeys(("in_order", "overlapped"), lambda x, _: 1.2 * x), "a logit is 0.2 apart"),
        (dict.fromkeys(("in_order", "overlapped"), lambda x, _: 1.01 * x), None),
        ({"in_order": lambda x, _: x * torch.nan}, "other bits"),
        (dict.fromkeys(("in_order", "overlapped"), lambda x, _: x.abs()), "a logit is inf apart"),
    ],
)
def test_layers_that_differ_run_no_pass(
    changes: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    # Where an engine has run in this process, `caplog` hears nothing.
    monkeypatch.setattr(
        layer_choice.logger, "warning", lambda form, *told: logged.append(form % told)
    )
    time = Time()
    choice = LayerChoice()
    own = {name: (change,) for name, change in changes.items()}
    passes = trial(time, 8, 2.0, 1.0), trial(time, 16, 2.0, 1.0, **own)
    choice.make(passes, time.clock())
    assert choice.fuses(8) is choice.fuses(16) is (said is None)
    assert said is None or (said in logged[0] and said in choice.as_dict()["reason"])


class Draft:
    """Notes what its passes run by; its layers see so many rows a particle in each."""

    def __init__(self, choice: LayerChoice, of_first: int, of_next: int) -> None:
        self._choice = choice
        self._rows = of_first, of_next
        self.ran: list[tuple[str, int, bool]] = []

    def first_logits(self, last_two: torch.Tensor, at: Any) -> torch.Tensor:
        return self._run("first", 0, last_two[..., 0])

    def next_logits(self, step: int, tokens: torch.Tensor, at: Any) -> torch.Tensor:
        return self._run("next", 1, tokens)

    def _run(self, name: str, nth: int, tokens: torch.Tensor) -> torch.Tensor:
        rows = tokens.numel() * self._rows[nth]
        if rows:
            self.ran.append((name, rows, self._choice.fuses(rows)))
        return tokens.unsqueeze(-1).float()


@pytest.mark.parametrize(
    ("of_first", "of_next", "taken", "rows"),
    [(2, 1, "next", [4, 32, 64]), (4, 0, "first", [16])],  # a language model's, and a block's
)
def test_what_is_captured_is_the_pass_that_a_draft_repeats(
    of_first: int, of_next: int, taken: str, rows: list[int]
) -> None:
    """By SGLang's layers once, and by fused ones twice: first in order. More rows are left out."""
    choice = LayerChoice()
    draft: Any = Draft(choice, of_first, of_next)
    recorded: list[tuple[str, int, bool, bool]] = []
    waits = [False]

    @contextmanager
    def in_order() -> Iterator[None]:
        waits[0] = True
        yield
        waits[0] = False

    def record(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        found = run()
        recorded.append((*draft.ran[-1], waits[0]))
        return found, lambda: None

    table = torch.full((40, 16), 7, dtype=torch.int32)
    tails = torch.zeros(40 * 4, 16, dtype=torch.int32)
    ledger = Ledger(table, tails, num_particles=4, max_tail=8, num_slots=4_000)
    sizes = [1, 8, 16, 32]
    of: Any = SimpleNamespace(record=record)
    found = [*trials(choice, draft, ledger, sizes, VOCAB_SIZE, of.record, in_order)]
    assert [one.num_rows for one in found] == rows
    kinds = (False, False), (True, True), (True, False)
    assert recorded == [(taken, one, *kind) for one in rows for kind in kinds]
    # Particles share the slot of their prompt alone.
    used = tails[4 : 4 + 16 * 4, 1:4].flatten() if taken == "next" else tails[4:8, 1:4].flatten()
    assert len(used.unique()) == used.numel() and (used > 0).all() and (table[1, 0] == 0)


def test_times_are_medians_of_turns() -> None:
    assert Times(1.03, 1.0).is_fused and not Times(1.02, 1.0).is_fused
