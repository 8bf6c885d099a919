"""Potentials: what multiplies the target, so that particles are steered by more than probability.

A subclass of `Potential` is all that a new one takes. docs/potentials.md has the interface, and how
a server is given one and a request asks for it.
"""

from sglang_smc.potentials.base import NoArgs, Potential, Text

__all__ = ["NoArgs", "Potential", "Text"]
