"""Writes docs/trace.schema.json from the records themselves; run it after a change of these."""

import inspect
import json
from pathlib import Path

import msgspec

from sglang_smc.state.trace import Trace

PATH = Path(__file__).parent / "trace.schema.json"


def text() -> str:
    """Return the JSON Schema of `spec_smc_trace`."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema = msgspec.json.schema(Trace)
    for record in schema["$defs"].values():
        # msgspec before 0.23 keeps a docstring's indentation.
        record["description"] = inspect.cleandoc(record["description"])
    return json.dumps({**dialect, **schema}, indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
