"""The benchmark of chats: what it asks, and what it makes of counts."""

from typing import Any

import pytest
from chats import run as chats
from chats.run import CHATS, PLAIN, TURNS, ChatCell, PlayedChats, main, play, rows_of


class Radix:
    """A server whose cache has each chat up to its last answer, but for a token."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def post(self, route: str) -> None:
        self.asked.clear()

    def generate(self, input_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        known = [one for one in self.asked if input_ids[: len(one)] == one]
        self.asked.append(list(input_ids))
        answer = [7] * sampling_params["max_new_tokens"]
        self.asked.append([*input_ids, *answer[:-1]])
        return {
            "output_ids": answer,
            "meta_info": {"cached_tokens": max(map(len, known), default=0)},
        }


def test_a_turn_asks_for_the_whole_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "question", lambda repeat, chat, turn: [repeat, chat, turn])
    engine: Any = Radix()
    played = play(engine, repeat=1)
    new = 3 + 1  # tokens of a turn that no cache has: a question, and the last of the answer before
    lengths = [turn * (3 + chats.ANSWER) + 3 for turn in range(1, TURNS)]
    assert played.prompt == [sum(lengths)] * CHATS
    assert played.cached == [sum(lengths) - new * (TURNS - 1)] * CHATS


def test_rows_compare_with_plain_decoding_in_the_same_pool() -> None:
    def repeats(cached: int, seconds: float) -> list[PlayedChats]:
        return [PlayedChats([100] * CHATS, [cached] * CHATS, seconds)] * 2

    played = {
        ChatCell(PLAIN, "roomy"): repeats(80, 2.0),
        ChatCell("SMC", "roomy"): repeats(60, 1.0),
        ChatCell("SMC", "tight"): repeats(60, 1.0),
        ChatCell("EAGLE-3", "tight"): [],
    }
    plain, ours, alone = rows_of(played)
    assert plain.hits.mean == 0.8 and plain.hits_to_plain is None and plain.time_to_plain is None
    assert ours.hits_to_plain is not None and ours.time_to_plain is not None
    assert ours.hits_to_plain.mean == pytest.approx(0.75)
    assert ours.time_to_plain.mean == pytest.approx(0.5)
    assert alone.hits_to_plain is None, "its pool has no plain decoding"


def test_cells_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "smc-*"]) == 0
    assert capsys.readouterr().out.split() == ["smc-roomy", "smc-tight"]
