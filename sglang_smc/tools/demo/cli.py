"""Implement the command line of ``sglang-smc demo``.

Two servers of the shipped pair start: the target with SMC, and the target alone. Both stream the
answer to one question; then all rows answer the same problems, one after another, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sglang_smc.options.server import DEFAULTS
from sglang_smc.tools.commands import bar, main_of, positive, table
from sglang_smc.tools.demo.chat import Answer, Sampling, ask
from sglang_smc.tools.demo.party import (
    FIRST_SHOWN,
    PAIR,
    Common,
    Party,
    check_pair,
    parties,
    show_answer,
    show_question,
)
from sglang_smc.tools.demo.serving import Launch, smc_flags, tokens_per_pass

FIRST_PROBLEM = 20_000  # outside the problems behind published tables
QUICK = 2
MODES = ("smc", "auto", "exact")
READING = """\
Tokens per target pass carries over to other machines, tokens per second does not: on a CPU each
particle costs its full price, on a GPU the target's passes are bound by reading its weights.
So few problems tell nothing about accuracy: docs/fidelity.md has 2,000. Your own models:
sglang-smc doctor --target DIR --draft DIR."""


class Row(NamedTuple):
    """A decoding method and its answers."""

    name: str
    server: str  # "smc" or "target"
    smc: dict[str, Any] | None  # SMC request fields
    answers: list[Answer]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return exit status 0 if it completes."""
    options = parser().parse_args(argv)
    return main_of(lambda: demo(options), "The servers are stopped.")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc demo",
        description="The shipped pair of tiny models on two servers of this machine, with SMC and "
        "without: answers as they stream, then numbers. Needs no network and no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    add("--problems", type=positive, default=16, help="asked of each row, one after another")
    add("--quick", action="store_true", help=f"{QUICK} problems: whether it works")
    add("--num-particles", type=positive, default=DEFAULTS.num_particles, help="N")
    add("--num-steps", type=positive, default=DEFAULTS.num_steps, help="K, drafted a round")
    add("--temperature", type=float, default=0.7)
    add("--seed", type=int, default=0, help="problem i is sent with seed + i")
    add("--pair", type=Path, default=PAIR, help="folder of target/ and draft/")
    add("--logs", type=Path, help="folder to keep the servers' logs in; else they are deleted")
    add("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    return result


def demo(options: argparse.Namespace) -> None:
    """Show an answer of each server, run all rows, and print a table."""
    check_pair(options.pair)
    began = time.monotonic()
    with _logs(options.logs) as logs, parties(launches(options, logs)) as both:
        _show(both, Sampling(options.temperature, options.seed))
        rows = [
            Row("AR, target alone", "target", None, []),
            *(Row(f"SMC, mode {mode}", "smc", {"mode": mode}, []) for mode in MODES),
        ]
        _ask(rows, both, options)
        numbers = [numbers_of(row, both[row.server].infos(row.answers)) for row in rows]
    shown = "\n".join(table([cells_of(one) for one in numbers], [""], rule=False))
    print(f"\n{shown}\n\n{textwrap.fill(READING, 100)}")
    print(f"{time.monotonic() - began:.0f} s in all.")
    if options.json:
        options.json.write_text(json.dumps({"rows": numbers}, indent=2) + "\n")


@contextlib.contextmanager
def _logs(folder: Path | None) -> Iterator[Path]:
    """Yield the folder of the servers' logs: ``folder``, or a temporary one for None."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="sglang-smc-demo-") as name:
        yield Path(name)


def launches(options: argparse.Namespace, logs: Path) -> dict[str, Launch]:
    """Return the servers; their command lines differ by the SMC flags and nothing else."""
    sizes = {"num_particles": options.num_particles, "num_steps": options.num_steps}
    common = Common(logs, 1, options.seed, **sizes)
    target, draft = options.pair / "target", options.pair / "draft"
    return {
        "target": common.launch("the target alone", "target", target),
        "smc": common.launch("the server with SMC", "smc", target, smc_flags(draft, **sizes)),
    }


def _show(both: Mapping[str, Party], sampling: Sampling) -> None:
    for party in both.values():  # the first answer of a process is slow
        with party.blamed():
            ask(party.client, FIRST_SHOWN + 1, sampling)
    show_question(FIRST_SHOWN)
    for name, title in (("target", "The target alone:"), ("smc", "The target with SMC:")):
        print(f"\n{title}", flush=True)
        show_answer(both[name], FIRST_SHOWN, sampling)
    print()


def _ask(rows: Sequence[Row], both: Mapping[str, Party], options: argparse.Namespace) -> None:
    """Run one problem at a time of each row in turn, so that background load affects all alike."""
    count = QUICK if options.quick else options.problems
    with bar(total=len(rows) * count, desc="Asking", unit="problem") as line:
        for index in range(FIRST_PROBLEM, FIRST_PROBLEM + count):
            for row in rows:
                sampling = Sampling(options.temperature, options.seed, row.smc)
                with both[row.server].blamed():
                    row.answers.append(ask(both[row.server].client, index, sampling))
                line.update()


def numbers_of(row: Row, infos: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of a row's answers; seconds are the client's."""
    tokens = sum(info["completion_tokens"] for info in infos.values())
    return {
        "row": row.name,
        "problems": len(row.answers),
        "right": sum(answer.right for answer in row.answers),
        "tokens_per_target_pass": tokens_per_pass(list(infos.values())),
        "tokens_per_second": tokens / sum(answer.seconds for answer in row.answers),
        "seconds_to_first": fmean(answer.seconds_to_first for answer in row.answers),
    }


def cells_of(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    return {
        "": numbers["row"],
        "right": f"{numbers['right']} of {numbers['problems']}",
        "tokens/target pass": f"{numbers['tokens_per_target_pass']:.2f}",
        "tokens/s": f"{numbers['tokens_per_second']:.0f}",
        "first token": f"{1000 * numbers['seconds_to_first']:.0f} ms",
    }
