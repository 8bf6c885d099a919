"""Run the chosen command of ``sglang-smc``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from sglang_smc import __version__
from sglang_smc.command import extensions

DOCTOR = "doctor"
COMPILE = "compile"
#: What each command does. All but `doctor` and `compile` are those of sglang-smc-tools.
COMMANDS = {
    DOCTOR: "check the installation, or whether a pair of models fits",
    COMPILE: "fill Triton's cache for a pair of models, without a GPU",
    "demo": "show SMC beside plain decoding, with tiny models",
    "convert": "write a published draft's checkpoint for stock SGLang",
    "plan": "compute bounds on speed, and the fastest N and K",
    "audit": "test any server from outside: is its speculation lossless?",
    "check": "test whether an SMC server's answers follow the target",
    "view": "draw the particles of one answer, as a page",
    "watch": "show a running server, live",
}


def module_of(name: str) -> ModuleType | None:
    """Import a command, whose ``main(argv)`` returns an exit status; None if not installed."""
    if name == DOCTOR:
        from sglang_smc.command import doctor

        return doctor
    if name == COMPILE:
        from sglang_smc.command import compile

        return compile
    return extensions.loaded(extensions.COMMANDS, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    It is 2, with the reason on stderr, if the command is unknown or not installed.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        module = module_of(words[0])
        if module is not None:
            return module.main(words[1:])
        told = f"{words[0]} is a command of {extensions.PACKAGE}, which is not installed."
        print(f"sglang-smc: {told} {extensions.INSTALL}", file=sys.stderr)
        return 2
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
    commands = "\n".join(f"  {name:8}{told}" for name, told in COMMANDS.items())
    return (
        f"usage: sglang-smc COMMAND [OPTIONS], sglang-smc --version\n\n{commands}\n\n"
        f"All but {DOCTOR} and {COMPILE} come with {extensions.PACKAGE}. "
        "sglang-smc COMMAND --help has options.\n"
        "To start a server: python -m sglang.launch_server --speculative-algorithm SMC ..."
    )
