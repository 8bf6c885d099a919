"""Where a trace stands in what a user saved: by itself, in an answer of any route, in a list."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sglang_smc.view.record import VERSION, Trace

KEY = "spec_smc_trace"


class NoTraceError(ValueError):
    """A sentence for the user."""


def load(path: Path, index: int | None = None) -> Trace:
    """The trace in a JSON file.

    Args:
        index: which, from 0, where there are several: answers of a list, or choices of an answer.

    Raises:
        NoTraceError: no such file, no JSON, no trace, several of them, or one of another version.
    """
    try:
        found = list(traces_in(msgspec.json.decode(path.read_bytes())))
    except OSError as error:
        raise NoTraceError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise NoTraceError(f"{path} is no JSON: {error}") from error
    return checked(chosen(found, index, str(path)))


def traces_in(value: Any) -> Iterator[dict[str, Any]]:
    """All traces, in the order in which they stand."""
    if isinstance(value, list):
        for each in value:
            yield from traces_in(each)
    elif isinstance(value, dict):
        if "rounds" in value and "num_particles" in value:
            yield value
        elif value.get(KEY) is not None:
            yield value[KEY]
        else:
            for each in value.values():
                yield from traces_in(each)


def chosen(found: list[dict[str, Any]], index: int | None, where: str) -> dict[str, Any]:
    if not found:
        raise NoTraceError(
            f"{where} has no trace: ask for one with custom_params={{'smc': {{'trace': true}}}}, "
            f"and save the whole answer, or its meta_info['{KEY}']"
        )
    if index is None and len(found) > 1:
        raise NoTraceError(
            f"{where} has {len(found)} traces: choose one with --index, 0 to {len(found) - 1}"
        )
    if not 0 <= (index or 0) < len(found):
        raise NoTraceError(f"--index is {index}, but {where} has 0 to {len(found) - 1}")
    return found[index or 0]


def checked(value: dict[str, Any]) -> Trace:
    version = value.get("version", VERSION)
    if version != VERSION:
        raise NoTraceError(
            f"the trace is of version {version}, and this sglang-smc reads version {VERSION}: "
            "use the release that the server runs"
        )
    try:
        return msgspec.convert(value, Trace)
    except msgspec.ValidationError as error:
        raise NoTraceError(f"this is no trace: {error}") from error
