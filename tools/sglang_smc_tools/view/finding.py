"""Find a trace in saved JSON: alone, in an answer of any route, or in a list."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_smc.state.trace import VERSION, Trace, TracedRound

KEY = "spec_smc_trace"
BY_PARTICLE = (
    "log_weights_before", "drafted", "kept", "log_weights", "log_potentials", "ancestors", "bonus",
    "ended", "narrowed_to", "log_weights_after",
)  # fmt: skip


def load(path: Path, index: int | None = None) -> Trace:
    """Return the trace in a JSON file.

    Args:
        index: which of several, from 0: answers of a list, or choices of an answer.

    Raises ValueError without a file, its JSON or one trace in it, and if that is invalid.
    """
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} has no trace: its JSON is nested too deep") from error
    found = list(values_in(value, _trace))
    if not found:
        raise ValueError(
            f"{path} has no trace: ask for one with custom_params={{'smc': {{'trace': true}}}}, "
            f"and save the whole answer, or its meta_info['{KEY}']"
        )
    if index is None and len(found) > 1:
        raise ValueError(
            f"{path} has {len(found)} traces: choose one with --index, 0 to {len(found) - 1}"
        )
    if not 0 <= (index or 0) < len(found):
        raise ValueError(f"--index is {index}, but {path} has 0 to {len(found) - 1}")
    return checked(found[index or 0])


def _trace(value: Mapping[str, Any]) -> Any:
    return value if "rounds" in value and "num_particles" in value else value.get(KEY)


def values_in(value: Any, pick: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
    """Yield what ``pick`` returns of objects at any depth, in document order; None goes deeper."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            found = pick(value)
            if found is not None:
                yield found
                continue
            value = list(value.values())
        if isinstance(value, list | tuple):
            pending += reversed(value)


def checked(value: Any) -> Trace:
    """Validate a trace, and return it as a `Trace` with lists and indices that fit their rounds.

    Raises ValueError for another version, another type, or an inconsistent round.
    """
    version = value.get("version", VERSION) if isinstance(value, Mapping) else VERSION
    if isinstance(version, int) and version != VERSION:
        raise ValueError(
            f"the trace is of version {version}, and this sglang-smc reads version {VERSION}: "
            "use the release that the server runs"
        )
    try:
        trace = msgspec.convert(value, Trace)
        size = 0
        for number, traced in enumerate(trace.rounds):
            size = checked_size(traced, size, f"`$.rounds[{number}]`")
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"this is no trace: {error}") from error
    return trace


def checked_size(traced: TracedRound, size: int, where: str) -> int:
    """Validate a round, and return its number of particles.

    Args:
        size: the number after the previous round; 0 before the first.

    Raises ValueError if a list has another length, or an index is out of range.
    """
    if traced.begins is not None:
        size = len(traced.begins)
    elif traced.emitted_before:
        raise ValueError(f"`emitted_before` stands without `begins` - at {where}")
    if traced.resized_from is not None:
        check_range("resized_from", traced.resized_from, size, where)
        size = len(traced.resized_from)
    if not size:
        raise ValueError(f"no particle has begun: `begins` is missing or empty - at {where}")
    for name in BY_PARTICLE:
        column = getattr(traced, name)
        if column is not None and len(column) != size:
            raise ValueError(f"`{name}` has {len(column)} values of {size} - at {where}")
    for name, by in (("ancestors", traced.ancestors), ("narrowed_to", traced.narrowed_to or [])):
        check_range(name, by, size, where)
    if min(traced.kept) < 0:
        raise ValueError(f"`kept` has {min(traced.kept)}, below 0 - at {where}")
    return size


def check_range(name: str, indices: list[int], size: int, where: str) -> None:
    """Raise ValueError unless all indices are those of `size` particles."""
    wrong = [index for index in indices if not 0 <= index < size]
    if wrong:
        raise ValueError(f"`{name}` has {wrong[0]}, an index of none of {size} - at {where}")
