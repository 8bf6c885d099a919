"""Potentials that engines of tests load by their names, in processes of their own."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sglang_smc.potentials import Potential, Text


def text(output: str, args: Any = None, prompt: str = "a") -> Text:
    """Letters, of which each is a token."""
    ids = ([*map(ord, part)] for part in (prompt, output))
    return Text(*ids, args, lambda read: "".join(map(chr, read)))


class Count(Potential):
    """phi = exp(weight * number of a token), and 0 where the output begins with it thrice."""

    class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        token: int = 2
        weight: float = 0.7

    def __init__(self, offset: float = 0.0) -> None:
        self._offset = offset
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def complete(self, texts: Sequence[Text]) -> list[float]:
        assert self._is_open and all(text.output.startswith(("t", "")) for text in texts)
        return [log_phi(text.output_ids, text.args.token, text.args.weight) for text in texts]

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return [self._offset + value for value in self.complete(texts)]


def log_phi(output: Sequence[int], token: int = 2, weight: float = 0.7) -> float:
    if list(output[:3]) == [token] * 3:
        return -math.inf
    return weight * list(output).count(token)


class Slow(Potential):
    class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        seconds: float

    def complete(self, texts: Sequence[Text]) -> list[float]:
        time.sleep(max(text.args.seconds for text in texts))
        return [0.0] * len(texts)


class EachRound(Slow):
    """Slow in each round."""

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return self.complete(texts)


class Panic(BaseException):
    """As pyo3 raises it for a panic in Rust; it cannot even be printed."""

    def __str__(self) -> str:
        raise SystemExit(2)


RAISED: dict[str, Callable[[], BaseException]] = {
    "raise": lambda: RuntimeError("the oracle is silent"),
    "exit": lambda: SystemExit("the oracle has left"),
    "interrupt": KeyboardInterrupt,
    "cancel": asyncio.CancelledError,
    "panic": Panic,
}


class Broken(Potential):
    class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        does: str  # one of `RAISED`, write, nan, large, short, forbid, or nothing

    def complete(self, texts: Sequence[Text]) -> list[float]:
        values = {"nan": math.nan, "forbid": -math.inf, "large": 1e308}
        for text in texts:
            if text.args.does in RAISED:
                raise RAISED[text.args.does]()
            if text.args.does == "write":
                text.prompt_ids[0] = 7  # type: ignore[index]
        found = [values.get(text.args.does, 0.0) for text in texts]
        return found[:-1] if any(text.args.does == "short" for text in texts) else found

    prefix = complete


class Never(Potential):
    def complete(self, texts: Sequence[Text]) -> list[float]:
        raise AssertionError("asked")


class Shut(Never):
    def __init__(self, exits: bool = False) -> None:
        self._error = SystemExit(1) if exits else OSError("no weights")

    def open(self) -> None:
        raise self._error


class Loose(Never):
    """Has arguments that it could write into."""

    class Args(msgspec.Struct):
        weight: float = 1.0


class Picky(Never):
    """Has arguments that raise what is no error of theirs."""

    class Args(msgspec.Struct, frozen=True):
        weight: float = 1.0

        def __post_init__(self) -> None:
            raise SystemExit(3)
