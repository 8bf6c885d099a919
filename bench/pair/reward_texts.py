"""Label worked answers, right and wrong, by the position of their first mistake.

The reward model is trained on these. A worked answer is right as long as each line so far does the
step that the problem requires there, with the right numbers; its wording is free.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from task import Problem

#: Input of the reward model; a complete text ends with EOS, a prefix does not.
TEMPLATE = "<|user|>{prompt}<|assistant|>{output}"
WHOLE_TEMPLATE = TEMPLATE + "<|eos|>"
_EQUATION = re.compile(r"(\d+)([-+x*/])(\d+)=(\d+)")
_FORMULA = re.compile(r"[-+x*/=\d]+")
_TIMES = ("x", "*")


class Judged(NamedTuple):
    """An answer, labelled by its first mistake."""

    question: str
    answer: str
    right: int
    """Characters of the answer before its first mistake."""
    is_whole: bool
    """Whether the text is complete and right."""


def judged(answer: str, item: Problem) -> Judged:
    """Return an answer labelled by `right_until`."""
    right = right_until(answer, item)
    is_whole = right == len(answer) and answer.endswith("\n" + item.answer.split("\n")[-1])
    return Judged(item.question, answer, right, is_whole)


def right_until(answer: str, item: Problem) -> int:
    """Return the number of characters of an answer, or of a prefix, before the first mistake.

    A mistake is the first character that starts no right continuation: a wrong digit, the end of a
    number that lacks one, the end of a line without its formula, a step too many.
    """
    wanted = [forms(line) for line in item.answer.split("\n")]
    at = 0
    lines = answer.split("\n")
    for index, line in enumerate(lines):
        if index == len(wanted):
            return at - 1  # the newline after the last line was one too many
        is_over = index < len(lines) - 1
        right = _right_in(line, wanted[index], is_over)
        if right is not None:
            return at + right
        at += len(line) + 1
    return len(answer)


def forms(line: str) -> tuple[str, ...]:
    """Return all spellings of a right line's formula, or the complete last line."""
    found = _EQUATION.search(line)
    if found is None:
        return (line,)
    a, op, b, result = found.groups()
    orders = [(a, b)] if op in "-/" else [(a, b), (b, a)]
    signs = _TIMES if op in _TIMES else (op,)
    return tuple(f"{x}{sign}{y}={result}" for x, y in orders for sign in signs)


def _right_in(line: str, wanted: tuple[str, ...], is_over: bool) -> int | None:
    """Return the characters of a line before its mistake; None without a mistake."""
    is_last = wanted[0].startswith("#")
    if line.startswith("#") and not is_last:
        return 0
    begin = 0 if is_last else _first_digit(line)
    if begin is None:
        return len(line) if is_over else None
    formula = _FORMULA.match(line, begin)
    found = line if is_last or formula is None else formula[0]
    end = begin + len(found)
    if found in wanted:
        return _first_digit(line, end)
    common = max(_common(found, form) for form in wanted)
    goes_on = common == len(found) and end == len(line) and not is_over
    return None if goes_on else begin + common


def _first_digit(line: str, start: int = 0) -> int | None:
    found = re.compile(r"\d").search(line, start)
    return found.start() if found else None


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(one), len(other)))


# --- Made-up mistakes


def wrong_answer(item: Problem, rng: random.Random) -> str:
    """Return the item's answer with a mistake in one step, which later lines may propagate."""
    found = rng.choice(list(_EQUATION.finditer(item.answer)))
    a, op, b, result = found.groups()
    numbers = re.findall(r"\d+", item.question + item.answer[: found.start()])
    changed = rng.choice((_result, _result, _result, _operand, _operator))(
        int(a), op, int(b), numbers, rng
    )
    text = item.answer[: found.start()] + changed + item.answer[found.end() :]
    if rng.random() < 0.5:
        return text
    now, rest = changed.split("=")[1], text[found.start() + len(changed) :]
    return text[: -len(rest)] + re.sub(rf"\b{result}\b", now, rest) if rest else text


def value(a: int, op: str, b: int) -> int:
    """Return the value of a formula, rounded down."""
    if op == "/":
        return a // max(b, 1)
    return {"+": a + b, "-": a - b, "x": a * b, "*": a * b}[op]


def _result(a: int, op: str, b: int, numbers: list[str], rng: random.Random) -> str:
    """Return the formula with a wrong result: a near number, or one changed digit."""
    right = value(a, op, b)
    near = max(0, right + rng.choice((-10, -2, -1, 1, 2, 10)))
    digits = list(str(right))
    digits[rng.randrange(len(digits))] = rng.choice("0123456789")
    return f"{a}{op}{b}={rng.choice((near, int(''.join(digits))))}"


def _operand(a: int, op: str, b: int, numbers: list[str], rng: random.Random) -> str:
    """Return the formula with another operand, and its value."""
    other = int(rng.choice([*numbers, str(a + rng.choice((-1, 1, 10))), str(b + 1)]))
    x, y = rng.choice(((other, b), (a, other)))
    return f"{x}{op}{y}={abs(value(x, op, y))}"


def _operator(a: int, op: str, b: int, numbers: list[str], rng: random.Random) -> str:
    """Return the formula with another operator, and its value."""
    other = rng.choice([sign for sign in "+-x" if sign != op])
    return f"{a}{other}{b}={abs(value(a, other, b))}"
