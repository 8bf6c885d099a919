"""Potentials: functions of texts that multiply the target, to steer particles.

A new one is a subclass of `Potential`. docs/potentials.md has the interface, and how an operator
declares one and a request names it.
"""

from sglang_smc.potentials.base import NoArgs, Potential, Text

__all__ = ["NoArgs", "Potential", "Text"]
