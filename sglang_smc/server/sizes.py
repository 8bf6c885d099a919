"""Choose N and K of a server by the configurations of its draft and its target."""

import logging
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import resolved_view

from sglang_smc import upstream
from sglang_smc.models.head_kinds import draft_of
from sglang_smc.options import sizes
from sglang_smc.options.server import CHOSEN, FIELDS, SMCConfig, flag_of
from sglang_smc.upstream import Arguments

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

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
    chosen = _choice(view, upstream.model_config_of(server_args), config)
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


def told(server_args: Arguments, target: "ModelConfig", config: SMCConfig) -> str:
    """Return where the N and K of a running server come from."""
    return _choice(upstream.resolved(server_args), target, config).told(config)


def _choice(view: Arguments, target: "ModelConfig", config: SMCConfig) -> sizes.Chosen:
    is_mixture = sizes.is_mixture(target.hf_config.to_dict())
    return sizes.choose(*draft_of(view), config, is_mixture=is_mixture)
