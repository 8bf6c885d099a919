"""What docs/trace.md and its schema say of traces is so."""

import json
import re
import runpy
from pathlib import Path

import jsonschema
import msgspec
from trace_replay import replay

from sglang_smc.server.refusals import MOST_TRACED
from sglang_smc.state.trace import Trace, TracedRound

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "trace.md").read_text()
SCHEMA = json.loads((DOCS / "trace.schema.json").read_text())


def test_the_schema_is_what_the_records_give() -> None:
    """Red where these have changed and `python docs/write_trace_schema.py` was not run."""
    written = runpy.run_path(str(DOCS / "write_trace_schema.py"))["text"]()
    assert written == (DOCS / "trace.schema.json").read_text()


def test_the_example_is_a_trace_and_comes_to_its_answer() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    found = json.loads(block)
    jsonschema.validate(found, SCHEMA)
    trace = msgspec.convert(found, Trace)
    text = replay(trace, tolerance=2e-4).output_ids  # the page has four digits behind the point
    said = "".join(trace.pieces[str(one)] for one in text)
    assert said == "To start Sam can"


def test_every_field_has_an_item() -> None:
    named = set(re.findall(r"`(\w+)`", "".join(re.findall("^- (`.*?): ", PAGE, re.M))))
    assert {*Trace.__struct_fields__, *TracedRound.__struct_fields__} <= named


def test_the_limit_is_said() -> None:
    assert f"{MOST_TRACED:,}" in PAGE and f"{MOST_TRACED // 72:,}" in PAGE
    assert f"{MOST_TRACED:,}" in (DOCS / "reference.md").read_text()
