"""A toy in a server's place: two tables of next-token laws, sampled rightly or wrongly."""

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from sglang_smc_tools.testing import Model, client
from sglang_smc_tools.testing.client import Client, RefusedError

Table = list[list[float]]  # last token -> law of the next
Tables = tuple[Table, Table]
VOCAB = 8
URL = "http://audited:30000"
Handler = Callable[[httpx.Request], httpx.Response]
Serve = Callable[[Handler], None]
SETTINGS = {"num_particles": 4, "num_steps": 2, "mode": "smc", "adaptive": "auto"}


def random_table(seed: int, size: int = VOCAB, power: float = 1.25) -> Table:
    """Laws that differ much from token to token, and from seed to seed."""
    source = random.Random(seed)
    return [
        normalized([source.expovariate(1.0) ** power for _ in range(size)]) for _ in range(size)
    ]


def normalized(masses: list[float]) -> list[float]:
    total = math.fsum(masses)
    return [mass / total for mass in masses]


def mixed(one: Table, other: Table, share: float) -> Table:
    """So much of the other in the one: what a flawed sampler might do."""
    return [
        [(1 - share) * a + share * b for a, b in zip(x, y, strict=True)]
        for x, y in zip(one, other, strict=True)
    ]


@dataclass
class Toy(Client):
    """Answers /generate bodies as SGLang does, with its slip at the vocabulary's last token."""

    p: Table  # the target, as scoring tells it
    q: Table  # the draft, likewise
    drawn: Table = field(default_factory=list)  # what texts of mode exact really follow
    drafted: Table = field(default_factory=list)  # what drafts really follow
    factor: float = 1.0  # what weights are multiplied by
    weighs: bool = True  # whether answers tell their evidence, or always 1

    def post(self, route: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "text" in body:
            return [self._scored((1, 2), 0, 0) for _ in body["text"]]
        if body.get("return_logprob"):
            if body["top_logprobs_num"] > VOCAB:
                raise RefusedError("top_logprobs_num is too large")
            starts = body["logprob_start_len"]
            return [
                self._scored(tuple(text), start, body["top_logprobs_num"])
                for text, start in zip(body["input_ids"], starts, strict=True)
            ]
        pairs = zip(body["input_ids"], body["sampling_params"], strict=True)
        return [self._answer(tuple(text), params) for text, params in pairs]

    def _scored(self, text: tuple[int, ...], start: int, top: int) -> dict[str, Any]:
        tokens = [[None, text[start], None]]
        tops = [None]
        for last, token in zip(text[start:], text[start + 1 :], strict=False):
            told = 0 if token == VOCAB - 1 else token  # as SGLang does
            tokens.append([math.log(self.p[last][told]), told, None])
            tops.append(self._top(last, top))
        meta = {
            "input_token_logprobs": tokens,
            "input_top_logprobs": tops,
            "output_top_logprobs": [self._top(text[-1], top)],
        }
        return {"output_ids": [], "meta_info": meta}

    def _top(self, last: int, top: int) -> list[list[Any]]:
        ranked = sorted(range(VOCAB), key=lambda token: -self.p[last][token])
        return [[math.log(self.p[last][token]), token, None] for token in ranked[:top]]

    def _answer(self, prompt: tuple[int, ...], params: dict[str, Any]) -> dict[str, Any]:
        source = random.Random(params["sampling_seed"])
        smc = params["custom_params"]["smc"]
        length = params["max_new_tokens"]
        if smc["mode"] == "exact":
            text = walk(prompt, [self.drawn] * length, source)
            log_evidence = 0.0
        else:
            text, log_evidence = self._weighed(prompt, params, source)
        meta = {"spec_smc_log_evidence": log_evidence * self.weighs, "spec_smc_resample_ct": 0}
        return {"output_ids": list(text), "meta_info": meta}

    def _weighed(
        self, prompt: tuple[int, ...], params: dict[str, Any], source: random.Random
    ) -> tuple[tuple[int, ...], float]:
        """Importance sampling: no resampling, one particle drawn by weight."""
        laws_of_all = (self.p, self.q, self.drafted)
        p, q, drafted = (warmed(law, params["temperature"]) for law in laws_of_all)
        settings = SETTINGS | params["custom_params"]["smc"]
        block = settings["num_steps"] + 1
        laws = [drafted if index % block else p for index in range(params["max_new_tokens"])]
        texts = [walk(prompt, laws, source) for _ in range(settings["num_particles"])]
        weights = [
            math.prod(
                self.factor * p[last][token] / q[last][token]
                for index, (last, token) in enumerate(itertools.pairwise((prompt[-1], *text)))
                if index % block
            )
            for text in texts
        ]
        (chosen,) = source.choices(texts, weights)
        return chosen, math.log(math.fsum(weights) / len(weights))


def walk(prompt: tuple[int, ...], laws: list[Table], source: random.Random) -> tuple[int, ...]:
    text = prompt
    for law in laws:
        text += tuple(source.choices(range(VOCAB), law[text[-1]]))
    return text[len(prompt) :]


def warmed(table: Table, temperature: float) -> Table:
    return [normalized([mass ** (1 / temperature) for mass in row]) for row in table]


@pytest.fixture
def tables() -> Tables:
    """A target and a draft that overlap, and differ."""
    return random_table(1), mixed(random_table(2), random_table(1), 0.4)


@pytest.fixture
def model(tables: Tables) -> Callable[..., Model]:
    """Makes the model of a toy; keywords say what is wrong with it, or how much of the other."""

    def make(
        *,
        q: Table = tables[1],
        settings: dict[str, Any] | None = None,
        same_models: bool = False,
        drawn: Table | float = 0.0,
        drafted: Table | float = 0.0,
        **wrong: Any,
    ) -> Model:
        p = tables[0]
        known = {**SETTINGS, **(settings or {})}
        drawn = drawn if isinstance(drawn, list) else mixed(p, q, drawn)
        drafted = drafted if isinstance(drafted, list) else mixed(q, p, drafted)
        toy = Toy(p, q, drawn=drawn, drafted=drafted, **wrong)
        return Model(toy, known, same_models=same_models)

    return make


@pytest.fixture
def draft(tables: Tables) -> Model:
    """A plain server of the draft."""
    return Model(Toy(tables[1], tables[1]), {})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Let a handler answer at `URL`."""

    def at(handler: Handler) -> None:
        def client_of(url: str, api_key: str | None, timeout: float) -> httpx.Client:
            return httpx.Client(base_url=url, transport=httpx.MockTransport(handler))

        monkeypatch.setattr(client, "client_of", client_of)
        monkeypatch.setattr("sglang_smc_tools.commands.client_of", client_of)

    return at
