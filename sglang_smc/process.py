"""Hold the SMC state of a scheduler process, and test whether it is an SMC server."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace
from sglang.srt.runtime_context import get_parallel, get_server_args

from sglang_smc import upstream
from sglang_smc.kv.report import Table
from sglang_smc.operator_code import describe
from sglang_smc.options.policy import Costs, Policy, RoundCosts
from sglang_smc.options.request import Budget, unmeasured
from sglang_smc.options.server import SMCConfig, is_smc
from sglang_smc.potentials.runner import PotentialRunner
from sglang_smc.potentials.spec import FLAG, load
from sglang_smc.state.metrics import Monitor
from sglang_smc.state.ranks import RankCheck
from sglang_smc.upstream import Arguments

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from torch import Tensor


logger = logging.getLogger(__name__)


class Worker(Protocol):
    """The worker, as SGLang's functions that are given none need it; see `SMCWorker`."""

    monitor: Monitor
    reason_of_sizes: str

    def begin_transferred(self, batch: "ScheduleBatch", first: "Tensor") -> Any: ...
    def order_pages(self, req: "Req", *, keeps: bool) -> None: ...
    def measure_memory(self, *, num_slots: int, most_running: int) -> Table: ...
    def draft_layers(self) -> dict[str, Any] | None: ...


@dataclass
class ServerState:
    """State of SMC in a scheduler process, for SGLang's functions that are given no worker."""

    worker: Worker | None = None  # None before it is built
    policy: Policy | None = None  # adapts N and K; None if they stay
    memory: Table | None = None  # of `log_memory_report`; None before that
    ranks: RankCheck = field(default_factory=RankCheck)
    # The options, behind the arguments that they were read from.
    config: tuple[Arguments, SMCConfig | None] | None = None

    @property
    def budget(self) -> Budget | None:
        """Return the budget of N and K in force; None if they stay."""
        return None if self.policy is None else self.policy.budget

    def adapt(self, config: SMCConfig, costs: Costs | RoundCosts | None, *, repeats: bool) -> None:
        """Adapt N and K to the load from now on; see `Policy`, also for the arguments."""
        top = Budget(config.num_particles, config.num_steps)
        self.policy = Policy(top, costs, fixed=unmeasured(top), repeats=repeats)


active = ServerState()


def config_of(server_args: Arguments) -> SMCConfig:
    """Return the options of an SMC server with these arguments."""
    resolved = upstream.resolved(server_args)
    config = SMCConfig.from_server_args(resolved)
    return replace(config, drafts_all=drafts_all(resolved), page_size=resolved.page_size)


def drafts_all(resolved: Arguments) -> bool:
    """Return whether the draft of these resolved arguments may draft any token."""
    from sglang_smc.models.head_kinds import drafter_named, knows_all

    own = resolved.speculative_smc_draft_class
    if own is not None and not drafter_named(own).drafts_all:
        return False
    if resolved.speculative_draft_model_path is None:
        return True
    return resolved.speculative_token_map is None and knows_all(resolved)


def is_mtp_layer(config: "ModelConfig") -> bool:
    """Return whether a draft is an MTP layer: named by its checkpoint, or within the target's."""
    from sglang_smc.models.head_kinds import kind_of, reads_states

    if kind_of(config) == "mtp":
        return True
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
    """Return the runners of a server's potentials, by name; only the first rank opens potentials.

    Raises RuntimeError where one cannot be opened.
    """
    found = load(potentials_of(server_args))
    for name, potential in found.items() if get_parallel().tp_rank == 0 else ():
        try:
            potential.open()
        except BaseException as error:  # the operator's code
            raise RuntimeError(
                f"The potential {name!r} cannot be opened: {describe(error)}. Fix it, or leave it "
                f"out of {FLAG}."
            ) from error
    return {
        name: PotentialRunner(name, one, config.potential_timeout, monitor.time_potential)
        for name, one in found.items()
    }


def log_memory_report(*, num_slots: int, most_running: int) -> None:
    """Measure memory and the requests' shares of it, and log the table on the first rank.

    Args:
        num_slots: of the KV pool.
        most_running: requests that run at a time.
    """
    if active.worker is None:
        return
    memory = active.memory = active.worker.measure_memory(
        num_slots=num_slots, most_running=most_running
    )
    if get_parallel().tp_rank == 0:
        logger.info("%s", memory.as_text())
        if memory.advice:
            logger.warning("%s", memory.advice)


def active_config() -> SMCConfig | None:
    """Return the SMC options of this scheduler process; None for another algorithm."""
    server_args = get_server_args()
    if active.config is None or active.config[0] is not server_args:
        active.config = server_args, config_of(server_args) if is_smc(server_args) else None
    return active.config[1]
