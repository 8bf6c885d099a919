"""What of SGLang's `Req` a round looks at."""

import math
from types import SimpleNamespace
from typing import Any

from edit_cases import NEUTRAL

PROMPT = (1, 0)

FILTERS = ("top_k", "top_p", "min_p", "min_new_tokens")
ASKED: dict[str, Any] = {
    "custom_params": None,
    "stop_strs": [],
    "stop_regex_strs": [],
    "top_k": 1 << 30,
    "top_p": 1.0,
    "min_p": 0.0,
    "min_new_tokens": 0,
    **NEUTRAL,
}


class Letters:
    """What of a tokenizer potentials look at: a letter for each token, "." for the last."""

    def __init__(self, vocab_size: int) -> None:
        self._letters = [*map(chr, range(ord("a"), ord("a") + vocab_size - 1)), "."]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self._letters[token] for token in tokens)


class ToyRequest:
    """What of SGLang's `Req` a round looks at."""

    def __init__(
        self, row: int, vocab_size: int, limit: int, asked: dict[str, Any], grammar: Any
    ) -> None:
        self.row = row
        self.rid = str(row)
        self.custom_logit_processor = asked.get("custom_logit_processor")
        self.to_finish = None
        self.origin_input_ids = list(PROMPT)
        self.output_ids: list[int] = []
        self.stream = False
        self.vocab_size = vocab_size
        self.grammar = grammar
        self.tokenizer = Letters(vocab_size)
        self.kv_committed_len = len(PROMPT)
        self.kv = self  # in 0.5.17 these lengths are the request's own, later its kv's
        self.return_logprob = False
        self.logprob: Any = None
        self.sampling_params = SimpleNamespace(**{**ASKED, "max_new_tokens": limit, **asked})

    def finished(self) -> bool:
        return False

    @property
    def is_stuck(self) -> bool:
        return self.smc_state.counters[-1] == -math.inf

    def say(self, tokens: list[int]) -> None:
        """As SGLang's books take tokens."""
        self.output_ids += tokens
        if self.grammar is not None:
            for token in tokens:
                self.grammar.accept_token(token)
