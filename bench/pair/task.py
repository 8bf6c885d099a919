"""Generate grade-school word problems for the shipped model pair (standard library only).

    from task import check, held_out, messages

    item = held_out(7)           # held-out problem 7, which no training uses
    item.question, item.answer   # its text, and one worked answer, ending in "#### 77"
    messages(item)               # for ``tokenizer.apply_chat_template``
    check(generated_text, item)  # whether the text, without special tokens, ends with "#### 77"

Everything is a pure function of a seed. A worked answer has many free choices of wording, made by
a `Style`: questions and numbers do not depend on it. The target is trained on one style and the
draft on the opposite one, so that the two often differ in words, which does no harm, and sometimes
in numbers, which does.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import NamedTuple

#: First seed of held-out problems; smaller seeds are for training.
HELD_OUT_START = 1_000_000_000


class Style(NamedTuple):
    """Distribution of free choices of wording.

    ``lean`` is the log of the odds of a choice's first option over its last one; options between
    them are spaced evenly. 0 is uniform, a negative lean prefers the last option.
    """

    lean: float

    def pick(self, options: list[str], rng: random.Random) -> str:
        """Draw one of ``options``, the n-th with weight exp(-lean * n / (count - 1))."""
        slope = self.lean / max(1, len(options) - 1)
        weights = [math.exp(-slope * rank) for rank in range(len(options))]
        return rng.choices(options, weights)[0]


TARGET_STYLE = Style(0.5)
DRAFT_STYLE = Style(-0.9)
#: Questions are worded uniformly, as both models read all of them.
QUESTION_STYLE = Style(0.0)


class TaskStep(NamedTuple):
    """One line of arithmetic: ``a op b``, where ``unit`` is the unit of the result."""

    op: str
    a: int
    b: int
    unit: str

    @property
    def result(self) -> int:
        """Return the value of ``a op b``; no division leaves a remainder."""
        return _ARITHMETIC[self.op](self.a, self.b)


class Story(NamedTuple):
    """A problem before its answer is worded."""

    sentences: list[str]
    steps: list[TaskStep]
    who: dict[str, str]


class Problem(NamedTuple):
    """A question, a worked answer and the number that an answer must end with."""

    question: str
    answer: str
    number: int


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "x": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}
_PEOPLE = [
    ("Ana", "she"),
    ("Ben", "he"),
    ("Eva", "she"),
    ("Leo", "he"),
    ("Mia", "she"),
    ("Sam", "he"),
    ("Ida", "she"),
    ("Tom", "he"),
]
_ITEMS = ["pens", "cups", "eggs", "nuts", "caps", "toys", "cards", "coins", "shells", "stamps"]
_PACKS = ["packs", "boxes", "bags", "sets"]

# "[a|b|c]" is a free choice and "{x}" a field. The wordings of a step have a choice at nearly every
# word, because exact speculative decoding gains least where few tokens are forced.
_LEADS = {
    "first": "[First|To start|To begin|Well][,|] ",
    "middle": "[Then|Next|Now|After that][,|] ",
    "last": "[Finally|Last|At last|In the end][,|] ",
}
_WHO = "[we|{name}|I|{pronoun}]"
_MAY = "[ can| must| will|]"
_NUMBERS = "[the|both|these|those] [numbers|counts|values|parts]"
_LINK = "[:|, so| to get| and get]"
_END = "[.|!|;]"
_WORDINGS = {
    "+": f"{_WHO}{_MAY} [add|join|sum|combine] {_NUMBERS}{_LINK}"
    f" [{{a}}+{{b}}|{{b}}+{{a}}]={{r}}[ {{unit}}| in all| in total|]{_END}",
    "-": f"{_WHO}{_MAY} [take|cut|clear|move] [the|this|that] [part|amount|bit]"
    f"[ away| off| out|]{_LINK} {{a}}-{{b}}={{r}}[ {{unit}}| left| now|]{_END}",
    "x": f"{_WHO}{_MAY} [count|find|get] [all|each of|every one of] [the|these|those]"
    f" [groups|lots|rows]{_LINK} [{{a}}x{{b}}|{{b}}x{{a}}|{{a}}*{{b}}|{{b}}*{{a}}]={{r}}"
    f"[ {{unit}}| in all| in total|]{_END}",
    "/": f"{_WHO}{_MAY} [share|split|deal] [all|these|those] [{{unit}}|parts]"
    f"[ out| now|]{_LINK} {{a}}/{{b}}={{r}}[ each| {{unit}}|]{_END}",
}
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_FINAL = re.compile(r"#### (-?\d+)\s*\Z")


def _word(template: str, style: Style, rng: random.Random, **fields: object) -> str:
    """Make a template's choices from left to right, then fill in its fields."""
    chosen = _CHOICE.sub(lambda match: style.pick(match[1].split("|"), rng), template)
    return chosen.format(**fields)


def _ask(template: str, rng: random.Random, **fields: object) -> str:
    return _word(template, QUESTION_STYLE, rng, **fields)


def _person(rng: random.Random) -> dict[str, str]:
    name, pronoun = rng.choice(_PEOPLE)
    return {"name": name, "pronoun": pronoun, "Pronoun": pronoun.capitalize()}


def _collection(rng: random.Random) -> Story:
    """Generate a collection that grows and shrinks in two to four steps of arithmetic."""
    who = _person(rng)
    unit = rng.choice(_ITEMS)
    have = rng.randint(10, 60)
    sentences = [_ask("{name} has {n} {unit}.", rng, **who, n=have, unit=unit)]
    steps: list[TaskStep] = []
    wanted = rng.randint(2, 4)
    while len(steps) < wanted:
        event = rng.choice(_events_that_fit(have, wanted - len(steps), bool(steps)))
        sentence, new_steps = _happen(event, have, unit, who, rng)
        sentences.append(sentence)
        steps += new_steps
        have = steps[-1].result
    ends_shared = steps[-1].op == "/"
    question = "does each friend get" if ends_shared else f"does {who['name']} have now"
    sentences.append(f"How many {unit} {question}?")
    return Story(sentences, steps, who)


def _events_that_fit(have: int, room: int, begun: bool) -> list[str]:
    """Return the operations of the events, or `PACKS`."""
    fitting = {
        "+": True,
        "-": have > 15,
        "x": have <= 60,
        PACKS: room >= 2,
        "/": room == 1 and begun and bool(_divisors(have)),
    }
    return [event for event, fits in fitting.items() if fits]


def _divisors(have: int) -> list[int]:
    return [parts for parts in range(2, 7) if have % parts == 0 and 2 <= have // parts <= 40]


def _happen(
    event: str, have: int, unit: str, who: dict[str, str], rng: random.Random
) -> tuple[str, list[TaskStep]]:
    """Return the sentence of an event, and its steps of arithmetic."""
    if event == PACKS:
        packs = rng.randint(2, 9)
        size = rng.randint(2, 12)
        kind = rng.choice(_PACKS)
        fields: dict[str, object] = {"packs": packs, "size": size, "kind": kind}
        text = _ask("{Pronoun} [buys|gets] {packs} {kind} of {size}.", rng, **who, **fields)
        bought = TaskStep("x", packs, size, unit)
        return text, [bought, TaskStep("+", have, bought.result, unit)]
    template, draw = _EVENTS[event]
    count = draw(have, rng)
    return _ask(template, rng, **who, n=count), [TaskStep(event, have, count, unit)]


PACKS = "packs"
#: By operation: the sentence, and the number in it.
_EVENTS: dict[str, tuple[str, Callable[[int, random.Random], int]]] = {
    "+": ("{Pronoun} [buys|finds|gets|wins] {n} more.", lambda _, rng: rng.randint(5, 60)),
    "-": (
        "{Pronoun} [gives away|loses|sells] {n}.",
        lambda have, rng: rng.randint(3, min(have - 5, 60)),
    ),
    "x": ("A trick makes it {n} times as many.", lambda _, rng: rng.randint(2, 4)),
    "/": ("{Pronoun} shares all with {n} friends.", lambda have, rng: rng.choice(_divisors(have))),
}


def _compare(rng: random.Random) -> Story:
    """Generate a comparison: one person has more, fewer or several times as many as another."""
    who = _person(rng)
    unit = rng.choice(_ITEMS)
    other = rng.choice([name for name, _ in _PEOPLE if name != who["name"]])
    have = rng.randint(10, 60)
    op = rng.choice("+-x")
    by = {"+": rng.randint(3, 40), "-": rng.randint(2, have - 5), "x": rng.randint(2, 4)}[op]
    relation = {"+": "more than", "-": "fewer than", "x": "times as many as"}[op]
    steps = [TaskStep(op, have, by, unit)]
    steps.append(TaskStep("+", have, steps[0].result, unit))
    sentences = [f"{who['name']} has {have} {unit}.", f"{other} has {by} {relation} {who['name']}."]
    if rng.random() < 0.5:
        gone = rng.randint(3, min(60, steps[-1].result - 2))
        sentences.append(_ask("They [lose|sell|give away] {n}.", rng, n=gone))
        steps.append(TaskStep("-", steps[-1].result, gone, unit))
    sentences.append(f"How many {unit} do they have in all?")
    return Story(sentences, steps, who)


def _wages(rng: random.Random) -> Story:
    """Generate pay for the hours of two days, sometimes less some spending."""
    who = _person(rng)
    unit = "dollars"
    pay = rng.randint(3, 12)
    first = rng.randint(2, 9)
    second = rng.randint(2, 9)
    sentences = [
        _ask("{name} earns {pay} dollars an hour.", rng, **who, pay=pay),
        _ask("{Pronoun} works {a} hours [today|on one day]", rng, **who, a=first)
        + f" and {second} hours the next day.",
    ]
    hours = TaskStep("+", first, second, "hours")
    steps = [hours, TaskStep("x", hours.result, pay, unit)]
    if rng.random() < 0.6:
        spent = rng.randint(2, min(60, steps[-1].result - 2))
        sentences.append(_ask("{Pronoun} [spends|pays] {n}.", rng, **who, n=spent))
        steps.append(TaskStep("-", steps[-1].result, spent, unit))
    sentences.append(_ask("How many dollars does {name} have?", rng, **who))
    return Story(sentences, steps, who)


def _pages(rng: random.Random) -> Story:
    """Generate a book read at a number of pages a day; the question is how many are left."""
    who = _person(rng)
    unit = "pages"
    rate = rng.randint(4, 15)
    days = rng.randint(2, 7)
    extra = rng.randint(3, 30) if rng.random() < 0.5 else 0
    length = rate * days + extra + rng.randint(5, 60)
    read = TaskStep("x", rate, days, unit)
    steps = [read, TaskStep("-", length, read.result, unit)]
    sentences = [
        f"A book has {length} pages.",
        _ask("{name} reads {r} pages a day for {d} days.", rng, **who, r=rate, d=days),
    ]
    if extra:
        sentences.append(_ask("Then {pronoun} reads {n} more.", rng, **who, n=extra))
        steps.append(TaskStep("-", steps[-1].result, extra, unit))
    sentences.append("How many pages are left?")
    return Story(sentences, steps, who)


def _shop(rng: random.Random) -> Story:
    """Generate a purchase of two kinds of things, sometimes with change."""
    who = _person(rng)
    unit = "dollars"
    one, two = rng.sample(_ITEMS, 2)
    counts = [rng.randint(2, 9) for _ in range(2)]
    prices = [rng.randint(2, 9) for _ in range(2)]
    steps = [TaskStep("x", n, price, unit) for n, price in zip(counts, prices, strict=True)]
    steps.append(TaskStep("+", steps[0].result, steps[1].result, unit))
    sentences = [
        f"{who['name']} buys {counts[0]} {one} at {prices[0]} dollars each"
        f" and {counts[1]} {two} at {prices[1]} dollars each."
    ]
    if rng.random() < 0.4:
        note = steps[-1].result + rng.randint(2, 50)
        steps.append(TaskStep("-", note, steps[-1].result, unit))
        sentences.append(_ask("{Pronoun} pays with {n}. How much is left?", rng, **who, n=note))
    else:
        sentences.append(_ask("How much does {pronoun} pay?", rng, **who))
    return Story(sentences, steps, who)


# Collections are the most varied kind, so they make up half of the problems.
_KINDS = [_collection] * 5 + [_compare] * 2 + [_wages, _pages, _shop]


def _position(index: int, count: int) -> str:
    if index == 0:
        return "first"
    return "last" if index == count - 1 else "middle"


def _work_out(story: Story, style: Style, rng: random.Random) -> str:
    """Return the worked answer: one sentence for each step, then ``#### number``."""
    lines = []
    for index, step in enumerate(story.steps):
        lead = _LEADS[_position(index, len(story.steps))]
        fields = {"a": step.a, "b": step.b, "r": step.result, "unit": step.unit}
        lines.append(_word(lead + _WORDINGS[step.op], style, rng, **fields, **story.who))
    lines.append(f"#### {story.steps[-1].result}")
    return "\n".join(lines)


def problem(seed: int, style: Style = TARGET_STYLE) -> Problem:
    """Return the problem of ``seed``, its answer worded in ``style``."""
    rng = random.Random(seed)
    story = rng.choice(_KINDS)(rng)
    answer = _work_out(story, style, rng)
    return Problem(" ".join(story.sentences), answer, story.steps[-1].result)


def held_out(index: int, style: Style = TARGET_STYLE) -> Problem:
    """Return the held-out problem number ``index``, from 0 on; training uses none of them."""
    return problem(HELD_OUT_START + index, style)


def messages(item: Problem) -> list[dict[str, str]]:
    """Return ``item``'s question as the chat messages that the pair was trained on."""
    return [{"role": "user", "content": item.question}]


def check(text: str, item: Problem) -> bool:
    """Return whether ``text`` ends with ``#### n`` where n is ``item``'s number."""
    final = _FINAL.search(text)
    return final is not None and int(final[1]) == item.number
