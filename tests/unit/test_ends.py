"""Particles end where an answer with their tokens ends, and read as it does."""

import copy
import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_request import ToyRequest
from transformers import PreTrainedTokenizerFast

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.rules.ends import as_answer
from sglang_smc.rules.stopping import StopTexts
from sglang_smc.server import texts
from sglang_smc.server.texts import ParticleTexts
from sglang_smc.state.request import RequestState
from sglang_smc.state.stream import detokenization
from sglang_smc.state.texts import with_output

SPECIAL = ("</s>", "<|end|>")
PIECES = (*SPECIAL, "▁", "a", "b", ",", "2", "▁a", "ab", ",▁b", "b,▁", "a2b")
IDS = {piece: index for index, piece in enumerate(PIECES)}
PROMPT = [IDS[piece] for piece in ("▁a", "b", "▁", "2")]


def tokenizer() -> Any:
    """One whose first token loses its space, with pieces that no text is encoded to."""
    pieces = Tokenizer(models.BPE(IDS, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    pieces.decoder = decoders.Metaspace(prepend_scheme="always")
    end, turn = SPECIAL
    found: Any = PreTrainedTokenizerFast(
        tokenizer_object=pieces, eos_token=end, additional_special_tokens=[turn]
    )
    found.additional_stop_token_ids = None
    return found


PLAIN = tokenizer()


def update_finish_state(req: Any, num_new: int) -> None:
    """SGLang's own, looked up at each call: its hooks also replace what modules have imported."""
    inspect.unwrap(Req.update_finish_state)(req, num_new)


def request_of(output_ids: list[int], grammar: Any = None, **asked: Any) -> Any:
    params = SamplingParams(**{"max_new_tokens": 9, **asked})
    params.normalize(PLAIN)
    toy = ToyRequest(0, len(PIECES), params.max_new_tokens, {}, grammar)
    toy.tokenizer = PLAIN
    toy.origin_input_ids_unpadded = PROMPT
    req: Any = toy
    found = with_output(req, output_ids)
    found.sampling_params = params
    return found


def answered(tokens: list[int], **asked: Any) -> Any:
    """An answer that SGLang ends, one token after another."""
    req = request_of([], **asked)
    for token in tokens:
        req.output_ids.append(token)
        update_finish_state(req, 1)
        if req.finished():
            return req
    return None


def text_of(req: Any) -> str:
    """What SGLang's detokenizer makes of a whole answer."""
    manager: Any = object.__new__(DetokenizerManager)
    manager.tokenizer = PLAIN
    manager.vocab_size = len(PIECES)
    manager.decode_status = {}
    manager.disable_tokenizer_batch_decode = False
    manager.is_tool_call_parser_gpt_oss = False
    manager.tool_close_token_ids = set()
    ids, offset = req.init_incremental_detokenize()
    params = req.sampling_params
    batch: Any = SimpleNamespace(
        rids=["0"],
        decoded_texts=[""],
        decode_ids=[list(ids)],
        read_offsets=[offset],
        finished_reasons=[req.finished_reason.to_json()],
        no_stop_trim=[params.no_stop_trim],
        skip_special_tokens=[params.skip_special_tokens],
        spaces_between_special_tokens=[params.spaces_between_special_tokens],
    )
    (text,) = inspect.unwrap(DetokenizerManager._decode_batch_token_id_output)(manager, batch)
    return text


@pytest.fixture(autouse=True)
def _read_as_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "resolved", lambda server_args: server_args)


def particle_of(
    tokens: list[int], num_shared: int = 0, grammar: Any = None, **asked: Any
) -> dict[str, Any]:
    """A particle with these tokens, of which the last ones are its own."""
    req = request_of(tokens[:num_shared], grammar, **copy.deepcopy(asked))
    req.smc_state = RequestState.of(0, request_config(SMCConfig(), None))
    StopTexts.begin(req)
    ids, reason = as_answer(req, tokens[:num_shared], tokens[num_shared:])
    particle = {"output_ids": ids, "finish_reason": reason}
    arguments = SimpleNamespace(disable_tokenizer_batch_decode=False, tool_call_parser=None)
    manager: Any = SimpleNamespace(tokenizer=PLAIN, server_args=arguments)
    (text,) = ParticleTexts(manager).texts([particle], **detokenization(req))
    return {**particle, "text": text}


def ids_of(*pieces: str) -> list[int]:
    return [IDS[piece] for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "asked", "text", "matched"),
    [
        (("a", ",▁b"), {"stop": [", "]}, "a", ", "),  # within a token
        (("a", ",▁b"), {"stop": [", "], "no_stop_trim": True}, "a, ", ", "),
        (("a", ",", "▁a"), {"stop": [", "]}, "a", ", "),  # over two, the last of which goes on
        (("▁a", "2"), {"stop_token_ids": [IDS["2"]]}, " a", IDS["2"]),
        (("▁a", "</s>"), {}, " a", IDS["</s>"]),
        (("a", "</s>"), {"no_stop_trim": True, "skip_special_tokens": False}, "a</s>", 0),
        (("a", "</s>"), {"stop": ["</s>"], "skip_special_tokens": False}, "a", "</s>"),
        (("a", "b"), {"max_new_tokens": 2}, "ab", None),
        (("a", "</s>", "b"), {"max_new_tokens": 3, "ignore_eos": True}, "ab", None),
        (("b", "a2b"), {"stop_regex": "a[0-9]"}, "ba2b", "a[0-9]"),
    ],
)
def test_a_text_ends_before_its_stop(
    pieces: tuple[str, ...], asked: dict[str, Any], text: str, matched: Any
) -> None:
    """Red where all of a particle's tokens are its text, or where its first token loses a space."""
    particle = particle_of(ids_of(*pieces), **asked)
    assert particle["text"] == text
    assert particle["output_ids"] == ids_of(*pieces)
    assert particle["finish_reason"].get("matched") == matched
    assert particle["finish_reason"]["type"] == ("length" if matched is None else "stop")


def test_a_grammar_ends_a_text_that_nothing_else_does() -> None:
    """With ignore_eos it does at its last token, which SGLang then cuts."""
    particle = particle_of(ids_of("a", "b"), grammar=object(), ignore_eos=True)
    assert particle["finish_reason"] == {"type": "stop", "matched": IDS["b"]}
    assert particle["text"] == "a"


def test_a_stop_string_in_more_tokens_than_sglang_looks_at_ends_an_answer_that_comes_at_once() -> (
    None
):
    """Red where the answer is cut there and its own particle is not."""
    asked = {"stop": ["ab"]}
    merged = Tokenizer(models.BPE({**IDS, "ab": IDS["ab"]}, merges=[("a", "b")]))
    tokens = ids_of("▁", "a", "b", "2", "</s>")
    req = request_of(tokens, **asked)
    req.sampling_params.stop_str_max_len = len(merged.encode("ab").ids) - 1
    req.tokenizer = PLAIN
    answer = with_output(req, tokens)
    update_finish_state(answer, len(tokens))
    found = as_answer(req, [], tokens)
    assert found.output_ids == list(answer.output_ids_through_stop) == ids_of("▁", "a", "b")
    assert found.finish_reason == answer.finished_reason.to_json()


STOPS = (None, [", "], ["b", ", "], ["</s>"], ["2a", "ba"], [" a"])


def drawn(draw: random.Random) -> dict[str, Any]:
    """Everything that ends a text or decides what of it is shown."""
    asked = {
        "stop": draw.choice(STOPS),
        "stop_token_ids": draw.choice((None, [IDS["2"]], [IDS["<|end|>"], IDS["a2b"]])),
        "stop_regex": draw.choice((None, None, "a+[0-9]", "[b,] ")),
        "max_new_tokens": draw.randint(1, 12),
    }
    switches = "ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"
    return asked | {name: draw.random() < 0.5 for name in switches}


def test_particles_end_as_answers_with_their_tokens() -> None:
    """A plain request's finish state, token by token, for all combinations of ends.

    Red if a switch is left out, or if the tokens before the round count for nothing.
    """
    reasons = set()
    for seed in range(1500):
        draw = random.Random(seed)
        asked = drawn(draw)
        tokens = draw.choices(range(len(PIECES)), weights=[1, 1, *[3] * (len(PIECES) - 2)], k=12)
        answer = answered(tokens, **copy.deepcopy(asked))
        if answer is None:
            continue
        ids = list(answer.output_ids_through_stop)
        reason = answer.finished_reason.to_json()
        particle = particle_of(ids, draw.randrange(len(ids)), **asked)
        told = {"output_ids": ids, "finish_reason": reason, "text": text_of(answer)}
        assert particle == told, (asked, [PIECES[token] for token in ids])
        reasons.add(type(answer.finished_reason))
    assert len(reasons) == 4, "by token, string, pattern and length"
