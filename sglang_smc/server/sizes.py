"""Choose N and K of a server by the configurations of its draft and its target."""

import logging

from sglang.srt.arg_groups.overrides import resolved_view

from sglang_smc import upstream
from sglang_smc.models.head_kinds import sizes_for
from sglang_smc.options.server import CHOSEN, FIELDS, SMCConfig, flag_of
from sglang_smc.upstream import Arguments

logger = logging.getLogger(__name__)


def choose(server_args: Arguments) -> None:
    """Set N and K where they are not given, and log both.

    On decode servers, where adapting them is untried, they stay unless that is asked for.
    """
    view = resolved_view(server_args)
    if view.disaggregation_mode == "decode" and view.speculative_smc_adaptive in (None, "auto"):
        server_args.speculative_smc_adaptive = "off"
        view = resolved_view(server_args)
    try:
        config = SMCConfig.from_server_args(view)
    except ValueError:  # told with what else is wrong
        return
    chosen = sizes_for(view, upstream.model_config_of(server_args), config)
    for name in CHOSEN:
        if getattr(view, FIELDS[name]) is None:
            setattr(server_args, FIELDS[name], getattr(chosen, name))
    config = SMCConfig.from_server_args(resolved_view(server_args))
    logger.info(
        "SMC drafts %sK = %d tokens for each of N = %d particles: %s. %s set others.",
        "at most " if config.adapts else "",
        config.num_steps,
        config.num_particles,
        chosen.told(config),
        " and ".join(map(flag_of, CHOSEN)),
    )
