"""Is this an SMC server? Every hook asks before it does anything."""

import logging
from collections.abc import Callable

from msgspec.structs import replace
from sglang.srt.runtime_context import get_parallel, get_server_args

from sglang_smc import upstream
from sglang_smc.memory.table import Table
from sglang_smc.options.budget import Budget
from sglang_smc.options.policy import Costs, Policy, RoundCosts
from sglang_smc.options.server import ALGORITHM, SMCConfig
from sglang_smc.potentials import calls
from sglang_smc.potentials.calls import Caller
from sglang_smc.state.monitor import Monitor
from sglang_smc.state.ranks import RankCheck
from sglang_smc.upstream import Arguments

logger = logging.getLogger(__name__)

_policy: Policy | None = None
_monitor: Monitor | None = None
_measure: Callable[..., Table] | None = None
_memory: Table | None = None
_rank_check = RankCheck()


def is_smc(server_args: Arguments) -> bool:
    """Whether these server arguments select SMC."""
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM


def config_of(server_args: Arguments) -> SMCConfig:
    """The settings of an SMC server, of which these are the resolved arguments."""
    settled = upstream.resolved(server_args)
    config = SMCConfig.from_server_args(settled)
    return config if drafts_all(settled) else replace(config, drafts_all=False)


def drafts_all(settled: Arguments) -> bool:
    """Whether the draft of these arguments, of which no field is open, may draft any token."""
    from sglang_smc.models.head_kinds import knows_all

    path, revision = settled.speculative_draft_model_path, settled.speculative_draft_model_revision
    return path is None or knows_all(path, revision, settled.trust_remote_code)


def potentials_of(server_args: Arguments) -> tuple[str, ...]:
    """What `--speculative-smc-potential` declares."""
    return tuple(upstream.resolved(server_args).speculative_smc_potential or ())  # pyright: ignore[reportAttributeAccessIssue] -- ours


def callers_of(server_args: Arguments, config: SMCConfig, monitor: Monitor) -> dict[str, Caller]:
    """Who asks a server's potentials in this scheduler process; of several ranks the first asks."""
    given, seconds = potentials_of(server_args), config.potential_timeout
    opens = get_parallel().tp_rank == 0
    return calls.callers_of(given, seconds, monitor.time_potential, opens=opens)


def set_policy(policy: Policy | None) -> None:
    """Have this scheduler process adapt N and K to its load, or not."""
    global _policy
    _policy = policy


def adapt(config: SMCConfig, costs: Costs | RoundCosts) -> None:
    """Have this scheduler process adapt N and K to its load, by what rounds cost."""
    set_policy(Policy(Budget(config.num_particles, config.num_steps), costs))


def active_policy() -> Policy | None:
    """What adapts N and K in this scheduler process; None where they stay."""
    return _policy


def set_monitor(monitor: Monitor | None) -> None:
    """Have hooks of this scheduler process count there what no round does."""
    global _monitor
    _monitor = monitor


def active_monitor() -> Monitor | None:
    """What counts the rounds of this scheduler process; None before its worker is built."""
    return _monitor


def check_ranks(tokens: list[list[int]]) -> None:
    """Compare what a round has emitted with the other ranks of this scheduler process, if any.

    Raises:
        RuntimeError: where ranks differ; see `RankCheck.add`.
    """
    _rank_check.add(tokens)


def measure_memory_by(measure: Callable[..., Table] | None) -> None:
    """Have this scheduler process tell what memory it has, once its pools have their sizes."""
    global _measure, _memory
    _measure, _memory = measure, None


def tell_memory(*, num_slots: int, most_running: int) -> None:
    """Log what memory there is and what requests take of it, on the first rank.

    Args:
        num_slots: of the KV pool.
        most_running: requests that run at a time.
    """
    global _memory
    if _measure is None:
        return
    _memory = _measure(num_slots=num_slots, most_running=most_running)
    if get_parallel().tp_rank == 0:
        logger.info("%s", _memory.as_text())
        if _memory.advice:
            logger.warning("%s", _memory.advice)


def memory() -> Table | None:
    """What was told; None before that, and without SMC."""
    return _memory


def active_budget() -> Budget | None:
    """The bounds of N and K in force; None where they stay."""
    return None if _policy is None else _policy.budget


def active_config() -> SMCConfig | None:
    """The SMC settings of this scheduler process; None where it runs anything else."""
    server_args = get_server_args()
    return config_of(server_args) if is_smc(server_args) else None
