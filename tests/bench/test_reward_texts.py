"""Where an answer goes wrong, which is what the reward model is taught."""

import random

import pytest
from pair.reward_texts import forms, judged, right_until, wrong_answer
from pair.task import Problem, held_out

ITEM = Problem(
    "Sam has 10 cups. He gets 5 more. He sells 3.",
    "First, we add the numbers: 10+5=15 cups.\nThen we cut the part: 15-3=12.\n#### 12",
    12,
)


@pytest.mark.parametrize(
    ("answer", "until"),
    [
        (ITEM.answer, None),
        ("So 5+10=15!\nAnd 15-3=12 left;\n#### 12", None),
        ("So 10+5=1", None),  # may go on
        ("So 10+5=15\nAnd", None),
        ("So 10+5=1.", "So 10+5=1"),
        ("So 10+5=1\nAnd", "So 10+5=1"),
        ("So 10+5=151", "So 10+5=15"),
        ("So 10+5=16.\nAnd 15-3=12.\n#### 12", "So 10+5=1"),
        ("So 10+3=13.", "So 10+"),
        ("So 10-5=5.", "So 10"),
        ("We add them.\nAnd", "We add them."),
        ("So 10+5=15 and 2 more", "So 10+5=15 and "),
        ("So 10+5=15.\nAnd 3-15=12.", "So 10+5=15.\nAnd "),
        ("So 10+5=15.\n#### 15", "So 10+5=15.\n"),
        ("So 10+5=15.\nAnd 15-3=12.\n#### 15", "So 10+5=15.\nAnd 15-3=12.\n#### 1"),
        (ITEM.answer + "\nAnd", ITEM.answer),
    ],
)
def test_where_an_answer_goes_wrong(answer: str, until: str | None) -> None:
    """Red for an order of steps, a number cut short, or a line without arithmetic let through."""
    assert answer[: right_until(answer, ITEM)] == (answer if until is None else until)


def test_all_ways_to_write_a_step_count() -> None:
    """Red where a factor's order or sign, or a divisor's place, is not free or is."""
    assert set(forms("So 3x4=12.")) == {"3x4=12", "4x3=12", "3*4=12", "4*3=12"}
    assert forms("So 8/2=4") == ("8/2=4",)


def test_right_answers_are_right_up_to_each_character() -> None:
    """Red where a wording, or a place to stop, passes for a mistake."""
    for index in range(200):
        item = held_out(index)
        for end in range(len(item.answer) + 1):
            assert right_until(item.answer[:end], item) == end
        assert judged(item.answer, item).is_whole
        assert not judged(item.answer[: item.answer.rindex("\n")], item).is_whole


def test_made_up_mistakes_are_mistakes() -> None:
    """Red where most are none: the same number in another place is."""
    rng, changed = random.Random(0), 0
    for index in range(500):
        item = held_out(index)
        found = judged(wrong_answer(item, rng), item)
        assert found.is_whole == (found.right == len(found.answer))
        changed += not found.is_whole
    assert changed > 450
