"""Audits of toy servers: correct ones pass, each fault is found, broken ones get a sentence."""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_smc_tools.testing import audit_cli, client, endpoint
from sglang_smc_tools.testing.audit import (
    CHECKS,
    LEVEL,
    Audit,
    SamplingRules,
    TokenCheck,
    audit,
    compared,
    limited,
    result_of,
)
from sglang_smc_tools.testing.audit_pressure import full_context, sweep
from sglang_smc_tools.testing.audit_texts import ask_copies, check_repeats
from sglang_smc_tools.testing.copies import copies_of
from sglang_smc_tools.testing.endpoint import Endpoint, Sample, open_endpoint
from sglang_smc_tools.testing.model import PLAIN, Model, Position
from sglang_smc_tools.testing.report import Verdict
from sglang_smc_tools.testing.statistics import Text
from tools.tests.testing.conftest import SETTINGS, URL, VOCAB, Handler, Serve, Table, random_table

WIDE = 20  # tokens, so that top_k 10 leaves some out


@cache
def wide_table(seed: int) -> Table:
    return random_table(seed, WIDE, power=1.5)


@dataclass
class Server:
    """A toy completions server; ``draw`` samples, ``tells`` is what it tells with the answers."""

    draw: Callable[[list[float], dict[str, Any], random.Random], int]
    tells: str = "ids"  # `ids` as SGLang and vLLM do, `texts` as others, `entries` as llama.cpp
    penalizes: float = 1.0  # times as much as asked for
    shifts: Callable[[list[str], int], bool] = lambda prompts, index: False  # an answer's tokens
    streams: Callable[[str], str] = lambda text: text
    context: int = 0  # characters that it takes for tokens, if it tells that
    bonus: bool = False  # whether a round of four likeliest tokens ends with another
    table: Table = field(default_factory=lambda: wide_table(1))
    source: random.Random = field(default_factory=lambda: random.Random("server"))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            limit = {"max_model_len": self.context} if self.context else {}
            return httpx.Response(200, json={"data": [{"id": "toy", **limit}]})
        is_chat = request.url.path == "/v1/chat/completions"
        body = json.loads(request.content or "{}")
        if request.url.path != "/v1/completions" and not is_chat:
            return httpx.Response(404, text=body.get("model_path"))
        if is_chat:
            assert body["messages"][0]["role"] == "user"
            body["prompt"] = body["messages"][0]["content"]
        if body.get("stream") and is_chat and body.get("return_token_ids"):
            return httpx.Response(400, text="no token ids in streams of chats")
        if body.get("top_k", 0) < 0 and self.tells == "entries":
            return httpx.Response(422, text="top_k: Input should be greater than or equal to 0")
        if "prompt_logprobs" in body:
            if self.tells != "ids":
                return httpx.Response(400, text="unknown field prompt_logprobs")
            return httpx.Response(200, json={"choices": list(map(self.scored, body["prompt"]))})
        choices = [
            self.choice(body, index) for index in range(1 if is_chat else len(body["prompt"]))
        ]
        convert = as_chat if is_chat else as_entries if self.tells == "entries" else dict
        if body.get("stream"):
            pieces = (convert(piece) for choice in choices for piece in self.pieces(choice))
            lines = [f"data: {json.dumps({'choices': [piece]})}\n\n" for piece in pieces]
            return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))
        told = {"choices": [*map(convert, choices[::-1])]}
        return httpx.Response(200, json=told | {"usage": {"prompt_tokens": len(body["prompt"][0])}})

    def pieces(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a choice's rounds, as a stream does."""
        end = 0
        for size in choice["sizes"]:
            part = slice(end, end + size)
            end = end + size
            piece = {**choice, "text": self.streams(choice["text"][part])}
            if "logprobs" in choice:
                piece["logprobs"] = {name: x[part] for name, x in choice["logprobs"].items()}
            else:
                piece["token_ids"] = choice["token_ids"][part]
            yield piece

    def choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        source = random.Random(body["seed"]) if "seed" in body else self.source
        is_shifted = self.shifts(body["prompt"], index)
        penalty = self.penalizes * body.get("frequency_penalty", 0.0)
        tokens = []
        tops = []
        sizes = [0]
        last = 1
        for _ in range(body["max_tokens"]):
            law = lowered(self.table[last], tokens, penalty)
            likeliest = law.index(max(law))
            last = likeliest if self.bonus and sizes[-1] == 4 else self.draw(law, body, source)
            sizes[-1] += 1
            if last != likeliest or sizes[-1] == 5:
                sizes.append(0)
            tops.append(self.table[tokens[-1] if tokens else 1])
            tokens.append((last + 1) % WIDE if is_shifted else last)
        text = "".join(map(chr, (ord("a") + token for token in tokens)))
        found: dict[str, Any] = {"index": index, "text": text, "sizes": sizes}
        if self.tells == "ids":
            return {**found, "prompt_token_ids": [0, 1], "token_ids": tokens}
        told = [{f"t{i}": math.log(mass) for i, mass in enumerate(row)} for row in tops]
        values = [top[f"t{token}"] for top, token in zip(told, tokens, strict=True)]
        names = [f"t{token}" for token in tokens]
        logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": told}
        return {**found, "logprobs": logprobs}

    def score(self, prompts: Sequence[Text], texts: Sequence[Text]) -> list[list[Position]]:
        laws = [{i: math.log(mass) for i, mass in enumerate(row)} for row in self.table]
        return [
            [
                Position(token, laws[last][token], laws[last])
                for last, token in pairwise((prompt[-1], *text))
            ]
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def scored(self, text: list[int]) -> dict[str, Any]:
        rows = (self.table[last] for last in text[:-1])
        entries = [{str(i): {"logprob": math.log(x)} for i, x in enumerate(row)} for row in rows]
        return {"prompt_logprobs": [None, *entries]}


def as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a completion's choice as a chat's."""
    found = {"delta": {"content": choice["text"]}}
    if logprobs := choice.get("logprobs"):
        of_each = zip(*logprobs.values(), strict=True)
        content = [
            {
                "token": token,
                "logprob": value,
                "top_logprobs": [{"token": k, "logprob": v} for k, v in top.items()],
            }
            for token, value, top in of_each
        ]
        return {**found, "logprobs": {"content": content}}
    ids = choice["prompt_token_ids"], choice["token_ids"]
    return {**found, "prompt_token_ids": ids[0], "response_token_ids": ids[1]}


def as_entries(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a completion's choice with the log-probabilities of a chat's."""
    return {**choice, "logprobs": as_chat(choice)["logprobs"]}


def lowered(row: list[float], tokens: list[int], penalty: float) -> list[float]:
    """Return the masses after a penalty on the tokens so far, not normalized."""
    counts = Counter(tokens)
    return [mass * math.exp(-penalty * counts[token]) for token, mass in enumerate(row)]


def rightly(row: list[float], body: dict[str, Any], source: random.Random) -> int:
    """Sample as the parameters say."""
    if body["temperature"] == 0:
        return row.index(max(row))
    kept = whole_law(tuple(row), *(body.get(name, value) for name, value in DEFAULTS.items()))
    return source.choices(list(kept), list(kept.values()))[0]


DEFAULTS = {"temperature": 0.6, "top_k": 5, "top_p": 0.8, "min_p": 0.1}  # of a server, as many are


@cache
def whole_law(
    row: tuple[float, ...], temperature: float, top_k: int, top_p: float, min_p: float, *_: float
) -> dict[int, float]:
    """Return the masses that sampling parameters leave of a whole distribution."""
    masses = [mass ** (1 / temperature) for mass in row]
    kept: dict[int, float] = {}
    for token in sorted(range(len(row)), key=lambda token: -masses[token]):
        before = math.fsum(kept.values()) / math.fsum(masses)
        if len(kept) == top_k > 0 or before >= top_p or masses[token] < min_p * max(masses):
            break
        kept[token] = masses[token]
    return kept


def without(ignored: str) -> Callable[..., int]:
    """Sample without this parameter."""

    def draw(row: list[float], body: dict[str, Any], source: random.Random) -> int:
        return rightly(row, body | {ignored: PLAIN[ignored]}, source)

    return draw


def greedily(share: float) -> Callable[..., int]:
    """Take the likeliest token in place of a sample, so often."""

    def draw(row: list[float], body: dict[str, Any], source: random.Random) -> int:
        is_sampled = source.random() > share
        return rightly(row, body if is_sampled else {"temperature": 0}, source)

    return draw


def towards_draft(share: float) -> Callable[..., int]:
    """Sample from the target with so much of another model."""
    draft = wide_table(2)
    target = wide_table(1)

    def draw(row: list[float], body: dict[str, Any], source: random.Random) -> int:
        other = draft[target.index(row)] if row in target else row  # a penalty has changed it
        law = [(1 - share) * a + share * b for a, b in zip(row, other, strict=True)]
        return rightly(law, body, source)

    return draw


def by_ratio(row: list[float], body: dict[str, Any], source: random.Random) -> int:
    """Accept drafts by p / q with a q of temperature 1, whatever the drafts' own."""
    if body["temperature"] == 0 or row not in wide_table(1):
        return rightly(row, body, source)
    rules = (body.get(name, value) for name, value in DEFAULTS.items())
    return source.choices(range(WIDE), law_by_ratio(wide_table(1).index(row), *rules))[0]


@cache
def law_by_ratio(last: int, temperature: float, *rules: float) -> list[float]:
    """Return the distribution of the tokens that are accepted, or sampled from (p - q)+."""
    p, drafted, q = (
        shares(wide_table(seed)[last], kind, *rules)
        for seed, kind in ((1, temperature), (2, temperature), (2, 1.0))
    )
    accepted = [d * min(1.0, a / b) if b else 0.0 for a, b, d in zip(p, q, drafted, strict=True)]
    left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    share = (1.0 - math.fsum(accepted)) / math.fsum(left)
    return [a + share * b for a, b in zip(accepted, left, strict=True)]


def shares(row: list[float], *rules: Any) -> list[float]:
    kept = whole_law(tuple(row), *rules)
    return [kept.get(token, 0.0) / math.fsum(kept.values()) for token in range(WIDE)]


def second(row: list[float], body: dict[str, Any], source: random.Random) -> int:
    """Take the second likeliest token at temperature 0, now and then."""
    if body["temperature"] == 0 and source.random() < 0.05:
        return row.index(sorted(row)[-2])
    return rightly(row, body, source)


def audited(
    serve: Serve, server: Server, num_answers: int = 400, chat: bool = False, copies: Any = ()
) -> Audit:
    serve(server)
    found = open_endpoint(URL, chat=chat, params={"top_k": 0} if server.tells == "entries" else {})
    if server.tells == "ids":
        found.score = server.score
    return audit(found, ["one", "two", "three", "four"], copies, num_answers=num_answers)


def failed(found: Audit) -> set[str]:
    return {result.check for result in found.results if result.failed}


def test_prompt_logprobs_are_those_of_the_table(serve: Serve) -> None:
    server = Server(rightly)
    serve(server)
    found = open_endpoint(URL)
    given = [(1, 2), (3,)], [(4, 5, 6), (0,)]
    assert found.score and found.score(*given) == server.score(*given)


@pytest.mark.parametrize(
    ("tells", "chat"), [("ids", False), ("ids", True), ("texts", True), ("entries", False)]
)
def test_a_correct_server_passes(serve: Serve, tells: str, chat: bool) -> None:
    found = audited(serve, Server(rightly, tells), chat=chat, copies=copies_of(20, 8))
    verdicts = [result.verdict for result in found.results]
    assert verdicts == [Verdict.PASS] * 9 + [Verdict.MEASURED] + [Verdict.PASS] * 3
    assert sum(result.alpha or 0 for result in found.results) == pytest.approx(0.01)
    assert all(len(found.ranks[check.name]) > 500 for check in CHECKS)


TURNED = ["four", "three"]

#: By what is wrong: a server, and the least that is to be found of it.
FAULTS: dict[str, tuple[Server, set[str]]] = {
    "greedy": (Server(greedily(1.0)), {"sampled", "temperature", "seeds"}),
    "now and then greedy": (Server(greedily(0.05)), {"sampled"}),
    "a fifth of the draft": (Server(towards_draft(0.2)), {"sampled"}),
    "temperature": (Server(without("temperature")), {"temperature", "greedy"}),
    "top-k": (Server(without("top_k")), {"top-k"}),
    "top-p": (Server(without("top_p")), {"top-p"}),
    "min-p": (Server(without("min_p")), {"min-p"}),
    "penalty": (Server(rightly, penalizes=0.0), {"penalty"}),
    "not the likeliest": (Server(second), {"greedy"}),
    "alone": (Server(rightly, shifts=lambda prompts, _: len(prompts) == 1), {"repeats"}),
    "last of 32": (Server(rightly, shifts=lambda _, index: index == 31), {"repeats"}),
    "order": (Server(rightly, shifts=lambda prompts, _: prompts[:2] == TURNED), {"repeats"}),
    "streamed": (Server(rightly, streams=str.upper), {"repeats"}),
    "bonus": (Server(rightly, bonus=True), {"together"}),
    "bonus, by texts": (Server(rightly, "texts", bonus=True), {"together"}),
    "q of temperature 1": (Server(by_ratio), {"temperature"}),
}


@pytest.mark.parametrize(("server", "least"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(serve: Serve, server: Server, least: set[str]) -> None:
    """Within 400 answers, at 1 % false alarms; a fault of one parameter leaves the others alone."""
    found = failed(audited(serve, server))
    sampled = {check.name for check in CHECKS}
    assert found >= least
    assert not (len(least) == 1 and least < sampled - {"sampled"} and "sampled" in found)


BFLOAT16 = 2**-3
FLOAT16 = 2**-6
FLOAT32 = 1e-3


@pytest.mark.parametrize(
    ("rounding", "gaps", "verdict"),
    [
        (BFLOAT16, [0.0625] * 8, Verdict.PASS),  # stock SGLang's, on a CPU
        (BFLOAT16, [0.5], Verdict.PASS),
        (BFLOAT16, [0.5] * 8, Verdict.FAIL),
        (BFLOAT16, [1.5], Verdict.FAIL),
        (FLOAT16, [0.03] * 8, Verdict.PASS),
        (FLOAT16, [0.2], Verdict.FAIL),
        (FLOAT32, [0.01], Verdict.FAIL),
    ],
)
def test_rounding_is_told_from_a_fault(
    rounding: float, gaps: list[float], verdict: Verdict
) -> None:
    """By the gap of two tokens of which each wins in a pass of another shape."""

    class Rounded(Endpoint):
        def sample(self, prompts: Sequence[str], length: int, **how: Any) -> list[Sample]:
            token = 1 if how.get("chunk") == 1 else 0
            moved = dict(zip("abcdefgh", gaps, strict=False))
            return [
                self.answer(one, token * (one in moved), moved.get(one, 0.0)) for one in prompts
            ]

        def answer(self, prompt: str, last: int, gap: float) -> Sample:
            top = {0: -1.0, 1: -1.0 - gap}
            positions = [Position(token, top[token], top) for token in (*[0] * 20, last)]
            return Sample(prompt, str(last), positions, [21])

    found = check_repeats(Rounded(client.Client(URL), rounding=rounding), list("abcdefgh"), LEVEL)
    assert (found.verdict, found.estimate) == (verdict, pytest.approx(max(gaps)))


def test_false_alarms_keep_their_level() -> None:
    """Of 400 correct samples 5 % are rejected at level 5 %: outside of 7 to 34 in 1 of 1,000."""
    check = TokenCheck("sampled", SamplingRules(), 1.0, "")
    table = random_table(1)
    rejected = 0
    for seed in range(400):
        source = random.Random(-1 - seed)
        samples = []
        for _ in range(8):
            positions = []
            last = 0
            for _ in range(30):
                row = table[last]
                (last,) = source.choices(range(VOCAB), row)
                top = {token: math.log(mass) for token, mass in enumerate(row)}
                likeliest = dict(sorted(top.items(), key=lambda item: -item[1])[:5])
                positions.append(Position(last, top[last], likeliest))
            samples.append(Sample("", "", positions, [3] * 10))
        result = result_of(check, list(compared(check, samples, 1e-3, seed)), samples)
        rejected += (result.p_value or 1.0) < 0.05
    assert rejected <= 34


laws = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=9).map(
    lambda masses: sorted((mass / math.fsum(masses) for mass in masses), reverse=True)
)
rules = st.one_of(
    st.floats(0.2, 0.99).map(lambda value: SamplingRules(temperature=value)),
    st.tuples(st.floats(0.5, 3.0), st.integers(1, 6)).map(lambda both: SamplingRules(*both)),
    st.floats(0.05, 0.95).map(lambda value: SamplingRules(top_p=value)),
    st.floats(0.01, 0.9).map(lambda value: SamplingRules(min_p=value)),
)


@given(laws, rules, st.integers(1, 9))
def test_a_part_tells_the_rules_of_the_whole(
    law: list[float], rule: SamplingRules, told: int
) -> None:
    found = limited({token: math.log(mass) for token, mass in enumerate(law[:told])}, rule, 1e-3)
    if found is None:
        return
    kept = whole_law(tuple(law), *rule)
    expected = [mass / math.fsum(kept.values()) for mass in kept.values()]
    pairs = zip(found.values(), expected, strict=False)
    assert all(math.exp(value) == pytest.approx(mass, abs=2e-3) for value, mass in pairs)
    assert math.fsum(expected[len(found) :]) < 2e-3  # of a thousandth nothing need be known


def test_a_penalty_on_a_token_that_is_not_told_leaves_the_rest_unknown() -> None:
    told = {0: math.log(0.5), 1: math.log(4e-4)}
    rule = SamplingRules(frequency_penalty=math.log(2))
    found = limited(told, rule, 1e-3, {0: 1, 6: 2, 7: 9})  # of at most 8e-4
    assert found and math.exp(found[0]) == pytest.approx(1 / 3, abs=1e-3)
    assert limited(told, rule, 1e-3, dict.fromkeys(range(2, 9), 1)) is None  # of 1.4e-3


def test_too_few_answers_are_no_verdict(serve: Serve) -> None:
    results = {one.check: one for one in audited(serve, Server(rightly), num_answers=10).results}
    assert results["top-k"].verdict is Verdict.NOT_ENOUGH_DATA
    assert "--answers" in results["top-k"].note


@pytest.mark.parametrize("num_answers", [20, 100, 400])
def test_a_check_that_would_miss_one_answer_of_four_does_not_pass(
    serve: Serve, num_answers: int
) -> None:
    """A quarter of the tokens is greedy; those who would miss it in 1 of 10 audits may pass."""
    wrong = {one.check: one for one in audited(serve, Server(greedily(0.25)), num_answers).results}
    assert [name for name in ("sampled", "penalty") if wrong[name].verdict is Verdict.PASS] == []
    right = {one.check: one for one in audited(serve, Server(rightly), num_answers).results}
    assert (right["sampled"].verdict is Verdict.PASS) == (num_answers > 20)
    assert (right["greedy"].verdict is Verdict.PASS) == (num_answers == 400)
    if num_answers == 100:
        assert re.search("Too few to pass: .* a fault in 37% of the answers", right["greedy"].note)


def hanging(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("", request=request)


def models_then(**reply: Any) -> Handler:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy"}]})
        return httpx.Response(**reply)

    return handler


NAN = '{"text": "a", "logprobs": {"tokens": [1], "token_logprobs": [NaN], "top_logprobs": [{}]}}'
TWENTY = [{"index": index, "text": "a"} for index in range(20)]
BROKEN: dict[str, tuple[Handler, str]] = {
    "hangs": (hanging, "no server with OpenAI's routes"),
    "HTML": (lambda _: httpx.Response(200, text="<html>"), "OpenAI's routes"),
    "a list": (lambda _: httpx.Response(200, json=[]), "OpenAI's routes"),
    "500": (models_then(status_code=500, text="oops"), "HTTP 500: 'oops'"),
    "a key": (models_then(status_code=401), "--api-key"),
    "no JSON": (models_then(status_code=200, text="{"), "needed: the JSON"),
    "no choices": (models_then(status_code=200, json={}), "no answer: {}"),
    "400": (models_then(status_code=400, text="no logprobs"), "no logprobs"),
    "not a number": (models_then(text=f'{{"choices": [{NAN}]}}', status_code=200), "no answer"),
    "bare": (models_then(status_code=200, json={"choices": TWENTY}), "no log-prob"),
}


@pytest.mark.parametrize(("handler", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_server_gets_a_sentence(
    serve: Serve, capsys: pytest.CaptureFixture[str], handler: Handler, words: str
) -> None:
    serve(handler)
    assert audit_cli.main([URL, "--answers", "400"]) == 2
    assert words in capsys.readouterr().err


def test_command(serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    serve(Server(towards_draft(0.3)))
    page = tmp_path / "audit.html"
    numbers = tmp_path / "audit.json"
    asked = ["--answers", "200", "--copies", "60", "--page", str(page), "--json", str(numbers)]
    assert audit_cli.main([URL, *asked]) == 1
    assert re.search("^At most 360 answers(.|\n)*sampled(.|\n)*copies-64", capsys.readouterr().out)
    told = json.loads(numbers.read_text())
    assert not told["passed"] and told["model"] == "toy"
    text = page.read_text()
    assert text.count("<article") == len(told["results"])
    assert text.count("<svg") == len(CHECKS) + 3


def test_time_is_counted_from_the_start_and_shared_by_all_checks(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reference takes two minutes of three to start, each request a third of a second."""
    clock = [0.0]
    server = Server(rightly)
    numbers = tmp_path / "audit.json"

    def takes(seconds: float) -> None:
        clock[0] += seconds

    for module in (audit_cli, endpoint, client):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(audit_cli, "_score_by", lambda *_: takes(120))
    serve(lambda request: takes(0.3) or server(request))
    asked = ["--minutes", "3", "--answers", "6000", "--copies", "36", "--json", str(numbers)]
    assert audit_cli.main([URL, *asked, "--reference", URL]) == 0
    told = {one["check"]: one for one in json.loads(numbers.read_text())["results"]}
    assert {one["verdict"] for one in told.values()} == {"pass", "measured"}
    assert 32 < told["penalty"]["num_answers"] < told["sampled"]["num_answers"] < 2400
    assert 180 < clock[0] < 185


@pytest.mark.parametrize("minutes", [0.3, 1, 3])
def test_a_short_time_leaves_no_check_without_tokens(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, minutes: float
) -> None:
    """A request takes half a second, and as much for each answer."""
    clock = [0.0]
    server = Server(rightly)
    numbers = tmp_path / "audit.json"

    def slowly(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or "{}")
        clock[0] += 0.5 * (1 + len(body.get("prompt", ()))) if "prompt_logprobs" not in body else 0
        return server(request)

    for module in (audit_cli, endpoint, client):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    serve(slowly)
    asked = ["--minutes", str(minutes), "--copies", "0", "--json", str(numbers)]
    assert audit_cli.main([URL, *asked]) == 0
    results = json.loads(numbers.read_text())["results"]
    assert min(one["num_answers"] for one in results) > 0
    assert [one["check"] for one in results if one["note"].startswith("0 tokens")] == []
    assert 60 * minutes - 2 < clock[0] < 60 * minutes + 15


def test_time_that_ends_within_the_check_of_evidence_is_told(
    model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    smc = model()
    clock = iter([0, 5, 0, 5])
    monkeypatch.setattr(audit_cli, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(smc.client, "post", lambda *_: int("over"))
    (told,) = audit_cli._evidence(Endpoint(smc.client, smc=smc, deadline=4.0), ["a"], 0)
    assert told.verdict is Verdict.NOT_ENOUGH_DATA and "--minutes" in told.note
    with pytest.raises(ValueError, match="over"):
        audit_cli._evidence(Endpoint(smc.client, smc=smc, deadline=6.0), ["a"], 0)


def test_a_reference_must_score(serve: Serve) -> None:
    serve(Server(rightly, "texts"))
    with pytest.raises(ValueError, match="does not score token ids"):
        audit_cli._score_by(Endpoint(client.Client(URL)), open_endpoint(URL))


def test_a_sweep_asks_for_all_depths_in_turns() -> None:
    most = Model(client.Client(URL), SETTINGS)
    mode = {"mode": "exact"}
    swept = Endpoint(client.Client(URL), params={"custom_params": {"smc": mode}}, smc=most)
    sweep(swept)
    found = [next(swept.turns)["custom_params"]["smc"] for _ in range(6)]
    depths = [{**mode, "num_steps": k, "num_particles": n} for k in (1, 2) for n in (1, 4)]
    assert found == [{"num_steps": 0}, *depths, {"num_steps": 0}]
    with pytest.raises(ValueError, match="does not run SMC"):
        sweep(Endpoint(client.Client(URL)))


def test_prompts_fill_the_context_and_weights_are_loaded_between_them(serve: Serve) -> None:
    serve(Server(rightly, "texts", context=4000))
    found = open_endpoint(URL, weights="folder")
    copies = copies_of(36, full_context(found))
    assert max(len(copy.prompt) for copy in copies) in range(3000, 3857)
    with pytest.raises(ValueError, match="HTTP 404: 'folder'"):
        ask_copies(found, copies)
    serve(Server(rightly, "texts"))
    with pytest.raises(ValueError, match="does not tell max_model_len"):
        full_context(open_endpoint(URL))
