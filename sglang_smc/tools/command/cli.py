"""Run the chosen command of ``sglang-smc``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from sglang_smc import __version__


class Command(NamedTuple):
    """A subcommand; ``module`` has a ``main(argv)`` that returns an exit status."""

    module: str
    what: str


TOOLS = "sglang_smc.tools"
COMMANDS = {
    "doctor": Command(f"{TOOLS}.command.doctor", "what this machine, or a pair, is fit for"),
    "demo": Command(f"{TOOLS}.demo.cli", "SMC and plain decoding on servers of the shipped pair"),
    "plan": Command(f"{TOOLS}.plan.cli", "upper bounds on speed, and the fastest N and K"),
    "check": Command(f"{TOOLS}.testing.cli", "whether a server's answers follow their laws"),
    "view": Command(f"{TOOLS}.view.page", "what the particles of one answer did, as a page"),
    "watch": Command(f"{TOOLS}.watch", "a running server, live"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; 2, with the usage on stderr, if it is unknown."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return import_module(COMMANDS[words[0]].module).main(words[1:])
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
    commands = "\n".join(f"  {name:8}{command.what}" for name, command in COMMANDS.items())
    return (
        f"usage: sglang-smc COMMAND [OPTIONS], sglang-smc --version\n\n{commands}\n\n"
        "sglang-smc COMMAND --help has the options. A server is SGLang's own:\n"
        "python -m sglang.launch_server --speculative-algorithm SMC ..."
    )
