"""A model that answers prompts and scores texts, in a server or in an engine of this process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sglang_smc.testing.statistics import Text

CHUNK = 128  # requests sent at a time
TOP = 64  # likeliest tokens asked for at each position; fewer where the vocabulary has fewer

#: The model's own law, whatever a server prefers.
PLAIN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}

Send = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Takes the body of a /generate request with lists in it, and returns a list of answers."""


class RefusedError(ValueError):
    """A request that was answered with an error instead of a text."""


class Answer(NamedTuple):
    """A generated text and what SMC says about it."""

    text: Text
    meta: dict[str, Any]

    @property
    def log_evidence(self) -> float:
        return float(self.meta["spec_smc_log_evidence"])


class Position(NamedTuple):
    """A token of a text that was scored, and the law that it was held against."""

    token: int
    logprob: float
    top: dict[int, float]
    """The likeliest tokens' log-probabilities, most likely first."""


class Model:
    """What checks ask of a server or an engine; tests put toys in its place.

    Args:
        send: takes a /generate body.
        name: for messages.
        settings: the server's SMC settings (`num_particles`, `mode`, ...); empty for a plain model.
        same_models: whether the target and the draft are one model.
        rounding: how far log-probabilities of one text may lie apart, in nats a token.
    """

    def __init__(
        self,
        send: Send,
        name: str,
        settings: dict[str, Any],
        *,
        same_models: bool = False,
        rounding: float = 1e-3,
    ) -> None:
        self.name = name
        self.settings = settings
        self.same_models = same_models
        self.rounding = rounding
        self.on_answers: Callable[[int], None] = lambda count: None
        self._send = send
        self._top = TOP
        self._seeds = itertools.count()

    def seed_from(self, seed: int) -> None:
        """Answers from now on have the seeds ``seed``, ``seed + 1``, ..."""
        self._seeds = itertools.count(seed)

    def answers(
        self, prompts: Sequence[Text], length: int, smc: dict[str, Any], **params: Any
    ) -> list[Answer]:
        """One answer for each prompt, with a seed of its own, of at most ``length`` tokens."""
        found: list[Answer] = []
        for chunk in _chunks(prompts):
            sampling = [
                PLAIN
                | params
                | {
                    "max_new_tokens": length,
                    "sampling_seed": next(self._seeds),
                    "custom_params": {"smc": smc},
                }
                for _ in chunk
            ]
            replies = self._ask({"input_ids": _lists(chunk), "sampling_params": sampling})
            found += [Answer(tuple(reply["output_ids"]), reply["meta_info"]) for reply in replies]
        return found

    def score(self, prompts: Sequence[Text], texts: Sequence[Text]) -> list[list[Position]]:
        """The model's law at each token of texts behind prompts, by a pass over them."""
        both = [(*prompt, *text) for prompt, text in zip(prompts, texts, strict=True)]
        replies = self._scored(both, [len(prompt) - 1 for prompt in prompts])
        return [_positions(text, meta) for text, meta in zip(texts, replies, strict=True)]

    def following(self, texts: Sequence[Text]) -> list[dict[int, float]]:
        """The likeliest next tokens and their log-probabilities, most likely first."""
        replies = self._scored(texts, [len(text) - 1 for text in texts])
        return [_top(meta["output_top_logprobs"][0]) for meta in replies]

    def token_ids(self, text: str) -> Text:
        """A prompt as the model's tokenizer reads it."""
        body = _scoring({"text": [text], "logprob_start_len": 0, "top_logprobs_num": 0})
        meta = self._ask(body)[0]["meta_info"]
        return tuple(token for _, token, _ in meta["input_token_logprobs"])

    def _scored(self, texts: Sequence[Text], starts: Sequence[int]) -> Iterator[dict[str, Any]]:
        for chunk in _chunks(list(zip(texts, starts, strict=True))):
            body = {
                "input_ids": _lists(text for text, _ in chunk),
                "logprob_start_len": [start for _, start in chunk],
            }
            yield from (reply["meta_info"] for reply in self._ask_for_top(body))

    def _ask_for_top(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask with as many of the likeliest tokens as the vocabulary has."""
        while True:
            try:
                return self._ask(_scoring({**body, "top_logprobs_num": self._top}))
            except RefusedError:
                if self._top == 1:
                    raise
                self._top //= 2

    def _ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        replies = self._send(body)
        self.on_answers(len(replies))
        return replies


def _scoring(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}


def _positions(text: Text, meta: dict[str, Any]) -> list[Position]:
    """The first entry is the token before the text, of which SGLang has no law.

    SGLang scores the last token of a vocabulary as token 0
    (srt/managers/scheduler_components/logprob_result_processor.py:54), so the token is the
    text's own, and its number comes from the likeliest where they have it.
    """
    entries = zip(
        text, meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True
    )
    found = []
    for token, (logprob, told, _), likeliest in entries:
        top = _top(likeliest)
        found.append(Position(token, top.get(token, logprob if told == token else -math.inf), top))
    return found


def _top(entries: list[list[Any]]) -> dict[int, float]:
    return {token: logprob for logprob, token, _ in entries}


def _lists(texts: Any) -> list[list[int]]:
    return [list(text) for text in texts]


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
