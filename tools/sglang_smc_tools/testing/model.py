"""Generate and score texts by a model: in a running server, or in servers of their own."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sglang_smc_tools.commands import told_by
from sglang_smc_tools.testing.client import Client
from sglang_smc_tools.testing.statistics import Text, Token, Top

CHUNK = 128  # requests sent at a time
#: Nats by which a pass of another shape moves a log-probability: in 16 bits what a unit in the last
#: place is, of logits from 16 to 32.
_ROUNDING = {"float32": 1e-3, "float16": 2.0**-6}
COARSEST = 2.0**-3  # of bfloat16
#: Flags for short texts with many particles; they differ from a server's.
_SETTINGS: dict[str, Any] = {
    "context_length": 1024,
    "max_total_tokens": 131_072,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "watchdog_timeout": 600,
    "log_level": "error",
    "max_running_requests": 64,
}
#: The model's plain distribution, independent of the server's sampling defaults.
PLAIN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


class CheckedAnswer(NamedTuple):
    """A generated text and its ``meta_info``, with SMC's fields."""

    text: Text
    meta: dict[str, Any]

    @property
    def log_evidence(self) -> float:
        return float(self.meta["spec_smc_log_evidence"])


class Position(NamedTuple):
    """A scored token of a text, and the distribution at its position."""

    token: Token
    logprob: float
    top: Top  # log-probabilities of the likeliest tokens, most likely first


@dataclass
class Model:
    """The interface of a server or an engine for the checks; tests substitute toy models."""

    client: Client
    settings: dict[str, Any]  # SMC's of the server, `num_particles` ...; empty for a plain model
    same_models: bool = False  # whether the target and the draft are one model
    rounding: float = 1e-3  # between log-probabilities of one text, in nats per token
    on_answers: Callable[[int], Any] = lambda count: None
    lora: str | None = None  # the adapter that answers and scores
    seeds: Iterator[int] = field(default_factory=itertools.count)  # of the following answers

    def answers(
        self, prompts: Sequence[Text], length: int, smc: dict[str, Any], **params: Any
    ) -> list[CheckedAnswer]:
        """Generate an answer of at most ``length`` tokens to each prompt, each with its seed."""
        fields = {"custom_params": {"smc": {"power": 1.0, **smc}}, "max_new_tokens": length}
        common = {**PLAIN, **params, **fields}
        found: list[CheckedAnswer] = []
        for chunk in _chunks(prompts):
            sampling = [{**common, "sampling_seed": next(self.seeds)} for _ in chunk]
            replies = self._ask({"input_ids": chunk, "sampling_params": sampling})
            found += [
                CheckedAnswer(tuple(reply["output_ids"]), reply["meta_info"]) for reply in replies
            ]
        return found

    def score(self, prompts: Sequence[Text], texts: Sequence[Text]) -> list[list[Position]]:
        """Return the model's distribution at each token of texts behind prompts, by one prefill."""
        both = [(*prompt, *text) for prompt, text in zip(prompts, texts, strict=True)]
        replies = self._scored(both, [len(prompt) - 1 for prompt in prompts])
        return [_positions(text, meta) for text, meta in zip(texts, replies, strict=True)]

    def following(self, texts: Sequence[Text]) -> list[dict[int, float]]:
        """Return the likeliest next tokens with their log-probabilities, most likely first."""
        followed = [(*text, 0) for text in texts]  # by any token: scoring draws none
        replies = self._scored(followed, [len(text) - 1 for text in texts])
        return [_top(meta["input_top_logprobs"][1]) for meta in replies]

    def token_ids(self, text: str) -> Text:
        """Return the token ids of a prompt."""
        body = _scoring({"text": [text], "logprob_start_len": 0, "top_logprobs_num": 0})
        meta = self._ask(body)[0]["meta_info"]
        return tuple(token for _, token, _ in meta["input_token_logprobs"])

    def _scored(self, texts: Sequence[Text], starts: Sequence[int]) -> Iterator[dict[str, Any]]:
        for chunk in _chunks(list(zip(texts, starts, strict=True))):
            ids, places = zip(*chunk, strict=True)
            body = {"input_ids": ids, "logprob_start_len": places}
            replies = self.client.with_top(partial(self._scored_with, body))
            yield from (reply["meta_info"] for reply in replies)

    def _scored_with(self, body: dict[str, Any], top: int) -> list[dict[str, Any]]:
        return self._ask(_scoring({**body, "top_logprobs_num": top}))

    def _ask(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        replies = self.client.post("/generate", {"lora_path": self.lora, **body})
        self.on_answers(len(replies))
        return replies


def _scoring(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}


def _positions(text: Text, meta: dict[str, Any]) -> list[Position]:
    """Return the positions of a text, without the first entry, the token before the text.

    SGLang scores the last token of a vocabulary as token 0
    (srt/managers/scheduler_components/logprob_result_processor.py:54), so the token is taken from
    the text, and its log-probability from the top tokens if they contain it.
    """
    entries = zip(
        text, meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True
    )
    found = []
    for token, (logprob, told, _), likeliest in entries:
        top = _top(likeliest)
        found.append(Position(token, top.get(token, logprob if told == token else -math.inf), top))
    return found


def _top(entries: list[list[Any]]) -> dict[int, float]:
    return {token: logprob for logprob, token, _ in entries}


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))


# --- Servers


class SMCPair(NamedTuple):
    """The checked SMC model, and optionally the draft model alone, which extends two checks."""

    smc: Model
    draft: Model | None = None


def connect(url: str, *, api_key: str | None = None, needs_smc: bool = True) -> Model:
    """Return the model of a running server.

    Args:
        needs_smc: False for a server of the draft, which may be any SGLang server.

    Raises ValueError if there is no server, or it does not run SMC.
    """
    info = told_by(url, "/server_info", "internal_states", api_key)
    algorithm = info["speculative_algorithm"]
    if needs_smc and algorithm != "SMC":
        raise ValueError(
            f"--url {url}: this server runs --speculative-algorithm {algorithm}; needed: SMC. "
            "Start it with --speculative-algorithm SMC --speculative-draft-model-path DRAFT."
        )
    state = info["internal_states"][0]
    return Model(
        Client(url, api_key),
        state["smc"]["settings"] if algorithm == "SMC" else {},
        same_models=info["model_path"] == info["speculative_draft_model_path"],
        rounding=_ROUNDING.get(state.get("dtype", ""), COARSEST),
    )


@contextlib.contextmanager
def started(target: str, draft: str, **arguments: Any) -> Iterator[SMCPair]:
    """Start two servers for the ``with`` block: SMC with the pair, and with the draft for both.

    The second has equal models, and returns the draft's own distribution.

    Args:
        arguments: of the servers, by `sglang.Engine`'s keywords, such as ``device`` and ``dtype``.

    Raises ValueError if a folder has no model, or a server does not start.
    """
    settings = _SETTINGS | arguments
    settings |= {"speculative_algorithm": "SMC", "speculative_draft_model_path": draft}
    for flag, path in (("--target", target), ("--draft", draft)):
        check_folder(flag, path)
    with launched(target, draft, **settings) as urls:
        yield SMCPair(*map(connect, urls))


@contextlib.contextmanager
def launched(*models: str, **arguments: Any) -> Iterator[list[str]]:
    """Start a server of each model for the ``with`` block; yield their addresses.

    Raises ValueError if a server does not start.
    """
    from sglang_smc_tools.demo.serving import Launch, ServerError, running

    with tempfile.TemporaryDirectory(prefix="smc-check-") as logs:
        launches = [
            Launch(
                {**arguments, "model_path": model},
                label=f"--target {model}",
                log=Path(logs) / f"{index}.log",
            )
            for index, model in enumerate(models)
        ]
        try:
            with running(*launches) as urls:
                yield urls
        except ServerError as error:
            raise ValueError(str(error)) from error


def check_folder(flag: str, path: str) -> None:
    """Raise ValueError for a local folder without a model; other names may be on the Hub."""
    looks_local = path.startswith((".", "/", "~")) or Path(path).is_dir()
    if looks_local and not (Path(path).expanduser() / "config.json").is_file():
        raise ValueError(
            f"{flag} {path}: no config.json there. Give the folder of a Hugging Face "
            "checkpoint, or its name on the hub."
        )
