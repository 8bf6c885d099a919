"""Hold the SMC state of a scheduler process, and test whether it is an SMC server."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace
from sglang.srt.runtime_context import get_parallel, get_server_args

from sglang_smc import upstream
from sglang_smc.kv.report import Table
from sglang_smc.options.policy import Costs, Policy, RoundCosts
from sglang_smc.options.request import Budget
from sglang_smc.options.server import SMCConfig, is_smc
from sglang_smc.potentials import runner
from sglang_smc.potentials.runner import PotentialRunner
from sglang_smc.state.metrics import Monitor
from sglang_smc.state.ranks import RankCheck
from sglang_smc.upstream import Arguments

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

logger = logging.getLogger(__name__)

_policy: Policy | None = None
_config: tuple[Arguments, SMCConfig | None] | None = None  # of the arguments that it was read from
_monitor: Monitor | None = None
_measure: Callable[..., Table] | None = None
_memory: Table | None = None
_rank_check = RankCheck()


def config_of(server_args: Arguments) -> SMCConfig:
    """Return the options of an SMC server with these arguments."""
    resolved = upstream.resolved(server_args)
    config = SMCConfig.from_server_args(resolved)
    return config if drafts_all(resolved) else replace(config, drafts_all=False)


def drafts_all(resolved: Arguments) -> bool:
    """Return whether the draft model of these resolved arguments may draft any token."""
    from sglang_smc.models.head_kinds import knows_all

    path, revision = (
        resolved.speculative_draft_model_path,
        resolved.speculative_draft_model_revision,
    )
    return path is None or knows_all(path, revision, resolved.trust_remote_code)


def is_own_layer(config: "ModelConfig") -> bool:
    """Return whether a draft's configuration is of the target's checkpoint, for its MTP layer."""
    from sglang_smc.models.head_kinds import reads_states

    try:
        resolved = upstream.resolved(get_server_args())
    except ValueError:  # in the process that starts a server, where `models.supported` knows it
        return False
    return config.model_path == resolved.model_path and reads_states(resolved)


def potentials_of(server_args: Arguments) -> tuple[str, ...]:
    """Return the declarations of `--speculative-smc-potential`."""
    return tuple(upstream.resolved(server_args).speculative_smc_potential or ())  # pyright: ignore[reportAttributeAccessIssue] -- ours


def open_runners(
    server_args: Arguments, config: SMCConfig, monitor: Monitor
) -> dict[str, PotentialRunner]:
    """Return the runners of a server's potentials; of several ranks only the first opens them."""
    given, seconds = potentials_of(server_args), config.potential_timeout
    opens = get_parallel().tp_rank == 0
    return runner.open_runners(given, seconds, monitor.time_potential, opens=opens)


def set_policy(policy: Policy | None) -> None:
    """Set the policy that adapts N and K in this scheduler process; None for constant ones."""
    global _policy
    _policy = policy


def adapt(config: SMCConfig, costs: Costs | RoundCosts) -> None:
    """Adapt N and K in this scheduler process to its load, by the costs of rounds."""
    set_policy(Policy(Budget(config.num_particles, config.num_steps), costs))


def active_policy() -> Policy | None:
    """Return the policy that adapts N and K in this scheduler process; None if they stay."""
    return _policy


def set_monitor(monitor: Monitor | None) -> None:
    """Set the monitor in which this scheduler process counts."""
    global _monitor
    _monitor = monitor


def active_monitor() -> Monitor | None:
    """Return the monitor of this scheduler process; None before its worker is built."""
    return _monitor


def check_ranks(tokens: list[list[int]]) -> None:
    """Compare the tokens of a round with those of the other tensor-parallel ranks, if any.

    Raises:
        RuntimeError: if ranks differ; see `RankCheck.add`.
    """
    _rank_check.add(tokens)


def measure_memory_by(measure: Callable[..., Table] | None) -> None:
    """Set the function with which `log_memory_report` measures, once pools have their sizes."""
    global _measure, _memory
    _measure, _memory = measure, None


def log_memory_report(*, num_slots: int, most_running: int) -> None:
    """Measure memory and the requests' shares of it, and log the table on the first rank.

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
    """Return the table of `log_memory_report`; None before that, and without SMC."""
    return _memory


def active_budget() -> Budget | None:
    """Return the budget of N and K in force; None if they stay."""
    return None if _policy is None else _policy.budget


def active_config() -> SMCConfig | None:
    """Return the SMC options of this scheduler process; None for another algorithm."""
    global _config
    server_args = get_server_args()
    if _config is None or _config[0] is not server_args:
        _config = server_args, config_of(server_args) if is_smc(server_args) else None
    return _config[1]
