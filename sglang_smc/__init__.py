"""Add SMC speculative decoding to unmodified SGLang.

SGLang finds this package through its entry points (`pyproject.toml`); no import is needed. This
module has no imports, because SGLang loads its plugins in every process.

In a notebook, `particles(answer)` returns an answer's particles for display.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sglang_smc_tools.view.particles import Particles

__version__ = "0.1.0"


def particles(answer: "Any") -> "Particles":
    """Return the particles of an answer, with their weights; see `sglang_smc_tools.view.particles`.

    Args:
        answer: of `/generate`, `sgl.Engine.generate` or an OpenAI route, for a request that sets
            ``return_particles``.

    Raises ValueError if the answer has no particles; the message names the option to set.
    """
    from sglang_smc_tools.view.particles import Particles

    return Particles.of(answer)
