"""Sample answers from any server with OpenAI's completions route, and score them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from typing import Any, NamedTuple

import httpx

from sglang_smc.tools.commands import client_of
from sglang_smc.tools.testing.model import Model, Position, RefusedError, connect
from sglang_smc.tools.testing.statistics import Text, Token, Top

TIMEOUT = 300.0  # seconds for one request
CHUNK = 32  # prompts in one request
TOP = (64, 20, 5)  # top log-probabilities asked for, until a server allows them

Score = Callable[[Sequence[Text], Sequence[Text]], list[list[Position]]]
"""Returns the distribution at each token of texts behind prompts, both as token ids."""


class Sample(NamedTuple):
    """One answer, with the distribution at each token: mapped from tokens to log-probabilities."""

    prompt: str
    text: str
    tokens: tuple[Token, ...]
    positions: list[Position]


@dataclass
class Endpoint:
    """A model behind OpenAI's completions route, or its chat route.

    Attributes:
        params: of each request, besides those of the checks.
        score: of a server that scores token ids; None: distributions are those that come with the
            answers.
        rounding: nats by which two log-probabilities of one token may differ.
        deadline: of `time.monotonic`, after which nothing more is asked for.
    """

    client: httpx.Client
    model: str = ""
    chat: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    score: Score | None = None
    rounding: float = 0.1
    deadline: float = float("inf")
    on_answers: Callable[[int], Any] = lambda count: None
    top: int = TOP[0]
    smc: Model | None = None  # of a server that runs SMC

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def sample(
        self, prompts: Sequence[str], length: int, *, chunk: int = CHUNK, **params: Any
    ) -> list[Sample]:
        """Return an answer of at most ``length`` tokens to each prompt; fewer after the deadline.

        Args:
            chunk: prompts in one request, which a server may batch.

        Raises ValueError if the server fails, or does not tell what the checks need.
        """
        found: list[Sample] = []
        for start in range(0, len(prompts), chunk):
            if self.is_late:
                break
            found += self._answers(prompts[start : start + chunk], length, params)
            self.on_answers(len(found) - start)
        return found

    def _answers(self, asked: Sequence[str], length: int, params: dict[str, Any]) -> list[Sample]:
        body = {"prompt": list(asked), "max_tokens": length, "return_token_ids": True, **params}
        choices = self._choices(body, len(asked))
        if self.score is None:
            told = [_told(choice, self.top) for choice in choices]
            tokens = [tuple(position.token for position in positions) for positions in told]
        else:
            pairs = [_token_ids(choice) for choice in choices]
            tokens = [output for _, output in pairs]
            told = self.score([prompt for prompt, _ in pairs], tokens)
        texts = (choice["text"] for choice in choices)
        return [Sample(*each) for each in zip(asked, texts, tokens, told, strict=True)]

    def _choices(self, body: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Return the choices in the prompts' order, with as many top tokens as are allowed."""
        while True:
            try:
                return self._chats(body) if self.chat else self._completions(body, count)
            except RefusedError:
                lower = [top for top in TOP if top < self.top]
                if self.score or not lower:
                    raise
                self.top = lower[0]

    def _completions(self, body: dict[str, Any], count: int) -> list[dict[str, Any]]:
        tops = {} if self.score else {"logprobs": self.top}
        choices = self.post("/v1/completions", {**body, **tops}).get("choices")
        if isinstance(choices, list) and len(choices) == count:
            return sorted(choices, key=lambda choice: choice.get("index", 0))
        raise ValueError(f"{self.client.base_url}: {count} answers asked for, {choices!r:.200}")

    def _chats(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Send the prompts as chats of one message each, all at once."""
        tops = {} if self.score else {"logprobs": True, "top_logprobs": self.top}
        bodies = [{**body, **tops, **_message(prompt)} for prompt in body.pop("prompt")]
        with ThreadPoolExecutor(len(bodies)) as pool:
            replies = list(pool.map(partial(self.post, "/v1/chat/completions"), bodies))
        try:
            return [_as_completion(reply) for reply in replies]
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.client.base_url}: no chat: {replies[0]!r:.200}") from error

    def streamed(self, prompt: str, length: int, **params: Any) -> str:
        """Return the text of a streamed answer."""
        asked = _message(prompt) if self.chat else {"prompt": prompt}
        body = self._body({**asked, "max_tokens": length, "stream": True, **params})
        route = "/v1/chat/completions" if self.chat else "/v1/completions"
        pieces = []
        try:
            with self.client.stream("POST", route, json=body) as reply:
                for line in reply.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if data.startswith("{"):
                        pieces += map(_said, json.loads(data)["choices"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ValueError(f"{self.client.base_url}: a stream broke off: {error!r}.") from error
        return "".join(pieces)

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON of a reply.

        Raises:
            RefusedError: for HTTP 400 and 422.
            ValueError: for anything else that is no answer, with what to do.
        """
        where = f"{self.client.base_url}".rstrip("/") + route
        try:
            reply = self.client.post(route, json=self._body(body))
        except httpx.HTTPError as error:
            raise ValueError(
                f"{where}: no answer ({type(error).__name__}). Check the address, and the server's "
                "own log."
            ) from error
        if reply.status_code in (400, 422):
            raise RefusedError(f"{where}: HTTP {reply.status_code}: {reply.text[:300]}")
        if reply.status_code in (401, 403):
            raise ValueError(f"{where}: the server wants a key. Give it with --api-key.")
        try:
            told = reply.json() if reply.is_success else None
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise ValueError(
                f"{where}: HTTP {reply.status_code}: {reply.text[:300]!r}; needed: the JSON of "
                "OpenAI's completions. Give the address of such a server, without /v1."
            )
        return told

    def _body(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, **self.params, **body}


def _message(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _said(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, or of a piece of one."""
    message = choice.get("message") or choice.get("delta")
    if message is None:
        return choice["text"]
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def _as_completion(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's choice in the form of a completion's."""
    choice = reply["choices"][0]
    found = {
        "text": _said(choice),
        "prompt_token_ids": choice.get("prompt_token_ids") or reply.get("prompt_token_ids"),
        "token_ids": choice.get("response_token_ids") or choice.get("token_ids"),
    }
    if entries := (choice.get("logprobs") or {}).get("content"):
        tops = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in entries]
        tokens, values = ([each[name] for each in entries] for name in ("token", "logprob"))
        found["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
    return found


def _told(choice: dict[str, Any], most: int) -> list[Position]:
    """Return the distributions that come with an answer; tokens are texts."""
    try:
        told = choice["logprobs"]
        entries = zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
        return [Position(token, value, _likeliest(top, most)) for token, value, top in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "The answers have no log-probabilities (logprobs.top_logprobs), which the checks need. "
            "Let the server return them, or give --reference."
        ) from error


def _likeliest(top: Top, most: int) -> dict[Any, float]:
    """Return the likeliest tokens, without the sampled one that servers add to them.

    Which tokens are told must not depend on the one that is sampled.
    """
    return dict(nlargest(most, top.items(), key=lambda item: item[1]))


def _token_ids(choice: dict[str, Any]) -> tuple[Text, Text]:
    prompt, output = choice.get("prompt_token_ids"), choice.get("token_ids")
    if prompt and output is not None:
        return tuple(prompt), tuple(output)
    raise ValueError(
        "The answers have no token ids (return_token_ids: SGLang 0.5.22, vLLM 0.10.2 and later), "
        "so no other server can score them. Leave --reference out."
    )


def open_endpoint(url: str, api_key: str | None = None, **settings: Any) -> Endpoint:
    """Return the endpoint of a running server, which scores its own answers where it can.

    Args:
        settings: attributes of the `Endpoint`.

    Raises ValueError if there is no such server.
    """
    client = client_of(url, api_key, TIMEOUT)
    found = Endpoint(client, **settings)
    try:
        models = client.get("/v1/models").json()
        found.model = found.model or models["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{url}: no server with OpenAI's routes answers there ({type(error).__name__}, GET "
            "/v1/models). Give the address of the server, without /v1; --api-key if it has one."
        ) from error
    try:
        model = connect(url, api_key=api_key, needs_smc=False)
    except ValueError:  # not SGLang's
        with contextlib.suppress(ValueError, LookupError, TypeError):
            prompt_logprobs(found, [(1,)], [(1,)])
            found.score = partial(prompt_logprobs, found)
    else:
        found.score, found.rounding = model.score, model.rounding
        found.smc = model if model.settings else None
    return found


def prompt_logprobs(
    endpoint: Endpoint, prompts: Sequence[Text], texts: Sequence[Text]
) -> list[list[Position]]:
    """Score texts behind prompts by vLLM's ``prompt_logprobs``."""
    found: list[list[Position]] = []
    for start in range(0, len(texts), CHUNK):
        some = slice(start, start + CHUNK)
        both = [[*a, *b] for a, b in zip(prompts[some], texts[some], strict=True)]
        body = {"prompt": both, "max_tokens": 1, "prompt_logprobs": TOP[1]}
        choices = endpoint.post("/v1/completions", body)["choices"]
        for choice, text in zip(choices, texts[some], strict=True):
            found.append(list(_scored(text, choice["prompt_logprobs"])))
    return found


def _scored(text: Text, entries: Sequence[Mapping[str, Any]]) -> Iterator[Position]:
    for token, entry in zip(text, entries[len(entries) - len(text) :], strict=True):
        told: dict[Any, float] = {int(name): one["logprob"] for name, one in entry.items()}
        yield Position(token, told[token], _likeliest(told, TOP[1]))
