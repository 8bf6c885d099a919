"""Find what the package sglang-smc-tools adds to ``sglang-smc``, by its entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import ModuleType

PACKAGE = "sglang-smc-tools"
#: Groups of entry points, which name modules: with the ``main(argv)`` of a command; and `pair`,
#: which `doctor` asks to ``check(options)`` and for its ``findings(options)``.
COMMANDS = "sglang_smc.commands"
DOCTOR = "sglang_smc.doctor"
INSTALL = "Run pip install ./tools in a clone of sglang-smc, of the same version."


def loaded(group: str, name: str) -> ModuleType | None:
    """Import the module of an entry point; None without it."""
    found = [point for point in entry_points(group=group) if point.name == name]
    return found[0].load() if found else None
