"""Provide potentials: a reward model over HTTP, length, regex matches, products and powers.

`Http` queries a process reward model, or any reward model. The operator chooses the endpoint, never
a request. It reads the responses of two routes of SGLang's servers with ``--is-embedding``:

- ``/classify`` takes ``{"text": [...]}`` and returns ``[{"embedding": [...]}, ...]``: the output
  of the model's head, a number for each label, without softmax.
- ``/v1/classify``, which vLLM has, too, takes ``{"input": [...], "model": ...}`` and returns
  ``{"data": [{"index": 0, "probs": [...]}, ...]}``: probabilities of labels, of which there must
  be two.
"""

import math
import os
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import httpx
import msgspec
import regex

from sglang_smc.potentials.base import Potential, Text

_SHOWN = 200  # characters of a response in an error message


class EndpointError(RuntimeError):
    """A failed query; the message has the cause and what to do."""


class _Form(NamedTuple):
    """The request and response format of a route."""

    body: Callable[[list[str], str], dict[str, Any]]
    """The request's body, from texts and the model's name."""
    numbers: Callable[[Any], list[list[float]]]
    """The response's numbers by text and label; KeyError, TypeError or ValueError if invalid."""
    maps: tuple[str, ...]


def _of_data(answer: Any) -> list[list[float]]:
    found = sorted(answer["data"], key=lambda one: one["index"])
    return [list(map(float, one["probs"])) for one in found]


_FORMS = {
    "/classify": _Form(
        lambda texts, _: {"text": texts},
        lambda answer: [list(map(float, one["embedding"])) for one in answer],
        ("value", "sigmoid", "softmax"),
    ),
    "/v1/classify": _Form(
        lambda texts, model: {"input": texts, "model": model}, _of_data, ("log",)
    ),
}


def _log_sigmoid(logit: float) -> float:
    """Return log sigmoid without overflow."""
    return min(logit, 0.0) - math.log1p(math.exp(-abs(logit)))


def _log_softmax(values: Sequence[float], label: int) -> float:
    most = max(values)
    return values[label] - most - math.log(math.fsum(math.exp(value - most) for value in values))


_MAPS: dict[str, Callable[[Sequence[float], int], float]] = {
    "value": lambda values, label: values[label],
    "sigmoid": lambda values, label: _log_sigmoid(values[label]),
    "softmax": _log_softmax,
    "log": lambda values, label: math.log(values[label]) if values[label] > 0 else -math.inf,
}


class Http(Potential):
    """A potential: log phi is the score of a reward model, queried by one POST for all texts.

    Args:
        url: of the server, such as ``http://localhost:30001``.
        route: ``/classify`` or ``/v1/classify``.
        as_log: how a response's numbers become log phi. ``value``: the label's number itself;
            ``sigmoid``: its log sigmoid; ``softmax``: its log softmax over all labels; ``log``: its
            logarithm, for ``/v1/classify``, which returns probabilities.
        label: index of the number, from 0.
        scale: factor of log phi; a reward's own unit is seldom the nat.
        template: the text to send for a prefix, with ``{prompt}`` and ``{output}``; doubled braces
            for braces. Both are decoded without special tokens, so a chat's roles must be in the
            template if the model needs them.
        whole_template: the same for a whole text; by default `template`. A model that distinguishes
            a whole text from a prefix needs a mark, such as its EOS.
        model: the model's name, for ``/v1/classify``.
        timeout: time limit of a request, in seconds.
        api_key_variable: the environment variable that holds the endpoint's API key.

    Raises ValueError for an argument that is not allowed.
    """

    def __init__(
        self,
        url: str,
        route: str = "/classify",
        as_log: str = "value",
        label: int = 0,
        scale: float = 1.0,
        template: str = "{prompt}{output}",
        whole_template: str | None = None,
        model: str = "default",
        timeout: float = 5.0,
        api_key_variable: str | None = None,
    ) -> None:
        self._form = _form_of(route, as_log)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r}; allowed: http://... or https://...")
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale={scale!r}; allowed: a finite number above 0.")
        self._url = url.rstrip("/") + route
        self._as_log = as_log
        self._scale = scale
        if label < 0:
            raise ValueError(f"label={label!r}; allowed: numbers from 0 on.")
        self._label = label
        self._model = model
        self._timeout = timeout
        self._template = _template_of(template)
        self._whole = self._template if whole_template is None else _template_of(whole_template)
        self._headers = _headers_of(api_key_variable)
        self.prefix_is_complete = self._whole == self._template  # pyright: ignore[reportAttributeAccessIssue] -- one object's claim

    def complete(self, texts: Sequence[Text]) -> list[float]:
        """Return log phi of whole texts; see `Potential.complete`.

        Raises EndpointError for a failed query.
        """
        return self._values(texts, self._whole)

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return self._values(texts, self._template)

    def _values(self, texts: Sequence[Text], template: str) -> list[float]:
        if not texts:
            return []
        sent = [template.format(prompt=text.prompt, output=text.output) for text in texts]
        found = self._numbers(self._post(self._form.body(sent, self._model)), len(sent))
        return [self._scale * _MAPS[self._as_log](values, self._label) for values in found]

    def _post(self, body: dict[str, Any]) -> Any:
        try:
            response = self._client.post(self._url, json=body)
        except httpx.TimeoutException as error:
            raise EndpointError(
                f"{self._url} did not answer within {self._timeout:g} s (timeout=). Is the reward "
                "model's server busy with others? Give it more time, or a server of its own."
            ) from error
        except httpx.HTTPError as error:
            raise EndpointError(
                f"{self._url} cannot be reached: {error}. Is the reward model's server running?"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise EndpointError(
                f"{self._url} answered with HTTP {response.status_code}: "
                f"{response.text[:_SHOWN]}. Wanted is a server of a reward model; SGLang's are "
                "started with --is-embedding."
            )
        try:
            return response.json()
        except ValueError as error:
            raise self._unread(response.text) from error

    def _numbers(self, answer: Any, count: int) -> list[list[float]]:
        """Return a number for each label, of each of ``count`` texts."""
        try:
            found = self._form.numbers(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unread(answer) from error
        if len(found) != count:
            raise EndpointError(f"{self._url} gave {len(found)} answers for {count} texts.")
        least = 1 if self._as_log in ("value", "sigmoid") else 2
        fewest = min(map(len, found))
        if fewest < max(least, self._label + 1):
            raise EndpointError(
                f"{self._url} gave {fewest} numbers of a text; as_log={self._as_log!r} with label="
                f"{self._label} needs {max(least, self._label + 1)}. Choose another label or map."
            )
        return found

    def _unread(self, answer: Any) -> EndpointError:
        return EndpointError(
            f"{self._url} gave what is not read here: {str(answer)[:_SHOWN]}. Is route= the one "
            "that this server has?"
        )

    @cached_property
    def _client(self) -> httpx.Client:
        """Return one client, to keep its connection; the environment's proxies are ignored."""
        return httpx.Client(timeout=self._timeout, headers=self._headers, trust_env=False)


def _form_of(route: str, as_log: str) -> _Form:
    if route not in _FORMS:
        raise ValueError(f"route={route!r}; allowed: {', '.join(_FORMS)}.")
    form = _FORMS[route]
    if as_log not in form.maps:
        allowed = ", ".join(form.maps)
        raise ValueError(f"as_log={as_log!r}; allowed with route={route!r}: {allowed}.")
    return form


def _template_of(template: str) -> str:
    try:
        filled = template.format(prompt="", output="\0")
    except (KeyError, IndexError, ValueError) as error:
        filled = repr(error)
    if "\0" not in filled:
        raise ValueError(
            f"template {template!r}; allowed: a text with {{output}} and, if wanted, {{prompt}}; "
            "{{ and }} for braces."
        )
    return template


def _headers_of(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if variable not in os.environ:
        raise ValueError(
            f"api_key_variable={variable!r} is not in the environment. Set it where the server "
            "starts, or leave it out."
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a request: nats per match; negative to discourage matches."""

    weight: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight={self.weight!r}; allowed: a finite number")


class RegexCount(Potential):
    """A potential: log phi = weight * the number of matches of a pattern in the output.

    The operator chooses the pattern, so that no request can bring a slow one; a search that takes
    longer than ``seconds`` is an error of the request that it is for.
    """

    Args = Weight
    prefix_is_complete = True

    def __init__(self, pattern: str, seconds: float = 0.1) -> None:
        self._pattern = regex.compile(pattern)
        self._seconds = seconds

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return [text.args.weight * self._count(text.output) for text in texts]

    prefix = complete

    def _count(self, output: str) -> int:
        return sum(1 for _ in self._pattern.finditer(output, timeout=self._seconds))


class LengthArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a request: the length to prefer."""

    per_token: float  # nats per missing or surplus token; 0 or more
    target: int = 0  # the preferred number of output tokens, EOS included

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_token) and self.per_token >= 0):
            raise ValueError(f"per_token={self.per_token!r}; allowed: a finite number >= 0")
        if self.target < 0:
            raise ValueError(f"target={self.target!r}; allowed: a number of tokens >= 0")


class Length(Potential):
    """A potential: log phi = -per_token * abs(tokens - target), over output tokens.

    A prefix pays for surplus tokens alone: missing ones can still follow.
    """

    Args = LengthArgs

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return [-t.args.per_token * abs(len(t.output_ids) - t.args.target) for t in texts]

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return [-t.args.per_token * max(0, len(t.output_ids) - t.args.target) for t in texts]


class _Product(Potential):
    def __init__(self, parts: dict[str, Potential]) -> None:
        self._parts = parts
        self.Args = _args_of(parts)  # pyright: ignore[reportAttributeAccessIssue] -- one object's
        self.prefix_is_complete = all(part.prefix_is_complete for part in parts.values())  # pyright: ignore[reportAttributeAccessIssue] -- as above

    def open(self) -> None:
        for part in self._parts.values():
            part.open()

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return self._sums("complete", texts)

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return self._sums("prefix", texts)

    def _sums(self, method: str, texts: Sequence[Text]) -> list[float]:
        """Return the sum for each text; zip detects a part with too few values."""
        columns = [
            getattr(part, method)([_with(text, getattr(text.args, name)) for text in texts])
            for name, part in self._parts.items()
        ]
        return [sum(values) for values in zip(*columns, strict=True)]


class _Power(Potential):
    def __init__(self, potential: Potential, alpha: float) -> None:
        self._potential = potential
        self._alpha = alpha
        for name in ("Args", "when", "prefix_is_complete"):
            setattr(self, name, getattr(potential, name))

    def open(self) -> None:
        self._potential.open()

    def complete(self, texts: Sequence[Text]) -> list[float]:
        return [self._power(value) for value in self._potential.complete(texts)]

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        return [self._power(value) for value in self._potential.prefix(texts)]

    def _power(self, value: float) -> float:
        return self._alpha * value if self._alpha else 0.0  # 0 * -inf is NaN


def product(**parts: Potential) -> Potential:
    """Return the product of potentials, the sum of their logarithms.

    A request gives each part its arguments under the part's name; those of a part without
    arguments, or with defaults for all, may be left out.

    Raises:
        ValueError: without parts.
    """
    if not parts:
        raise ValueError("product() has no parts; needed: one or more, as name=potential.")
    return _Product(parts)


def exponent(potential: Potential, alpha: float) -> Potential:
    """Return a potential to the power alpha, alpha times its logarithm.

    With 0 it is 1 for all texts, also for those that the potential forbids.

    Raises ValueError unless alpha is a finite number >= 0.
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"exponent() has alpha={alpha!r}; allowed: a finite number >= 0.")
    return _Power(potential, alpha)


def _args_of(parts: dict[str, Potential]) -> type[msgspec.Struct]:
    """Return a schema with a field for each part, optional where the part's schema allows it."""
    needed: list[tuple[str, Any]] = []
    optional: list[tuple[str, Any, Any]] = []
    for name, part in parts.items():
        if any(field.required for field in msgspec.structs.fields(part.Args)):
            needed.append((name, part.Args))
        else:
            optional.append((name, part.Args, msgspec.field(default_factory=part.Args)))
    return msgspec.defstruct(
        "ProductArgs", [*needed, *optional], frozen=True, forbid_unknown_fields=True
    )


def _with(text: Text, args: Any) -> Text:
    """Return a copy of a text with a part's arguments; its decoded text is kept."""
    found = copy(text)
    found.args = args
    return found
