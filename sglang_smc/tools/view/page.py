"""Write a trace's genealogy and its drawing script as one self-contained HTML file."""

import html
from importlib.resources import files
from string import Template
from typing import Any

import msgspec

from sglang_smc.state.record import Trace
from sglang_smc.tools.view.genealogy import genealogy

SCRIPTS = ("picture.js", "page.js")


def page_of(trace: Trace, title: str = "Particles of one answer") -> str:
    """Return a complete HTML document.

    Raises ValueError if the trace has no round.
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
    return (files("sglang_smc.tools.view") / "page" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """Return JSON in which no piece can close the script element that holds it."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")
