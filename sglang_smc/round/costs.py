"""Measure the cost of rounds on this machine when a server starts."""

import itertools
import logging
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from sglang_smc.models.forward import ParticleForward
from sglang_smc.options.policy import COSTS_ENV, Costs, Curve, RoundCosts
from sglang_smc.options.request import OFF, Budget, budgets
from sglang_smc.options.server import SMCConfig
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
# Requests and tokens of each, by which the cost of reading is measured.
_READ = 16
_LENGTH = 1024


def costs_of(measure: Callable[[], AnyCosts], group: Any) -> AnyCosts:
    """Return costs from the environment, or measured ones: the same on all ranks of ``group``.

    Every rank must call it: passes of tensor-parallel models wait for each other.
    """
    given = os.environ.get(COSTS_ENV)
    if given is not None:
        return Costs.parse(given)
    start = time.perf_counter()
    found = group.broadcast_object(measure(), src=0)
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
) -> RoundCosts:
    """Measure rounds that are launched from the host, before any request comes in."""
    on_cpu = tables.ledger.device.type == "cpu"
    every = budgets(Budget(config.num_particles, config.num_steps))
    most_rows = _MOST_ROWS_OF_CPU if on_cpu else _MOST_ROWS
    stand_ins = StandIns.of(tables, config)

    def sizes(budget: Budget) -> Iterator[int]:
        rows = budget.num_particles * (budget.num_steps + 1)
        most = min(max(most_rows // rows, 2), most_requests)  # two, to know what one more costs
        most = min(most, stand_ins.room(budget))
        yield from itertools.takewhile(lambda size: size < most, (4**i for i in itertools.count()))
        yield most

    def launch(budget: Budget, inputs: RoundInputs) -> Outcome:
        return play(inputs, shape_of_server(config, budget))

    every_size = {of: list(sizes(of)) for of in every}
    return _measured(launch, every_size, stand_ins, most_requests, is_noisy=True)


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
    return _measured(replay, sizes, stand_ins, most_requests, is_noisy=False)


def _measured(
    play: Callable[[Budget, RoundInputs], Outcome],
    sizes: Mapping[Budget, list[int]],
    stand_ins: StandIns,
    most_requests: int,
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
        (budget, size, way)
        for budget, of_budget in sizes.items()
        for size in of_budget
        for way in (ways if budget.num_particles > 1 and budget.num_steps else [Branches.MOST])
    ]

    def prepared(budget: Budget, size: int, way: Branches) -> Callable[[], Outcome]:
        return partial(play, budget, stand_ins.begin(budget, size, way))

    counted: dict[tuple[Budget, Branches], float] = {}
    with torch.no_grad():
        found = _seconds_of({key: partial(prepared, *key) for key in keys}, device)
        for budget, size, way in keys:
            if size == sizes[budget][-1]:
                of_each = prepared(budget, size, way)().num_nodes
                counted[budget, way] = 0.0 if of_each is None else float(of_each.double().mean())
        stand_ins.end()
        reading = _reading_of(play, list(sizes), stand_ins, most_requests)

    def least(budget: Budget, size: int, way: Branches) -> float:
        """Return the seconds, of launched rounds less the noise, which larger ones have, too."""
        if not is_noisy:
            return found[budget, size, way]
        return min(
            seconds
            for (other, its_size, its), seconds in found.items()
            if other.within(budget) == budget and its_size >= size and its in (way, Branches.MOST)
        )

    def curve(budget: Budget, way: Branches) -> Curve:
        return Curve.of((size, least(budget, size, way)) for size in sizes[budget])

    nodes: dict[Budget, tuple[tuple[float, Curve], ...]] = {}
    for budget, way in counted:
        before = nodes.get(budget, ())
        if counted[budget, way] > (before[-1][0] + _APART if before else 0.0):
            nodes[budget] = (*before, (counted[budget, way], curve(budget, way)))
    return RoundCosts({of: curve(of, Branches.MOST) for of in sizes}, reading, nodes)


def _reading_of(
    play: Callable[[Budget, RoundInputs], Outcome],
    every: Collection[Budget],
    stand_ins: StandIns,
    most_requests: int,
) -> dict[Budget, float]:
    """Return the seconds that a round takes longer for each token of its sequences.

    They are those of the target's pass, and of K draft passes, whatever N is. The first rows of the
    tables, which no request has yet, get long sequences of slots apart.
    """
    tables = stand_ins.tables
    config = stand_ins.config
    ledger = tables.ledger
    device = str(tables.ledger.device)
    rows = torch.arange(min(_READ, most_requests), device=device)
    length = min(_LENGTH, ledger.table.shape[1] // 2)
    slots = torch.arange(len(rows) * length, device=device) % len(ledger.rank)

    def inputs(budget: Budget, length: int) -> RoundInputs:
        padding = RoundInputs.of_padding(config, budget, len(rows), device, length)
        return padding._replace(rows=rows)

    deepest = max(every, key=lambda budget: (-budget.num_particles, budget.num_steps))
    keys = [(budget, tokens) for budget in (OFF, deepest) for tokens in (1, length)]
    runs = {key: partial(partial, play, key[0], inputs(*key)) for key in keys}
    tables.begin_padding(config, len(rows))
    before = ledger.table[rows]
    ledger.table[rows, :length] = slots.view(len(rows), -1).to(ledger.table.dtype)
    found = _seconds_of(runs, device)
    ledger.table[rows] = before
    target, both = (max(found[of, length] - found[of, 1], 0.0) for of in (OFF, deepest))
    draft = max(both - target, 0.0) / deepest.num_steps
    return {of: (target + of.num_steps * draft) / len(slots) for of in every}


def _seconds_of(
    runs: Mapping[T, Callable[[], Callable[[], object]]], device: str
) -> dict[T, float]:
    """Return the seconds of the fastest of each but the first, run in turns.

    The first may compile and allocate; what else the machine does may slow down others, but for
    a model that runs in one thread of a CPU, whose own seconds count.

    Args:
        runs: each prepares a run, in time that does not count, and returns it.
    """
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    times: dict[T, list[float]] = {key: [] for key in runs}
    for _ in range(1 + _REPEATS):
        for key, prepare in runs.items():
            run = prepare()
            _wait(device)
            start = clock()
            run()
            _wait(device)
            times[key].append(clock() - start)
    return {key: min(of[1:]) for key, of in times.items()}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.get_device_module(device).synchronize()
