"""Sample answers from any server with OpenAI's completions route, and score them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from itertools import chain, repeat
from typing import Any, NamedTuple

import httpx

from sglang_smc_tools.testing.client import Client, RefusedError
from sglang_smc_tools.testing.model import COARSEST, PLAIN, Model, Position, connect
from sglang_smc_tools.testing.statistics import Text, Token, Top

CHUNK = 32  # prompts in one request
CHAT = "/v1/chat/completions"
BESIDE = 8  # requests of a load, beside one that hangs up, one for JSON and one for a tool
_JSON = {"response_format": {"type": "json_object"}}
_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": _NAME}}
_CALL = {"tools": [_TOOL], "tool_choice": "required"}
_GUESS = 1.0  # seconds that the first answer may take, and each beside it
PROMPT_TOP = 20  # prompt log-probabilities, of which vLLM allows no more

Score = Callable[[Sequence[Text], Sequence[Text]], list[list[Position]]]
"""Returns the distribution at each token of texts behind prompts, both as token ids."""


class Sample(NamedTuple):
    """One answer, with the distribution at each token: mapped from tokens to log-probabilities."""

    prompt: str
    text: str
    positions: Sequence[Position]
    sizes: Sequence[int]  # tokens of each streamed piece; of the answer, if it came as a whole

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(position.token for position in self.positions)


class _Piece(NamedTuple):
    """A choice of a reply, or of an event of a streamed one; empty is what it does not tell."""

    text: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    positions: Sequence[Position]


@dataclass
class Endpoint:
    """A model behind OpenAI's completions route, or its chat route.

    Attributes:
        params: of each request, besides those of the checks; also what turns filters off.
        turns: more of them, one for each request.
        adapters: LoRA adapters of requests beside the copies, as /v1/models names them.
        weights: that the server loads again beside copies, as its flags name them; none if empty.
        score: of a server that scores token ids; None: distributions are those that come with the
            answers.
        rounding: nats by which two log-probabilities of one token may differ.
        deadline: of `time.monotonic`, after which no check asks for more than its first answer.
        is_first: whether the running check has asked for nothing yet.
        pace: seconds an answer took in the fastest request; 0 before the first.
        streams: whether the server streams answers with what the checks need.
    """

    client: Client
    model: str = ""
    chat: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    turns: Iterator[Mapping[str, Any]] = field(default_factory=partial(repeat, {}))
    adapters: Sequence[str] = ()
    weights: str = ""
    score: Score | None = None
    rounding: float = COARSEST
    deadline: float = float("inf")
    is_first: bool = True
    pace: float = 0.0
    on_answers: Callable[[int], Any] = lambda count: None
    smc: Model | None = None  # of a server that runs SMC
    streams: bool = True

    @contextlib.contextmanager
    def within(self, share: float) -> Iterator[None]:
        """Let a check ask for so much of the time that is left; others get the rest."""
        end = self.deadline
        now = time.monotonic()
        self.deadline = now + share * (end - now)
        self.is_first = True
        yield
        self.deadline = end

    def sample(
        self,
        prompts: Sequence[str],
        length: int,
        *,
        chunk: int = CHUNK,
        streamed: bool = False,
        **params: Any,
    ) -> list[Sample]:
        """Return an answer of at most ``length`` tokens to each prompt; fewer if the time is short.

        Args:
            chunk: prompts in one request, which a server may batch.
            streamed: whether to stream the answers, where the server can.

        Raises ValueError if the server fails, or does not tell what the checks need.
        """
        found: list[Sample] = []
        body = {"max_tokens": length, **params}
        while len(found) < len(prompts) and (size := self._fitting(chunk)):
            asked = prompts[len(found) : len(found) + size]
            ask = partial(self._asked, asked, body, streamed)
            begin = time.monotonic()
            found += self._samples(asked, self.client.with_top(ask))
            pace = (time.monotonic() - begin) / len(asked)
            self.pace = min(pace, self.pace or pace)
            self.on_answers(len(asked))
        return found

    def _fitting(self, most: int) -> int:
        """Return how many answers there is time for; one at least as a check begins."""
        left = self.deadline - time.monotonic()
        least = int(self.is_first)
        self.is_first = False
        return max(least, int(min(most, max(0.0, left) / (self.pace or _GUESS))))

    def at_once(
        self, asked: Sequence[tuple[str, Mapping[str, Any]]], width: int
    ) -> list[Sample | None]:
        """Return the answers to prompts with their parameters, ``width`` requests at a time.

        Answers are scored when all are there; None are those that the deadline leaves out.
        """

        def answer(index: int) -> list[_Piece] | None:
            if index and time.monotonic() > self.deadline:
                return None
            prompt, params = asked[index]
            if width > 1:
                self._ask_beside(index, prompt, params)
            if self.weights and index % CHUNK == BESIDE:
                self.client.post("/update_weights_from_disk", {"model_path": self.weights})
            ask = partial(self._asked, [prompt], dict(params), index % 2 == 1)
            (pieces,) = self.client.with_top(ask)
            self.on_answers(1)
            return pieces

        pool = ThreadPoolExecutor(width)
        try:
            answers = list(pool.map(answer, range(len(asked))))
        finally:
            pool.shutdown(cancel_futures=True)
        found = dict[int, Sample]()
        there = [index for index, pieces in enumerate(answers) if pieces]
        for start in range(0, len(there), CHUNK):
            some = there[start : start + CHUNK]
            scored = self._samples([asked[i][0] for i in some], [answers[i] or [] for i in some])
            found.update(zip(some, scored, strict=True))
        return [found.get(index) for index in range(len(asked))]

    def _ask_beside(self, index: int, prompt: str, params: Mapping[str, Any]) -> None:
        """Ask among many for what is not judged: answers that nobody reads on, JSON, tool calls."""
        lora = self.adapters[index % len(self.adapters)] if self.adapters else ""
        named = {"model": lora, "lora_path": lora} if lora else {"model": self.model}
        body = {**self.params, **next(self.turns), **params, **named}
        asked = {**body, **self._asking([prompt])}
        if lora:  # which the server has, as it tells: refused, it is an error
            self.client.post(self._route, asked)
        turn = index % BESIDE
        with contextlib.suppress(RefusedError):  # of what the server does not have
            if turn == 0:
                with contextlib.closing(self.client.stream(self._route, asked)) as events:
                    next(events, None)
            elif turn == 2:
                self.client.post(CHAT, {**body, **_CALL, **_message(prompt)})
            elif turn == 4:
                self.client.post(self._route, {**asked, **_JSON})

    @property
    def _route(self) -> str:
        return CHAT if self.chat else "/v1/completions"

    def _asking(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a body that ask: of one prompt, where it is a chat's."""
        return _message(prompts[0]) if self.chat else {"prompt": list(prompts)}

    def _samples(self, asked: Sequence[str], answers: Sequence[list[_Piece]]) -> Iterator[Sample]:
        whole = [_joined(pieces) for pieces in answers]
        if self.score:
            if not all(one.prompt for one in whole):
                raise ValueError(
                    "The answers have no token ids (return_token_ids: SGLang 0.5.22, vLLM 0.10.2 "
                    "and later), so no other server can score them. Leave --reference out."
                )
            prompts = [tuple(one.prompt) for one in whole]
            told = self.score(prompts, [tuple(one.tokens) for one in whole])
        else:
            if not all(one.positions or not one.text for one in whole):
                raise ValueError(
                    "The answers have no log-probabilities (logprobs.top_logprobs), which the "
                    "checks need. Let the server return them, or give --reference."
                )
            told = [list(one.positions) for one in whole]
        for prompt, one, positions, pieces in zip(asked, whole, told, answers, strict=True):
            sizes = [len(piece.tokens or piece.positions) for piece in pieces]
            yield Sample(prompt, one.text, positions, sizes)

    def _asked(
        self, asked: Sequence[str], body: dict[str, Any], streamed: bool, top: int
    ) -> list[list[_Piece]]:
        """Return the pieces of each answer; of streams no more once the server refuses one."""
        tell = {"logprobs": True, "top_logprobs": top} if self.chat else {"logprobs": top}
        body = body | ({"return_token_ids": True} if self.score else tell)
        if streamed and self.streams:
            with contextlib.suppress(RefusedError):
                return self._pieces(asked, body, True)
        found = self._pieces(asked, body, False)
        self.streams &= not streamed
        return found

    def _pieces(
        self, asked: Sequence[str], body: dict[str, Any], streamed: bool
    ) -> list[list[_Piece]]:
        if not self.chat:
            return self._reply({**body, **self._asking(asked)}, len(asked), streamed)
        bodies = ({**body, **self._asking([one])} for one in asked)
        with ThreadPoolExecutor(len(asked)) as pool:
            replies = pool.map(lambda body: self._reply(body, 1, streamed), bodies)
            return [pieces for (pieces,) in replies]

    def _reply(self, body: dict[str, Any], count: int, streamed: bool) -> list[list[_Piece]]:
        """Return the pieces of ``count`` choices: one each, or those of their streams."""
        route = self._route
        body = {"model": self.model, **PLAIN, **self.params, **next(self.turns), **body}
        client = self.client
        found = [list[_Piece]() for _ in range(count)]
        reply = None
        try:
            for reply in client.stream(route, body) if streamed else [client.post(route, body)]:
                for choice in reply["choices"]:
                    piece = _piece(choice, reply, client.top)
                    found[choice.get("index", 0)].append(piece)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{client.url}{route}: no answer: {reply!r:.200}") from error
        if all(found):
            return found
        raise ValueError(f"{client.url}{route}: {count} answers asked for, {reply!r:.200}")


def _message(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    text, prompt, *others = zip(*pieces, strict=True)
    first = next(filter(None, prompt), ())
    return _Piece("".join(text), first, *(list(chain(*each)) for each in others))


def _piece(choice: Mapping[str, Any], reply: Mapping[str, Any], top: int) -> _Piece:
    prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids") or ()
    tokens = choice.get("response_token_ids") or choice.get("token_ids") or ()
    told = choice.get("logprobs") or {}
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    text = (message.get("reasoning_content") or "") + (message.get("content") or "")
    # llama.cpp tells those of completions in the chat's form, too.
    entries = _of_chat(told) if "content" in told else _of_completion(told)
    positions = [
        Position(token, value, _likeliest(others, top)) for token, value, others in entries
    ]
    if not all(value < 0.1 for one in positions for value in (one.logprob, *one.top.values())):
        raise TypeError("log-probabilities are at most 0, but for rounding")
    return _Piece(text, prompt, tokens, positions)


Entries = Iterable[tuple[Token, float, Top]]


def _of_completion(told: Mapping[str, Any]) -> Entries:
    names = ("tokens", "token_logprobs", "top_logprobs")
    return zip(*(told.get(name) or () for name in names), strict=True)


def _of_chat(told: Mapping[str, Any]) -> Entries:
    for each in told.get("content") or ():
        others = {one["token"]: one["logprob"] for one in each["top_logprobs"]}
        yield each["token"], each["logprob"], others


def _likeliest(top: Top, most: int) -> dict[Any, float]:
    """Return the likeliest tokens, without the sampled one that servers add to them.

    Which tokens are told must not depend on the one that is sampled.
    """
    return dict(nlargest(most, top.items(), key=lambda item: item[1]))


def open_endpoint(url: str, api_key: str | None = None, **settings: Any) -> Endpoint:
    """Return the endpoint of a running server, which scores its own answers where it can.

    Args:
        settings: attributes of the `Endpoint`.

    Raises ValueError if there is no such server.
    """
    model = None
    with contextlib.suppress(ValueError):  # of other servers than SGLang
        model = connect(url, api_key=api_key, needs_smc=False)
    try:
        client = model.client if model else Client(url, api_key)
        found = Endpoint(client, **settings)
        models = client.http.get("/v1/models").json()["data"]
        found.model = found.model or models[0]["id"]
        loras = [one["id"] for one in models if dict(one).get("parent")]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{url}: no server with OpenAI's routes answers there ({type(error).__name__}, GET "
            "/v1/models). Give the address of the server, without /v1; --api-key if it has one."
        ) from error
    if not {*found.adapters}.issubset(loras):
        raise ValueError(f"--adapters {found.adapters}; allowed: {loras}. Load them first.")
    if model and found.model in loras:
        found.params = {**found.params, "lora_path": found.model}
        model.lora = found.model
    if model:
        found.score = model.score
        found.rounding = model.rounding
        found.smc = model if model.settings else None
    else:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            prompt_logprobs(found, [(1,)], [(1,)])
            found.score = partial(prompt_logprobs, found)
    return found


def prompt_logprobs(
    endpoint: Endpoint, prompts: Sequence[Text], texts: Sequence[Text]
) -> list[list[Position]]:
    """Score texts behind prompts by vLLM's ``prompt_logprobs``."""
    found: list[list[Position]] = []
    for start in range(0, len(texts), CHUNK):
        some = slice(start, start + CHUNK)
        both = [[*a, *b] for a, b in zip(prompts[some], texts[some], strict=True)]
        body = {**endpoint.params, "model": endpoint.model, "prompt": both}
        body |= {"max_tokens": 1, "prompt_logprobs": PROMPT_TOP}
        choices = endpoint.client.post("/v1/completions", body)["choices"]
        for choice, text in zip(choices, texts[some], strict=True):
            found.append(list(_scored(text, choice["prompt_logprobs"])))
    return found


def _scored(text: Text, entries: Sequence[Mapping[str, Any]]) -> Iterator[Position]:
    for token, entry in zip(text, entries[len(entries) - len(text) :], strict=True):
        told: dict[Any, float] = {int(name): one["logprob"] for name, one in entry.items()}
        yield Position(token, told[token], _likeliest(told, PROMPT_TOP))
