"""Ask a server under test, through OpenAI's routes or, where a check needs it, SGLang's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sglang_smc_tools.testing.checks import PROMPTS
from sglang_smc_tools.testing.client import Client
from sglang_smc_tools.testing.endpoint import Endpoint, Sample, open_endpoint
from sglang_smc_tools.testing.model import PLAIN, Model, connect

WIDTH = 16  # requests at once
FINEST = 1e-3  # nats by which log-probabilities in float32 may differ
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
T = TypeVar("T")
R = TypeVar("R")


class WrongError(Exception):
    """An answer that is not what the request asked for; the message says how."""


class AbsentError(Exception):
    """A feature that this kind of server does not offer at all; the message says what it lacks."""


class Completion(NamedTuple):
    """An answer of OpenAI's completions route."""

    text: str
    tokens: tuple[int, ...]  # ids; empty where the server does not tell
    finish: str
    num_tokens: int


@dataclass
class CheckedServer:
    """A running server, and what checks need to know of it.

    Attributes:
        own: settings of ``custom_params`` in each request, such as SMC's mode.
        is_exact: whether its answers shall follow the target's distribution exactly.
        folder: of the model's checkpoint, where it is at hand.
        adapter: the name of a loaded LoRA adapter; none if empty.
    """

    endpoint: Endpoint
    model: Model | None
    own: Mapping[str, Any] = field(default_factory=dict)
    is_exact: bool = True
    folder: Path | None = None
    adapter: str = ""
    _ids: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def client(self) -> Client:
        return self.endpoint.client

    @property
    def sglang(self) -> Model:
        """The model behind SGLang's own route; raises AbsentError of other servers."""
        if self.model is None:
            raise AbsentError("SGLang's own route")
        return self.model

    @cached_property
    def prompts(self) -> list[str]:
        return list(PROMPTS)

    def body(self, prompt: str | Sequence[int], length: int, **params: Any) -> dict[str, Any]:
        """Return the body of a request for completions, with this server's own settings."""
        custom = {**self.own, **params.pop("custom_params", {})}
        given = {"custom_params": custom} if custom else {}
        common = {"model": self.endpoint.model, "prompt": prompt, "max_tokens": length}
        return {**PLAIN, **self.endpoint.params, **common, **given, **params}

    def complete(self, prompt: str | Sequence[int], length: int, **params: Any) -> Completion:
        """Return one answer to a prompt, at temperature 0 unless ``params`` have another."""
        return self.choices(prompt, length, **params)[0]

    def choices(self, prompt: str | Sequence[int], length: int, **params: Any) -> list[Completion]:
        """Return all choices of an answer."""
        asked = self.body(prompt, length, **{"temperature": 0.0, **params})
        if self.model:
            asked["return_token_ids"] = True
        reply = self.client.post(COMPLETIONS, asked)
        total = reply["usage"]["completion_tokens"]
        found: list[Completion] = []
        for choice in reply["choices"]:
            tokens = tuple(choice.get("token_ids") or choice.get("response_token_ids") or ())
            size = len(tokens) or total
            found.append(Completion(choice["text"], tokens, choice["finish_reason"], size))
        return found

    def sample(self, prompt: str, length: int, **params: Any) -> Sample:
        """Return one answer with the model's distribution at each of its tokens."""
        custom = {**self.own, **params.pop("custom_params", {})}
        if custom:
            params["custom_params"] = custom
        (found,) = self.endpoint.sample([prompt], length, **params)
        return found

    def generate(self, asked: Mapping[str, Any], **params: Any) -> dict[str, Any]:
        """Return an answer of SGLang's own route, at temperature 0 unless ``params`` have another.

        Raises AbsentError of other servers.
        """
        custom = {**self.own, **params.pop("custom_params", {})}
        common: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "custom_params": custom}
        if not custom:
            del common["custom_params"]
        body = {**asked, "sampling_params": {**common, **params}}
        return self.sglang.client.post("/generate", body)

    def ids(self, prompt: str) -> tuple[int, ...]:
        """Return a prompt's token ids, by SGLang's own route."""
        if prompt not in self._ids:
            self._ids[prompt] = self.sglang.token_ids(prompt)
        return self._ids[prompt]

    def check_same(self, found: object, expected: object, what: str) -> None:
        """Check that a text does not depend on what runs beside it.

        Raises WrongError; of a server coarser than float32, where rounding alone may split texts,
        AbsentError.
        """
        if found == expected:
            return
        if self.endpoint.rounding > FINEST:
            raise AbsentError(f"float32, without which rounding may do this: {what}")
        raise WrongError(what)

    def at_once(self, ask: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return the results of ``ask`` in order, `WIDTH` requests at a time."""
        with ThreadPoolExecutor(WIDTH) as pool:
            return list(pool.map(ask, items))


def open_server(
    url: str,
    api_key: str | None = None,
    params: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    **known: Any,
) -> CheckedServer:
    """Return a running server under test.

    Args:
        params: fields of each request.
        folder: of its model's checkpoint, where that is at hand.
        known: other attributes of the `CheckedServer`.

    Raises ValueError if no server with OpenAI's routes answers.
    """
    endpoint = open_endpoint(url, api_key, params=dict(params or {}))
    try:
        model = connect(url, api_key=api_key, needs_smc=False)
    except ValueError:  # it is not SGLang's
        model = None
    if model and folder:  # all of a small vocabulary: distributions are then told whole
        model.client.top = json.loads((folder / "config.json").read_text())["vocab_size"]
        endpoint.score = model.score
    return CheckedServer(endpoint, model, folder=folder, **known)
