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


COMMANDS = {
    "doctor": Command(
        "sglang_smc.tools.command.doctor", "what this machine, or a pair, is fit for"
    ),
    "demo": Command(
        "sglang_smc.tools.demo.cli", "SMC and plain decoding on servers of the shipped pair"
    ),
    "plan": Command("sglang_smc.tools.plan.cli", "upper bounds on speed, and the fastest N and K"),
    "check": Command(
        "sglang_smc.tools.testing.cli", "whether a server's answers follow their laws"
    ),
    "view": Command("sglang_smc.tools.view.cli", "what the particles of one answer did, as a page"),
    "watch": Command("sglang_smc.tools.watch.cli", "a running server, live"),
}
_WIDTH = max(map(len, COMMANDS)) + 2


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
    lines = [f"  {name:{_WIDTH}}{command.what}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sglang-smc COMMAND [OPTIONS], sglang-smc --version",
            "",
            *lines,
            "",
            "sglang-smc COMMAND --help has the options. A server is SGLang's own:",
            "python -m sglang.launch_server --speculative-algorithm SMC ...",
        ]
    )
