"""The page: a trace's genealogy with the script that draws it, in one file that asks no network."""

import html
from importlib.resources import files
from string import Template
from typing import Any

import msgspec

from sglang_smc.view.genealogy import genealogy
from sglang_smc.view.record import Trace

SCRIPTS = ("picture.js", "page.js")


def page_of(trace: Trace, title: str = "Particles of one answer") -> str:
    """A whole HTML document.

    Raises:
        ValueError: the trace has no round.
    """
    data = {
        "mode": trace.mode,
        "num_particles": trace.num_particles,
        "num_steps": trace.num_steps,
        "prompt_length": trace.prompt_length,
        "pieces": trace.pieces,
        "genealogy": genealogy(trace),
    }
    return Template(part("page.html")).substitute(
        title=html.escape(title),
        style=part("page.css"),
        data=embedded(data),
        script='"use strict";\n(() => {\n' + "".join(map(part, SCRIPTS)) + "})();",
    )


def part(name: str) -> str:
    return (files("sglang_smc.view") / "page" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON in which nothing ends the script element that holds it, whatever a piece reads."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")
