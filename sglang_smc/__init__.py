"""SMC speculative decoding for stock SGLang.

SGLang finds this package through its entry points (`pyproject.toml`); nothing here needs importing
by hand. This module stays free of imports because SGLang loads its plugins in every process.

In a notebook `particles(answer)` makes a value of an answer's particles.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sglang_smc.view.particles import Particles

__version__ = "0.1.0"


def particles(answer: "Any") -> "Particles":
    """The particles of an answer, with their weights; see `sglang_smc.view.particles`.

    Args:
        answer: of `/generate`, `sgl.Engine.generate` or an OpenAI route, asked for with
            ``return_particles``.

    Raises:
        ValueError: saying what to ask for, where it has none.
    """
    from sglang_smc.view.particles import Particles

    return Particles.of(answer)
