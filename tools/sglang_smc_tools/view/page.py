"""Run ``sglang-smc view trace.json -o trace.html``: write a page of the particles, as one file."""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from sglang_smc.command.program import command
from sglang_smc.state.trace import Trace
from sglang_smc_tools.view.finding import load
from sglang_smc_tools.view.genealogy import genealogy

SCRIPTS = ("picture.js", "page.js")


def _run(options: argparse.Namespace) -> None:
    page = page_of(load(options.trace, options.index), options.title)
    output: Path = options.output or options.trace.with_suffix(".html")
    if output.is_file() and not options.force:
        ask_to_overwrite(output)
    output.write_text(page, encoding="utf-8")
    print(output)


def ask_to_overwrite(output: Path) -> None:
    """Prompt the user to overwrite a file; raise ValueError without a terminal or a yes."""
    if not (sys.stdin and sys.stdin.isatty()):  # None if it is closed
        raise ValueError(f"{output} exists: --force overwrites it, -o names another file")
    print(f"{output} exists. Overwrite it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ValueError(f"{output} stays as it is")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc view",
        description="Writes a page that shows what the particles of one answer did: who descends "
        "from whom, weights, resampling, cuts, ESS and log Z. The request asks for it with "
        '"trace": true in custom_params["smc"].',
    )
    add = result.add_argument
    add("trace", type=Path, help="JSON: a trace, an answer that has one, or a list")
    add("-o", "--output", type=Path, help="the page's file; default: TRACE.html")
    add("--force", action="store_true", help="overwrite an existing file")
    add("--index", type=int, help="which trace of several, from 0")
    add("--title", default="Particles of one answer", help="the page's title")
    return result


def page_of(trace: Trace, title: str = "Particles of one answer") -> str:
    """Return a complete HTML document.

    Raises ValueError if the trace has no round.
    """
    data = {name: getattr(trace, name) for name in ("mode", "prompt_length", "pieces")}
    data |= {"genealogy": genealogy(trace), **_sizes_of(trace)}
    return Template(part("page.html")).substitute(
        title=html.escape(title),
        style=part("page.css"),
        data=embedded(data),
        script='"use strict";\n(() => {\n' + "".join(map(part, SCRIPTS)) + "})();",
    )


def _sizes_of(trace: Trace) -> dict[str, str]:
    """Return the N and K of the rounds: adaptive ones are not the request's."""
    rounds = [one for one in trace.rounds if not all(one.ended)] or trace.rounds  # an end cuts K
    num_particles = [len(one.drafted) for one in rounds]
    num_steps = [max(map(len, one.drafted)) for one in rounds]
    return {"num_particles": _span(num_particles), "num_steps": _span(num_steps)}


def _span(values: Sequence[int]) -> str:
    low = min(values)
    high = max(values)
    return f"{low} to {high}" if low < high else f"{high}"


def part(name: str) -> str:
    return (files("sglang_smc_tools.view") / "page" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """Return JSON in which no piece can close the script element that holds it."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


main = command(parser, _run, refused=1)
