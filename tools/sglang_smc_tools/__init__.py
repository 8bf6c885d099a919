"""Give servers with sglang-smc commands, checks and views: `sglang-smc ...`.

In a notebook, `particles(answer)` returns an answer's particles for display.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_smc_tools.view.particles import Particles


def particles(answer: Any) -> "Particles":
    """Return the particles of an answer, with their weights; see `sglang_smc_tools.view.particles`.

    Args:
        answer: of `/generate`, `sgl.Engine.generate` or an OpenAI route, for a request that sets
            ``return_particles``.

    Raises ValueError if the answer has no particles; the message names the option to set.
    """
    from sglang_smc_tools.view.particles import Particles

    return Particles.of(answer)
