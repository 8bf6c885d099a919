"""A process reward model, or any reward model, behind an HTTP endpoint.

The endpoint is the operator's choice, and no request's. Two forms of answers are read, those of the
routes of SGLang's servers with ``--is-embedding``:

- ``/classify`` takes ``{"text": [...]}`` and gives ``[{"embedding": [...]}, ...]``: what the
  model's head says, a number for each label, with no softmax.
- ``/v1/classify``, which vLLM has, too, takes ``{"input": [...], "model": ...}`` and gives
  ``{"data": [{"index": 0, "probs": [...]}, ...]}``: shares of labels, of which there must be two.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import httpx

from sglang_smc.potentials.base import Potential, Text

_SHOWN = 200  # characters of an answer that an error tells


class EndpointError(RuntimeError):
    """The endpoint gave no values; the message says why and what to do."""


class _Form(NamedTuple):
    """What a route takes and gives."""

    body: Callable[[list[str], str], dict[str, Any]]
    """Of texts and the model's name."""
    numbers: Callable[[Any], list[list[float]]]
    """Of each text, a number for each label; KeyError, TypeError or ValueError on another form."""
    maps: tuple[str, ...]


def _request(texts: list[str], model: str) -> dict[str, Any]:
    return {"input": texts, "model": model}


def _of_data(answer: Any) -> list[list[float]]:
    found = sorted(answer["data"], key=lambda one: one["index"])
    return [list(map(float, one["probs"])) for one in found]


_FORMS = {
    "/classify": _Form(
        lambda texts, _: {"text": texts},
        lambda answer: [list(map(float, one["embedding"])) for one in answer],
        ("value", "sigmoid", "softmax"),
    ),
    "/v1/classify": _Form(_request, _of_data, ("log",)),
}


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def _log_sigmoid(logit: float) -> float:
    """Without exp of a large number."""
    return min(logit, 0.0) - math.log1p(math.exp(-abs(logit)))


def _log_softmax(values: Sequence[float], label: int) -> float:
    most = max(values)
    return values[label] - most - math.log(math.fsum(math.exp(value - most) for value in values))


_MAPS: dict[str, Callable[[Sequence[float], int], float]] = {
    "value": lambda values, label: values[label],
    "sigmoid": lambda values, label: _log_sigmoid(values[label]),
    "softmax": _log_softmax,
    "log": lambda values, label: _log(values[label]),
}


class Http(Potential):
    """log phi is what a reward model behind ``url`` says of a text; one POST asks about all texts.

    Args:
        url: of the server, such as ``http://localhost:30001``.
        route: ``/classify`` or ``/v1/classify``.
        as_log: how an answer's numbers become log phi. ``value``: the label's number itself;
            ``sigmoid``: log sigmoid of it; ``softmax``: log of the label's share among all of
            them; ``log``: its logarithm, for ``/v1/classify``, whose numbers are shares.
        label: which number, from 0 on.
        scale: log phi is multiplied by it; a reward's own unit is seldom the nat.
        template: the text to send of a beginning, with ``{prompt}`` and ``{output}``; doubled
            braces for braces. Both are decoded without special tokens, so a chat's roles are
            told here if the model is to see them.
        whole_template: the same of a whole text; without one, `template`. A model that is to tell
            a whole text from a beginning needs a mark, such as its EOS.
        model: the name that ``/v1/classify`` is asked for.
        timeout: seconds until the endpoint must have answered.
        api_key_variable: the environment variable that holds the endpoint's API key.

    Raises:
        ValueError: where an argument is none of these.
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
        self._url, self._as_log, self._scale = _url_of(url) + route, as_log, _positive(scale)
        if label < 0:
            raise ValueError(f"label={label!r}; allowed: numbers from 0 on.")
        self._label, self._model, self._timeout = label, model, timeout
        self._template = _template_of(template)
        self._whole = self._template if whole_template is None else _template_of(whole_template)
        self._headers = _headers_of(api_key_variable)
        self.prefix_is_complete = self._whole == self._template  # pyright: ignore[reportAttributeAccessIssue] -- one object's claim

    def complete(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.complete`.

        Raises:
            EndpointError: where the endpoint gives no values.
        """
        return self._values(texts, self._whole)

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.prefix`; raises as `complete` does."""
        return self._values(texts, self._template)

    def _values(self, texts: Sequence[Text], template: str) -> list[float]:
        if not texts:
            return []
        sent = [template.format(prompt=text.prompt, output=text.output) for text in texts]
        found = self._numbers(self._post(self._form.body(sent, self._model)), len(sent))
        return [self._scale * _MAPS[self._as_log](values, self._label) for values in found]

    def _post(self, body: dict[str, Any]) -> Any:
        """The endpoint's answer, from JSON."""
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
        """A number for each label, of each of ``count`` texts."""
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
        """Kept, so that a connection is; the environment's proxies are not meant for it."""
        return httpx.Client(timeout=self._timeout, headers=self._headers, trust_env=False)


def _url_of(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url={url!r}; allowed: http://... or https://...")
    return url.rstrip("/")


def _form_of(route: str, as_log: str) -> _Form:
    if route not in _FORMS:
        raise ValueError(f"route={route!r}; allowed: {', '.join(_FORMS)}.")
    form = _FORMS[route]
    if as_log not in form.maps:
        allowed = ", ".join(form.maps)
        raise ValueError(f"as_log={as_log!r}; allowed with route={route!r}: {allowed}.")
    return form


def _positive(scale: float) -> float:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale!r}; allowed: a finite number above 0.")
    return scale


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
