"""Is this an SMC server? Every hook asks before it does anything."""

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_server_args

from sglang_smc.config import ALGORITHM, SMCConfig

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def is_smc(server_args: "ServerArgs") -> bool:
    """Whether these server arguments select SMC."""
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM


def active_config() -> SMCConfig | None:
    """The SMC settings of this scheduler process; None where it runs anything else."""
    server_args = get_server_args()
    return SMCConfig.from_server_args(server_args) if is_smc(server_args) else None
