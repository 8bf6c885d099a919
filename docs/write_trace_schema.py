"""Writes docs/trace.schema.json from the records themselves; run it after a change of these."""

import json
from pathlib import Path

import msgspec

from sglang_smc.state.trace import Trace

PATH = Path(__file__).parent / "trace.schema.json"


def text() -> str:
    """Return the JSON Schema of `spec_smc_trace`."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**dialect, **msgspec.json.schema(Trace)}, indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
