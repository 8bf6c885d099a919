"""What of SGLang's `Req` a round looks at."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from populations import population_of
from sglang.srt.managers.schedule_batch import Req
from table_entries import NEUTRAL

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.rules.base import BatchTexts
from sglang_smc.state.request import RequestState

PROMPT = (1, 0)

ASKED: dict[str, Any] = {
    **NEUTRAL,
    "stop_token_ids": None,
    "sampling_seed": None,
    "stop_str_max_len": 0,
    "stop_regex_max_len": 0,
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}


class Letters:
    """What of a tokenizer potentials look at: a letter for each token, "." for the last."""

    eos_token_id = additional_stop_token_ids = None

    def __init__(self, vocab_size: int) -> None:
        self._letters = [*map(chr, range(ord("a"), ord("a") + vocab_size - 1)), "."]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self._letters[token] for token in tokens)


class ToyRequest:
    """What of SGLang's `Req` a round looks at."""

    smc_state: Any
    holds_kv = True
    particles: list[dict[str, Any]] | None = None  # of its last round
    customized_info: dict[str, Any]
    update_spec_correct_drafts_histogram = Req.update_spec_correct_drafts_histogram
    is_retracted = False
    finished_reason: Any = None
    spec_verify_ct = spec_num_correct_drafts = 0

    def __init__(
        self, row: int, vocab_size: int, limit: int, asked: dict[str, Any], grammar: Any
    ) -> None:
        self.row = self.req_pool_idx = row
        self.retraction_count = 0
        self.eos_token_ids = None
        self.rid = str(row)
        self.custom_logit_processor = asked.get("custom_logit_processor")
        self.to_finish: Any = None
        self.origin_input_ids = list(PROMPT)
        self.multimodal_inputs = None
        self.origin_input_ids_unpadded = list(PROMPT)
        self.decoded_text = ""
        self.output_ids: list[int] = []
        self.spec_correct_drafts_histogram: list[int] = []
        self.stream = False
        self.vocab_size = vocab_size
        self.grammar = grammar
        self.tokenizer = Letters(vocab_size)
        self.kv_committed_len = self.cache_protected_len = len(PROMPT)
        self.kv = self  # in the oldest release these lengths are the request's own, later its kv's
        self.return_logprob = False
        self.lora_id = None
        self.logprob: Any = None
        self.sampling_params = SimpleNamespace(**{**ASKED, "max_new_tokens": limit, **asked})

    def finished(self) -> bool:
        return False

    @property
    def is_stuck(self) -> bool:
        return self.smc_state.counters[-1] == -math.inf

    def say(self, tokens: list[int]) -> None:
        self.output_ids += tokens
        if self.grammar is not None:
            for token in tokens:
                self.grammar.accept_token(token)


def begun(
    smc: dict[str, Any], output_ids: Sequence[int] = (0,), grammar: Any = None, **params: Any
) -> Any:
    """Return a request of letters that has a state, behind these tokens."""
    req = ToyRequest(0, 27, 8, params, grammar)
    req.output_ids = list(output_ids)
    req.smc_state = RequestState.of(0, request_config(SMCConfig(), {"smc": smc}))
    return req


def ended(reqs: list[Any], tails: list[list[list[int]]]) -> BatchTexts:
    """Return the texts of a round in which all particles, with these tails, have ended."""
    population = population_of(tails)
    return BatchTexts(reqs, population._replace(ended=population.ended | True), 27, "cpu")
