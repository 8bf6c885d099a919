"""The parts of a server's rounds, put together once its pools are there."""

from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.managers.tp_worker import TpModelWorker

from sglang_smc.drafts import assembly as drafts
from sglang_smc.drafts.corpus import Corpus
from sglang_smc.memory.measured import sizes_of
from sglang_smc.memory.table import Table
from sglang_smc.models.head_kinds import kind_of
from sglang_smc.models.supported import check_layers, heads_of
from sglang_smc.ops.interface import Ops
from sglang_smc.ops.select import kind_of as kind_of_ops
from sglang_smc.ops.select import ops_of
from sglang_smc.options.server import SMCConfig
from sglang_smc.requests.state import RequestStates
from sglang_smc.round.costs import rehearse
from sglang_smc.round.prefill import Prefill
from sglang_smc.round.round import Round
from sglang_smc.round.steps import Steps
from sglang_smc.round.tables import Tables
from sglang_smc.upstream import is_gated_delta

if TYPE_CHECKING:
    from sglang_smc.models.recurrent import RecurrentForward


class Parts(NamedTuple):
    """What a worker runs."""

    steps: Steps
    prefill: Prefill
    round: Round


def operations(
    config: SMCConfig,
    target: TpModelWorker,
    draft: TpModelWorker | None,
    device: str,
    group: GroupCoordinator,
) -> Ops:
    """Return the operations of a server, on a GPU those kernels that agree with torch there.

    Every rank of ``group``, which share the models, must call it.

    Raises:
        ValueError: a kernel fails that `--speculative-smc-kernels triton` or, of attention,
            `--speculative-smc-round-graph on` asks for.
    """
    ops = ops_of(kind_of_ops(config.kernels, device))
    if ops.kind == "torch" or device == "cpu":  # Triton's interpreter is too slow for a start
        return ops
    from sglang_smc.ops import check
    from sglang_smc.ops.check_inputs import Sizes

    runners = [worker.model_runner for worker in (target, draft) if worker is not None]
    heads = tuple(dict.fromkeys(map(heads_of, runners)))
    linear = is_gated_delta(target.model_runner.model_config)
    sizes = Sizes(config.num_particles, config.num_steps, heads, linear)
    found = check.settle(ops, config.kernels, device, sizes, group)
    if found.kind == "torch" and config.round_graph == "on":
        raise ValueError(
            "--speculative-smc-round-graph is 'on', and the kernel of attention fails on this "
            "device (the log says why), without which no round is recorded; allowed: 'auto' or "
            "'off'. Leave it out."
        )
    return found


def assemble(
    target: TpModelWorker,
    draft: TpModelWorker | None,
    *,
    config: SMCConfig,
    ops: Ops,
    states: RequestStates,
    tables: Tables,
    corpus: Corpus | None = None,
) -> Parts:
    """The parts of a server, each model run once over a particle.

    Args:
        target, draft: SGLang's workers of the two models, their pools built; there may be no
            draft model.
        ops: the small operations.
        states: begins requests on the host.
        tables: where they live on the device.
        corpus: what n-gram matches are of, where there are any.

    Raises:
        ValueError: for a model that rounds cannot run.
    """
    sizes = config.num_particles, config.num_steps + 1
    drafting = drafts.assemble(drafts.Beside(target, draft, tables.ledger, ops.kind, *sizes))
    recurrent = _recurrent(target, config, ops, tables)
    steps = Steps(recurrent or drafting.target, drafting.proposal, tables.ledger, ops)
    check_layers(target.model_runner)
    if draft is not None:
        runner = draft.model_runner
        check_layers(runner, blocks=kind_of(runner.model_config) == "dflash")
    rehearse(steps)
    prefill = Prefill(
        target,
        drafting.prompts,
        states,
        tables,
        ops,
        config.num_particles,
        take_up=None if recurrent is None else recurrent.take_up,
    )
    return Parts(steps, prefill, Round(steps, tables, ops, corpus))


def _recurrent(
    target: TpModelWorker, config: SMCConfig, ops: Ops, tables: Tables
) -> "RecurrentForward | None":
    """The target's passes, where some of its layers attend linearly."""
    if not is_gated_delta(target.model_runner.model_config):
        return None
    from sglang_smc.models.recurrent import RecurrentForward

    return RecurrentForward(
        target.model_runner,
        tables.ledger,
        ops.kind,
        num_particles=config.num_particles,
        max_columns=config.num_steps + 1,
    )


def memory_of(
    config: SMCConfig,
    target: TpModelWorker,
    draft: TpModelWorker | None,
    tables: Tables,
    state_bytes: int,
    graph_gigabytes: float,
    **pool: int,
) -> Table:
    """What memory a server has, and what requests take of it, on this rank.

    Args:
        state_bytes: what the draft keeps beside its KV.
        graph_gigabytes: of recorded rounds, 2^30 bytes each.
        pool: as for `sizes_of`.
    """
    states = {"states of the target": state_bytes} if state_bytes else {}
    beside = {**tables.sizes(), **states, "round graphs": round(graph_gigabytes * 2**30)}
    of_draft = None if draft is None else draft.model_runner
    sizes = sizes_of(target.model_runner, of_draft, beside=beside, **pool)
    return Table.of(config, sizes)
