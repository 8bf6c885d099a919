"""Run the chosen command of ``sglang-smc``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from sglang_smc import __version__

#: The module of each command, below `sglang_smc.tools`, and what it does.
COMMANDS = {
    "doctor": ("command.doctor", "check the installation, or whether a pair of models fits"),
    "demo": ("demo.cli", "show SMC beside plain decoding, with tiny models"),
    "convert": ("command.convert", "write a published draft's checkpoint for stock SGLang"),
    "plan": ("plan.cli", "compute bounds on speed, and the fastest N and K"),
    "audit": ("testing.audit_cli", "test any server from outside: is its speculation lossless?"),
    "check": ("testing.cli", "test whether an SMC server's answers follow the target"),
    "view": ("view.page", "draw the particles of one answer, as a page"),
    "watch": ("watch", "show a running server, live"),
}


def module_of(name: str) -> ModuleType:
    """Import the module of a command; its ``main(argv)`` returns an exit status."""
    return import_module(f"sglang_smc.tools.{COMMANDS[name][0]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; 2, with the usage on stderr, if it is unknown."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return module_of(words[0]).main(words[1:])
    if words in (["-h"], ["--help"]):
        print(usage())
        return 0
    if words == ["--version"]:
        print(f"sglang-smc {__version__}")
        return 0
    given = f"{words[0]!r} is no command" if words else "no command is given"
    print(f"sglang-smc: {given}\n\n{usage()}", file=sys.stderr)
    return 2


def usage() -> str:
    commands = "\n".join(f"  {name:8}{told}" for name, (_, told) in COMMANDS.items())
    return (
        f"usage: sglang-smc COMMAND [OPTIONS], sglang-smc --version\n\n{commands}\n\n"
        "sglang-smc COMMAND --help lists the options. To start a server:\n"
        "python -m sglang.launch_server --speculative-algorithm SMC ..."
    )
