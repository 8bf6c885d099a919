"""Check what shapes a distribution. All requests are sent as one crowd of mixed settings."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from conformance.checks.registry import check
from conformance.laws import (
    Asked,
    ScoredPlace,
    check_law,
    check_positive,
    places_of,
    repetition_gaps,
)
from conformance.server import AbsentError, CheckedServer, WrongError

from sglang_smc_tools.testing.client import RefusedError
from sglang_smc_tools.testing.endpoint import Sample
from sglang_smc_tools.testing.statistics import Token

GROUP = "sampling"
ANSWERS = 64  # of a feature
TOKENS = 12  # of an answer
#: Below 0 it rewards: what follows a token at once then shows a penalty that comes a token late.
PENALTY = -2.0
BIAS = 2.0


def _counts(place: ScoredPlace, token: Token) -> float:
    return -PENALTY * place.before.count(token)


def _presence(place: ScoredPlace, token: Token) -> float:
    return -PENALTY * (token in place.before)


def _biased(favoured: Mapping[str, float], place: ScoredPlace, token: Token) -> float:
    return favoured.get(str(token), 0.0)


def _no_pair_twice(place: ScoredPlace, token: Token) -> float:
    """Return minus infinity for a token that would repeat two neighbours of prompt and answer."""
    text = (*place.prompt, *place.before)
    is_seen = bool(text) and (text[-1], token) in set(pairwise(text))
    return -math.inf if is_seen else 0.0


class SampledSetting(NamedTuple):
    """A setting of requests, and the distribution that it asks for."""

    params: Mapping[str, Any]
    asked: Asked


SETTINGS = {
    "temperature": SampledSetting({"temperature": 0.5}, Asked(temperature=0.5)),
    "temperature above 1": SampledSetting({"temperature": 1.4}, Asked(temperature=1.4)),
    "top-k": SampledSetting({"top_k": 3}, Asked(top_k=3)),
    "top-p": SampledSetting({"top_p": 0.7}, Asked(top_p=0.7)),
    "min-p": SampledSetting({"min_p": 0.2}, Asked(min_p=0.2)),
    "filters together": SampledSetting(
        {"temperature": 0.8, "top_k": 6, "min_p": 0.05},
        Asked(temperature=0.8, top_k=6, min_p=0.05),
    ),
    "frequency penalty": SampledSetting({"frequency_penalty": PENALTY}, Asked(edit=_counts)),
    "presence penalty": SampledSetting({"presence_penalty": PENALTY}, Asked(edit=_presence)),
}
#: Settings that servers define in their own ways, or that only SGLang has.
REPETITION = "repetition penalty"
BIASED = "logit bias"
PROCESSOR = "custom logit processors"


class Crowd(NamedTuple):
    """What was asked of a server at once, and its answers, by setting."""

    settings: Mapping[str, SampledSetting]
    answers: Mapping[str, list[Sample | RefusedError]]


_CROWDS: WeakKeyDictionary[Any, Crowd] = WeakKeyDictionary()


def _settings(server: CheckedServer) -> dict[str, SampledSetting]:
    """Return all settings that can be asked of a server."""
    found = dict(SETTINGS)
    found[REPETITION] = SampledSetting({"repetition_penalty": 1.5}, Asked())
    if server.model is None:
        return found
    favoured = dict.fromkeys(_likely(server), BIAS)
    found[BIASED] = SampledSetting({"logit_bias": favoured}, Asked(edit=partial(_biased, favoured)))
    processor = {
        "custom_logit_processor": _processor(),
        "custom_params": {"ngram_size": 2, "window_size": 1000},
    }
    found[PROCESSOR] = SampledSetting(processor, Asked(edit=_no_pair_twice))
    return found


def _likely(server: CheckedServer) -> list[str]:
    """Return ids that are neither sure nor rare behind the prompts, as a logit bias has them."""
    tops = server.sglang.following([server.ids(prompt) for prompt in server.prompts])
    ranked = [list(top) for top in tops]
    return sorted({str(token) for tokens in ranked for token in tokens[2:6]})


def _processor() -> str:
    """Return SGLang's processor that bans repeated n-grams, as a request carries it."""
    from sglang.srt.sampling.custom_logit_processor import (
        DeepseekOCRNoRepeatNGramLogitProcessor as NoRepeat,
    )

    return NoRepeat.to_str()


def _crowd(server: CheckedServer) -> Crowd:
    """Return the answers of each setting, sampled once for all checks of a server."""
    if server.endpoint.client not in _CROWDS:
        _CROWDS[server.endpoint.client] = _sampled(server)
    return _CROWDS[server.endpoint.client]


def _sampled(server: CheckedServer) -> Crowd:
    settings = _settings(server)
    order = [(name, index) for name in settings for index in range(ANSWERS)]
    random.Random(0).shuffle(order)

    def ask(one: tuple[str, int]) -> Sample | RefusedError:
        name, index = one
        prompt = server.prompts[index % len(server.prompts)]
        try:
            return server.sample(prompt, TOKENS, **{**settings[name].params, "seed": index + 1})
        except RefusedError as error:
            return error

    found: dict[str, list[Sample | RefusedError]] = {name: [] for name in settings}
    for (name, _), answer in zip(order, server.at_once(ask, order), strict=True):
        found[name].append(answer)
    return Crowd(settings, found)


def _places(server: CheckedServer, name: str) -> list[ScoredPlace]:
    """Return the positions of a setting's answers; raise its refusal."""
    answers = _crowd(server).answers.get(name)
    if answers is None:
        raise AbsentError("token ids, or SGLang's own processors")
    samples: list[Sample] = []
    for answer in answers:
        if isinstance(answer, RefusedError):
            raise answer
        samples.append(answer)
    if server.model is None:
        return list(places_of(samples, [()] * len(samples)))
    ids = {prompt: server.ids(prompt) for prompt in server.prompts}
    return list(places_of(samples, [ids[sample.prompt] for sample in samples]))


def _follows(name: str, server: CheckedServer) -> str:
    places = _places(server, name)
    asked = _crowd(server).settings[name].asked
    return check_law(places, asked, is_exact=server.is_exact)


for _name in (*SETTINGS, BIASED, PROCESSOR):
    check(_name, GROUP)(partial(_follows, _name))


@check(REPETITION, GROUP)
def repetition_penalty(server: CheckedServer) -> str:
    """Check that tokens of the answer come less often; the law needs logits, which none tells."""
    return check_positive(repetition_gaps(_places(server, REPETITION)), "repeats a token less")


@check("greedy decoding", GROUP)
def greedy(server: CheckedServer) -> str:
    """Check that each token is the likeliest, but for rounding, beside others that are sampled."""
    samples = server.at_once(
        lambda index: server.sample(
            server.prompts[index % len(server.prompts)],
            TOKENS,
            temperature=0.0 if index % 2 else 1.3,
            seed=index + 1,
        ),
        range(4 * len(server.prompts)),
    )
    for sample in samples[1::2]:
        for position in sample.positions:
            gap = max(position.top.values()) - position.top.get(position.token, -math.inf)
            if gap > 2 * server.endpoint.rounding:
                raise WrongError(f"a token is {gap:.3f} nats below the likeliest: {sample.text!r}")
    return f"{sum(len(one.positions) for one in samples[1::2])} tokens"


@check("seeds", GROUP)
def seeds(server: CheckedServer) -> str:
    """Check that a seed gives one text alone and in a crowd, and others give others."""

    def ask(seed: int) -> str:
        return server.complete(server.prompts[1], 24, temperature=1.2, seed=seed).text

    alone = [ask(seed) for seed in range(1, 5)]
    if len(set(alone)) == 1:
        raise WrongError("four seeds give one text")
    crowd = server.at_once(ask, [seed for seed in range(1, 5) for _ in range(4)])
    differing = [seed for seed in range(4) if {*crowd[4 * seed : 4 * seed + 4]} != {alone[seed]}]
    server.check_same(differing, [], f"{len(differing)} of 4 seeds give another text in a crowd")
    return "4 seeds alone and four times each at once"


@check("several choices", GROUP)
def several_choices(server: CheckedServer) -> str:
    """Check that `n` samples differ and are counted, and are one text at temperature 0."""
    body = server.body(server.prompts[1], 16, temperature=1.2, n=4, seed=3)
    reply = server.client.post("/v1/completions", body)
    texts = [choice["text"] for choice in reply["choices"]]
    if len(texts) != 4 or len(set(texts)) == 1:
        raise WrongError(f"4 choices asked for: {json.dumps(texts)[:200]}")
    total = reply["usage"]["completion_tokens"]
    if not 4 < total <= 64:
        raise WrongError(f"usage has {total} tokens for 4 choices of at most 16")
    sure = {one.text for one in server.choices(server.prompts[1], 16, n=3)}
    if len(sure) != 1:
        raise WrongError(f"temperature 0 gives {len(sure)} texts")
    return "4 choices"
