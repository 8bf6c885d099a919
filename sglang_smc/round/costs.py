"""Measure the cost of rounds on this machine when a server starts."""

import itertools
import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from sglang_smc.models.forward import ParticleForward
from sglang_smc.options.policy import COSTS_ENV, Costs, Curve, RoundCosts
from sglang_smc.options.request import OFF, Budget, budgets
from sglang_smc.options.server import SMCConfig
from sglang_smc.options.unmeasured import completed
from sglang_smc.proposers.base import DraftProposer, DraftSlots
from sglang_smc.round.batch import RoundInputs, RoundShape, Tables, shape_of_server
from sglang_smc.round.graph import Recordings
from sglang_smc.round.result import Outcome
from sglang_smc.round.stand_ins import Branches, StandIns
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ledger import KVLocations, Ledger
from sglang_smc.smc.ops import Ops

logger = logging.getLogger(__name__)

AnyCosts = Costs | RoundCosts
T = TypeVar("T")

# Rows of a target pass, beyond which costs are linear: on a GPU, passes that memory bounds end.
_MOST_ROWS = 2048
_MOST_ROWS_OF_CPU = 512
_REPEATS = 3
_APART = 0.5  # distinct nodes by which trees differ at least to be measured apart
_SECONDS = 4.0  # that rounds which are launched are measured for
_OF_ROUNDS = 0.7  # share of this time for rounds, and the rest for what reading costs
_ONCE = 0.6  # share of that in which each is run once: what was run once alone may have compiled
_GROWS = 2.0  # times that a round takes longer than the longest before it, where rows ascend
_LEAST = 2  # rounds that are measured whatever they take: of OFF, and of N = K = 1
_RUNS_OF_READING = 4  # of the longest kind, at least
_MOST = Branches.MOST
# Requests and tokens of each, by which the cost of reading is measured.
_READ = 16
_READ_ON_CPU = 4
_LENGTH = 1024


class Allowance:
    """Time that measuring may take.

    Args:
        seconds: infinity for any.
        agree: returns the first rank's answer on all ranks: passes of tensor-parallel models wait
            for each other.
    """

    def __init__(self, seconds: float = math.inf, agree: Callable[[bool], bool] = bool) -> None:
        self._begins = time.perf_counter()
        self._seconds = seconds
        self._agree = agree

    def has(self, seconds: float, share: float = 1.0) -> bool:
        """Return whether so many seconds are left of this share of the time."""
        ends = self._begins + share * self._seconds
        return self._agree(time.perf_counter() + seconds <= ends)


def costs_of(measure: Callable[[Allowance], AnyCosts], group: Any) -> AnyCosts | None:
    """Return costs from the environment, or measured ones: the same on all ranks of ``group``.

    Every rank must call it. None where measuring fails, with a warning.
    """
    given = os.environ.get(COSTS_ENV)
    if given is not None:
        return Costs.parse(given)
    start = time.perf_counter()
    allowance = Allowance(_SECONDS, lambda mine: group.broadcast_object(mine, src=0))
    try:
        own = measure(allowance)
    except Exception as error:
        logger.warning(
            "SMC cannot measure rounds: %s: %s. N and K do not follow the load. Pass "
            "--speculative-smc-adaptive off to start without measuring.",
            type(error).__name__,
            error,
        )
        own = None
    found = group.broadcast_object(own, src=0)
    if found is not None:
        seconds = time.perf_counter() - start
        logger.info("SMC measured rounds in %.1f s: %s", seconds, found.as_dict())
    return found


def rehearse(target: ParticleForward, draft: DraftProposer, ledger: Ledger, ops: Ops) -> None:
    """Run each model once over a particle, so that an unsupported one fails at start.

    Raises ValueError if a model cannot run over particles; it includes the cause and a remedy.
    """
    zero = torch.zeros(1, dtype=torch.int64, device=ledger.device)
    # SGLang's padding row, with its particles and its KV slot 0.
    locations = KVLocations(zero, zero + 1, ledger.particle_rows(zero, 1), max_tail=1)
    slots = zero.view(1, 1, 1).repeat(4, 1, 1)  # [K + 2, G, N] of two draft tokens
    at = DraftSlots(slots, slots + 1, locations, ledger)
    one, two = (slots[:count].permute(1, 2, 0) for count in (1, 2))  # tokens [G, N, C]

    def law(logits: torch.Tensor) -> TokenDistribution:
        return ops.distribution.of_log_probs(logits.flatten(0, -2))

    for name, run in (
        ("--speculative-draft-model-path", lambda: draft.first_logits(two, at)),
        (
            "--speculative-draft-model-path",
            lambda: law(draft.next_logits(1, slots[0], at)).sample(zero.double()),
        ),
        ("--model-path", lambda: law(target.chain_logits(at.chains(one, 0))).score(zero)),
    ):
        try:
            with torch.no_grad():
                run()
        except Exception as error:
            raise ValueError(
                f"{name} cannot run over particles: {type(error).__name__}: {error}. {_cure(error)}"
            ) from error


# What torch says of operands that differ in dtype.
_MISMATCHES = ("same dtype", "scalar type")


def _cure(error: Exception) -> str:
    """Return the remedy for a pass that raises.

    The cause may be a kernel, memory, dtypes or the model.
    """
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_globals["__name__"].startswith("sglang_smc.kernels") for frame, _ in frames):
        return (
            "A kernel of sglang-smc fails: pass --speculative-smc-kernels torch, which is slower."
        )
    if isinstance(error, torch.OutOfMemoryError):
        return "Pass a smaller --mem-fraction-static, or a smaller --max-running-requests."
    if any(words in str(error) for words in _MISMATCHES):
        return "Pass --dtype, such as --dtype bfloat16, in which both models are loaded then."
    return "Choose another model or another --speculative-algorithm."


def costs_of_launched(
    play: Callable[[RoundInputs, RoundShape], Outcome],
    config: SMCConfig,
    most_requests: int,
    tables: Tables,
    allowance: Allowance,
) -> RoundCosts:
    """Measure rounds that are launched from the host, before any request comes in.

    Those of the least and most K are, as far as time allows, the smallest first.
    """
    on_cpu = tables.ledger.device.type == "cpu"
    every = budgets(Budget(config.num_particles, config.num_steps))
    most_rows = _MOST_ROWS_OF_CPU if on_cpu else _MOST_ROWS
    stand_ins = StandIns.of(tables, config)

    def sizes(budget: Budget) -> Iterator[int]:
        at_most = max(most_rows // _rows(budget), 2)  # two, to know what one more costs
        most = min(at_most, most_requests, stand_ins.room(budget))
        yield from itertools.takewhile(lambda size: size < most, (4**i for i in itertools.count()))
        yield most

    def launch(budget: Budget, inputs: RoundInputs) -> Outcome:
        return play(inputs, shape_of_server(config, budget))

    ends = {of: list(sizes(of)) for of in every if of.num_steps in (0, 1, config.num_steps)}
    found = _measured(launch, ends, stand_ins, most_requests, allowance, is_noisy=True)
    return completed(found, every)


def _rows(budget: Budget) -> int:
    """Return the rows of a request that the target reads."""
    return budget.num_particles * (budget.num_steps + 1)


def costs_of_recordings(
    recordings: Recordings, config: SMCConfig, most_requests: int, tables: Tables
) -> RoundCosts:
    """Measure captured rounds, before any request comes in.

    For each budget the kind of round that most requests use is measured.
    """
    measured = {of: found[0] for of, found in recordings.of_budget.items() if of is not None}
    stand_ins = StandIns.of(tables, config)

    def replay(budget: Budget, inputs: RoundInputs) -> Outcome:
        return measured[budget].replay(inputs)

    most = stand_ins.most
    sizes = {of: [s for s in graphs.sizes if s <= most] for of, graphs in measured.items()}
    return _measured(replay, sizes, stand_ins, most_requests, Allowance(), is_noisy=False)


class _Key(NamedTuple):
    """A kind of round that is measured."""

    budget: Budget
    size: int  # requests
    way: Branches

    @property
    def rows(self) -> int:
        return self.size * _rows(self.budget)


def _measured(
    play: Callable[[Budget, RoundInputs], Outcome],
    sizes: Mapping[Budget, list[int]],
    stand_ins: StandIns,
    most_requests: int,
    allowance: Allowance,
    *,
    is_noisy: bool,
) -> RoundCosts:
    """Measure rounds of each budget and number of requests, of trees of few and of many nodes."""
    device = str(stand_ins.tables.ledger.device)
    # Without kernels rows of one text run once, and time is linear in the others.
    ways = [Branches.NONE, Branches.OWN, Branches.MOST]
    if stand_ins.tables.ops.kind == "torch":
        ways.remove(Branches.OWN)
    keys = [
        _Key(budget, size, way)
        for budget, of_budget in sizes.items()
        for size in of_budget
        for way in (ways if budget.num_particles > 1 and budget.num_steps else [Branches.MOST])
    ]

    nodes: dict[_Key, torch.Tensor | None] = {}

    def run(key: _Key, inputs: RoundInputs) -> None:
        nodes[key] = play(key.budget, inputs).num_nodes

    def prepared(key: _Key) -> Callable[[], None]:
        return partial(run, key, stand_ins.begin(*key))

    with torch.no_grad():
        try:
            runs = {key: partial(prepared, key) for key in sorted(keys, key=lambda key: key.rows)}
            found = _seconds_of(runs, device, allowance, _OF_ROUNDS)
        finally:
            stand_ins.end()
        largest = {(key.budget, key.way): nodes[key] for key in found}
        counted = {
            of: 0.0 if each is None else float(each.double().mean()) for of, each in largest.items()
        }
        table = _table_of(found, counted, is_noisy=is_noisy)
        reading = _reading_of(play, table.rounds, stand_ins, most_requests, allowance)
    return table._replace(reading=reading)


def _table_of(
    found: Mapping[_Key, float],
    counted: Mapping[tuple[Budget, Branches], float],
    *,
    is_noisy: bool,
) -> RoundCosts:
    """Return costs by the seconds of rounds, and by the nodes of their trees."""

    def least(of: _Key) -> float:
        """Return the seconds, of launched rounds less the noise, which larger ones have, too."""
        if not is_noisy:
            return found[of]
        return min(
            seconds
            for key, seconds in found.items()
            if key.budget.within(of.budget) == of.budget
            and key.size >= of.size
            and key.way in (of.way, Branches.MOST)
        )

    def curve(budget: Budget, way: Branches) -> Curve:
        own = (key for key in found if key.budget == budget and key.way == way)
        return Curve.of((key.size, least(key)) for key in own)

    nodes: dict[Budget, tuple[tuple[float, Curve], ...]] = {}
    for budget, way in sorted(counted, key=counted.__getitem__):
        before = nodes.get(budget, ())
        if counted[budget, way] > (before[-1][0] + _APART if before else 0.0):
            nodes[budget] = (*before, (counted[budget, way], curve(budget, way)))
    rounds = {key.budget: curve(key.budget, Branches.MOST) for key in found if key.way == _MOST}
    return RoundCosts(rounds, nodes=nodes)


def _reading_of(
    play: Callable[[Budget, RoundInputs], Outcome],
    rounds: Mapping[Budget, Curve],
    stand_ins: StandIns,
    most_requests: int,
    allowance: Allowance,
) -> dict[Budget, float]:
    """Return the seconds that a round takes longer for each token of its sequences.

    They are those of the target's pass, and of K draft passes, whatever N is. The first rows of the
    tables, which no request has yet, get long sequences of slots apart. Empty where there is no
    time for it.
    """
    tables = stand_ins.tables
    config = stand_ins.config
    ledger = tables.ledger
    device = str(tables.ledger.device)
    deepest = max(rounds, key=lambda budget: (-budget.num_particles, budget.num_steps))
    most = _READ_ON_CPU if device == "cpu" else _READ
    rows = torch.arange(min(most, most_requests), device=device)
    if not allowance.has(_RUNS_OF_READING * rounds[deepest].at(len(rows))):
        return {}
    length = min(_LENGTH, ledger.table.shape[1] // 2)
    slots = torch.arange(len(rows) * length, device=device) % len(ledger.rank)

    def inputs(budget: Budget, length: int) -> RoundInputs:
        padding = RoundInputs.of_padding(config, budget, len(rows), device, length)
        return padding._replace(rows=rows)

    keys = [(budget, tokens) for budget in (OFF, deepest) for tokens in (1, length)]
    runs = {key: partial(partial, play, key[0], inputs(*key)) for key in keys}
    tables.begin_padding(config, len(rows))
    before = ledger.table[rows]
    ledger.table[rows, :length] = slots.view(len(rows), -1).to(ledger.table.dtype)
    try:
        found = _seconds_of(runs, device, allowance)
    finally:
        ledger.table[rows] = before
    if len(found) < len(keys):
        return {}
    target, both = (max(found[of, length] - found[of, 1], 0.0) for of in (OFF, deepest))
    draft = max(both - target, 0.0) / deepest.num_steps
    return {of: (target + of.num_steps * draft) / len(slots) for of in rounds}


def _seconds_of(
    runs: Mapping[T, Callable[[], Callable[[], object]]],
    device: str,
    allowance: Allowance,
    share: float = 1.0,
) -> dict[T, float]:
    """Return the seconds of the fastest of each but the first, run in turns.

    The first may compile and allocate; what else the machine does may slow down others, but for
    a model that runs in one thread of a CPU, whose own seconds count. Where time is short, the last
    of the runs have fewer turns than the first, or are left out.

    Args:
        runs: each prepares a run, in time that does not count, and returns it; those that take
            longer come last.
        share: of the allowance.
    """
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter

    def seconds_of(prepare: Callable[[], Callable[[], object]]) -> float:
        run = prepare()
        _wait(device)
        start = clock()
        run()
        _wait(device)
        return clock() - start

    times: dict[T, list[float]] = {}
    for key, prepare in runs.items():
        longest = max(map(max, times.values()), default=0.0)
        if len(times) >= _LEAST and not allowance.has(_GROWS * longest, _ONCE * share):
            break
        times[key] = [seconds_of(prepare)]
    turns = (key for _ in range(_REPEATS) for key in times)
    for key in itertools.takewhile(lambda key: allowance.has(times[key][-1], share), turns):
        times[key].append(seconds_of(runs[key]))
    return {key: min(of[1:] or of) for key, of in times.items()}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()
