"""Copies of identifiers, alone and under load: each fault is found, and told from what is none."""

import json
import math
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import pytest

from sglang_smc_tools.testing import client
from sglang_smc_tools.testing.audit import LEVEL
from sglang_smc_tools.testing.audit_texts import (
    RARE,
    STRAY,
    Copied,
    ask_copies,
    check_greedy,
    judge_copies,
    result_of_copies,
)
from sglang_smc_tools.testing.copies import FORMS, KINDS, copies_of, identifiers
from sglang_smc_tools.testing.endpoint import Endpoint, Sample, open_endpoint
from sglang_smc_tools.testing.model import Model, Position
from sglang_smc_tools.testing.report import Result, Verdict
from sglang_smc_tools.testing.statistics import Text
from tools.tests.testing.conftest import URL, Serve
from tools.tests.testing.test_audit import as_chat

COPIES = copies_of(100, 4)
INDICES = {copy.prompt: index for index, copy in enumerate(COPIES)}
FLOAT32 = 1e-3


@cache
def right_text(prompt: str) -> str:
    """Return what a model that copies says behind a prompt, and more."""
    values = dict(re.findall(r"^(r\d+) = (.+)$", prompt, re.MULTILINE))
    names = re.findall(r"r\d+", prompt.split("\n\n")[1].partition(" again")[0])
    if prompt.endswith('"'):
        return json.dumps({name: values[name] for name in names}, ensure_ascii=False)[8:] + "." * 60
    return " " + "\n".join(f"{name} = {values[name]}" for name in names)[5:] + "." * 60


def errs(prompt: str, place: int) -> bool:
    """Return whether the model itself takes another character there."""
    return INDICES[prompt] % 3 == 0 and place == 7


def law_of(prompt: str, place: int) -> dict[int, float]:
    """Return the masses of characters; a third of the answers have a mistake of the model's own."""
    right = ord(right_text(prompt)[place]) + errs(prompt, place)
    others = {ord("!") + i: 0.02 * 0.5**i for i in range(1, 20) if ord("!") + i != right}
    return {right: 1.0 - math.fsum(others.values()), **others}


Wrongs = Callable[[int, int, int], bool]
"""Maps the load, a request's index and a token's place to whether another token is said."""


@dataclass
class Copier:
    """A completions server that copies; ``wrongs`` is its fault."""

    wrongs: Wrongs = lambda load, index, place: False
    tells: str = "ids"
    refuses: int = 10  # the load at which it answers no more
    asked: Counter[str] = field(default_factory=Counter)
    beside: list[str] = field(default_factory=list)
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(64))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            adapters = [{"id": name, "parent": "copier"} for name in ("a", "b")]
            return httpx.Response(200, json={"data": [{"id": "copier"}, *adapters]})
        body = json.loads(request.content)
        is_chat = request.url.path == "/v1/chat/completions"
        (prompt,) = [body["messages"][0]["content"]] if is_chat else body.get("prompt", [""])
        if prompt not in INDICES or "prompt_logprobs" in body:
            return httpx.Response(404)
        if wants := {"response_format", "tools"} & body.keys():
            self.beside += wants
            return httpx.Response(400, text="no grammars")
        is_judged = body.get("return_token_ids") or body.get("logprobs")
        assert not is_judged or (body["model"], body.get("lora_path")) == ("copier", None)
        self.asked[prompt] += bool(is_judged)
        if not is_judged:
            self.beside.append("hang up" if body.get("stream") else body["lora_path"])
        load = self.asked[prompt] - 1
        if load == self.refuses:
            return httpx.Response(503, text="too many requests")
        if load == 2 and is_judged and INDICES[prompt] < 64:
            self.together.wait(20)  # as many requests at once as is said, or it breaks
        choice = self.choice(prompt, body, load)
        choice = as_chat(choice) if is_chat else choice
        if body.get("stream"):
            return httpx.Response(200, text=f"data: {json.dumps({'choices': [choice]})}\n\n")
        return httpx.Response(200, json={"choices": [choice]})

    def choice(self, prompt: str, body: dict[str, Any], load: int) -> dict[str, Any]:
        index = INDICES[prompt]
        tokens = list[int]()
        tops = list[dict[str, float]]()
        source = random.Random(f"{prompt}{load}")
        for place in range(body["max_tokens"]):
            law = law_of(prompt, place)
            token = max(law, key=law.__getitem__)
            if body["temperature"] > 0:
                (token,) = source.choices(list(law), list(law.values()))
            if self.wrongs(load, index, place):
                token += 50
                law = {token: 0.9, **{name: 0.1 * mass for name, mass in law.items()}}
            tokens.append(token)
            tops.append({chr(name): math.log(mass) for name, mass in law.items()})
        text = "".join(map(chr, tokens))
        if self.tells == "ids":
            ids = [INDICES[prompt]]
            return {"index": 0, "text": text, "prompt_token_ids": ids, "token_ids": tokens}
        values = [top[char] for top, char in zip(tops, text, strict=True)]
        logprobs = {"tokens": [*text], "token_logprobs": values, "top_logprobs": tops}
        return {"index": 0, "text": text, "logprobs": logprobs}

    def score(self, prompts: Sequence[Text], texts: Sequence[Text]) -> list[list[Position]]:
        return [
            [
                Position(token, top.get(token, -math.inf), top)
                for place, token in enumerate(text)
                for top in [logs_of(law_of(COPIES[index].prompt, place))]
            ]
            for (index,), text in zip(prompts, texts, strict=True)
        ]


def logs_of(law: dict[int, float]) -> dict[int, float]:
    return {token: math.log(mass) for token, mass in law.items()}


def checked(serve: Serve, server: Copier, **settings: Any) -> list[Result]:
    serve(server)
    endpoint = open_endpoint(URL, rounding=FLOAT32, **settings)
    if server.tells == "ids":
        endpoint.score = server.score
    return judge_copies(COPIES, ask_copies(endpoint, COPIES), FLOAT32, LEVEL)[0]


@pytest.mark.parametrize(("tells", "chat"), [("ids", False), ("texts", False), ("texts", True)])
def test_a_correct_server_passes_with_mistakes_of_its_model(
    serve: Serve, tells: str, chat: bool
) -> None:
    server = Copier(tells=tells)
    results = checked(serve, server, chat=chat, adapters=["a", "b"])
    assert [result.verdict for result in results] == [Verdict.PASS] * 3
    beside = {"response_format": 24, "tools": 26, "hang up": 26, "a": 100, "b": 100}
    assert Counter(server.beside) == beside
    for result in results:
        assert result.note.startswith("0 of 100 answers (95 %: 0.0% to 3.6%)")
        lacking, innocent = map(int, re.findall(r"(\d+) lack.* (\d+) of them", result.note)[0])
        assert lacking == innocent > 33


LOADED = {"copies-12", "copies-64"}
ALL = LOADED | {"copies-1"}

#: By what is wrong: at which load, request and place, what it tells, and the checks that fail.
FAULTS: dict[str, tuple[Wrongs, str, set[str]]] = {
    "a slot shared": (lambda load, i, at: load == 2 and i == 4 == at, "ids", {"copies-64"}),
    "shared, by texts": (lambda load, i, at: load == 2 and i == 4 == at, "texts", {"copies-64"}),
    "a slot freed early": (lambda load, i, at: load > 0 and i % 50 == 2 and at > 4, "ids", LOADED),
    "off by one at a page's end": (lambda load, i, at: i % 20 == 0 and at == 15, "ids", ALL),
    "at temperature 1": (lambda load, i, at: i % 32 == 3 and at == 4, "ids", ALL),
    "beyond a window": (lambda load, i, at: at > 30, "ids", ALL),
}


@pytest.mark.parametrize(("wrongs", "tells", "checks"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(serve: Serve, wrongs: Wrongs, tells: str, checks: set[str]) -> None:
    """One wrong token at temperature 0, or four at 1, of 100 answers."""
    failed = {one.check: one for one in checked(serve, Copier(wrongs, tells)) if one.failed}
    assert failed.keys() == checks
    assert all("is answered by" in result.note for result in failed.values())


NOTHING = {"tails": [], "lacked_alone": []} | dict.fromkeys(("is_corrupted", "lacks"), [False] * 40)


def gaps_of(copied: Sequence[float], **more: Any) -> Copied:
    return Copied(40, [*copied, *[0.0] * 1000], **{**NOTHING, **more})


@pytest.mark.parametrize(
    ("copied", "words"),
    [
        (gaps_of([0.2] * 9), ""),  # of bfloat16, as rounding has it
        (gaps_of([0.5] * 2), ""),
        (gaps_of([0.5] * 12), "tokens below the likeliest"),
        (gaps_of([1.5]), "a gap of 1.5 nats"),
        (gaps_of([], tails=[STRAY] * 9 + [0.5] * 91), ""),
        (gaps_of([], tails=[STRAY / 2] * 9 + [0.5] * 91), "tokens of the rarest 0.002"),
        (gaps_of([], tails=[RARE / 2] * 2 + [0.5] * 9998), ""),
        (gaps_of([], tails=[RARE / 2] * 4 + [0.5] * 9996), "tokens of the rarest 1e-05"),
        (gaps_of([], lacks=[True] * 40, lacked_alone=[True] * 40), ""),  # the model's own
        (gaps_of([], lacks=[True, *[False] * 3] * 10, lacked_alone=[False] * 40), ""),
        (gaps_of([], lacks=[True, False] * 20, lacked_alone=[False] * 40), "20 answers that"),
        (gaps_of([], lacks=[False] * 40, lacked_alone=[True] * 40), ""),
    ],
)
def test_a_rule_tells_rounding_and_chance_from_faults(copied: Copied, words: str) -> None:
    result = result_of_copies(12, copied, 2**-3, LEVEL)
    assert result.failed == bool(words) and (not words or f"fails by {words}" in result.note)


@pytest.mark.parametrize(("num_greedy", "verdict"), [(8, "not enough data"), (9, "pass")])
def test_copies_that_would_miss_one_answer_of_four_do_not_pass(
    num_greedy: int, verdict: str
) -> None:
    """0.75^8 of audits ask for no answer with the fault, one in ten: 0.75^9 are fewer."""
    copied = gaps_of([])._replace(num_greedy=num_greedy)
    assert result_of_copies(12, copied, 2**-3, LEVEL).verdict.value == verdict


def test_no_token_at_temperature_0_is_far_below_the_likeliest() -> None:
    """One in a thousand is fewer than may stray, yet no rounding moves by so much."""

    class One(Endpoint):
        gap = 0.01

        def sample(self, prompts: Sequence[str], length: int, **how: Any) -> list[Sample]:
            top = {0: -0.1, 1: -0.1 - self.gap}
            positions = [Position(0, -0.1, top)] * 999 + [Position(1, top[1], top)]
            return [Sample(prompts[0], "", positions, [1000])]

    endpoint = One(client.Client(URL), rounding=FLOAT32)
    assert check_greedy(endpoint, ["one"], LEVEL).failed
    endpoint.gap = 7 * FLOAT32
    assert not check_greedy(endpoint, ["one"], LEVEL).failed


def fails_by_chance(source: random.Random) -> bool:
    """Return whether a server at the edge of what rounding may do fails at level 5 %."""
    gaps = [3 * FLOAT32 if source.random() < STRAY else 0.0 for _ in range(4000)]
    lacks, lacked_alone = ([source.random() < 0.3 for _ in range(100)] for _ in range(2))
    tails = [source.random() for _ in range(1500)]
    copied = Copied(75, gaps, tails, [False] * 100, lacks, lacked_alone)
    return result_of_copies(12, copied, FLOAT32, 0.05 / 4).failed


def test_false_alarms_keep_their_level() -> None:
    """Of 300 at level 5 % more than 28 fail in 1 of 1,000; those at the edge fail now and then."""
    failed = sum(fails_by_chance(random.Random(seed)) for seed in range(300))
    assert 0 < failed <= 28


def test_copies_share_lists_and_differ_by_seed() -> None:
    prompts = [copy.prompt.partition("\n\n")[0] for copy in COPIES]
    assert len(set(prompts)) == math.ceil(len(COPIES) / len(FORMS))
    assert {line.count("\n") for line in prompts} == {4, 12}
    assert copies_of(100, 4) == COPIES != copies_of(100, 4, seed=1)
    assert all(copy.is_lacking("") != copy.is_lacking(right_text(copy.prompt)) for copy in COPIES)
    assert all(len({*identifiers(random.Random(0), kind, 40)}) == 40 for kind in KINDS)
    near = identifiers(random.Random(0), "near", 40)
    assert all(sum(a != b for a, b in zip(near[0], one, strict=True)) <= 2 for one in near)


def test_no_time_is_no_verdict(serve: Serve) -> None:
    server = Copier(together=threading.Barrier(1))
    serve(server)
    samples = ask_copies(open_endpoint(URL, deadline=0.0, score=server.score), COPIES)
    results, _ = judge_copies(COPIES, samples, FLOAT32, LEVEL)
    assert {one.num_answers for one in results} == {1}
    assert [result.verdict for result in results] == [Verdict.NOT_ENOUGH_DATA] * 3


def test_an_adapter_answers_and_scores(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SGLang, whose `/generate` scores; one that the server does not have is refused."""
    serve(Copier())
    model = Model(client.Client(URL), {})
    bodies = list[Any]()
    monkeypatch.setattr("sglang_smc_tools.testing.endpoint.connect", lambda *_, **how: model)
    monkeypatch.setattr(model.client, "post", lambda route, body: bodies.append(body) or [])
    assert open_endpoint(URL, model="b").params == {"lora_path": "b"}
    assert model.answers([(1,)], 4, {}) == [] and bodies[0]["lora_path"] == "b"
    with pytest.raises(ValueError, match=r"'c'.* allowed: \['a', 'b'\]"):
        open_endpoint(URL, adapters=["c"])


@pytest.mark.parametrize("refuses", [0, 1])
def test_a_server_that_refuses_gets_a_sentence(serve: Serve, refuses: int) -> None:
    """Alone, or under load."""
    serve(Copier(tells="texts", refuses=refuses))
    with pytest.raises(ValueError, match=r"HTTP 503.*too many requests"):
        ask_copies(open_endpoint(URL), COPIES)


@pytest.mark.parametrize("route", ["post", "stream"])
def test_an_answer_without_an_end_is_left_at_the_deadline(serve: Serve, route: str) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"data: "

    serve(lambda request: httpx.Response(200, content=endless()))
    asked = client.Client(URL)
    asked.deadline = 0.0
    with pytest.raises(ValueError, match="the time was over within an answer"):
        list(getattr(asked, route)("/v1/completions", {}))
