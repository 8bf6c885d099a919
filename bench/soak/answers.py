"""Record the endings of requests, and check each answer by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from soak.traffic import Request

LEFT = ("left", "abort")  # finish reasons of incomplete answers


@dataclass(frozen=True)
class Ending:
    """The end of one answer for its client; a request for n answers has n."""

    request: Request
    index: int  # of n
    reason: str  # SGLang's finish reason, or "left" without one
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of these tokens, if requested
    retractions: int = 0
    undisturbed: list[int] = field(default_factory=list)  # received before the first retraction
    problem: str = ""  # its fault, if any

    @property
    def name(self) -> str:
        """Return a unique name for reports."""
        return f"{self.request.rid}[{self.index}]"

    @property
    def seeded(self) -> list[int]:
        """Return the tokens that the seed determines: those before a first retraction, if any."""
        return self.undisturbed if self.retractions else self.output_ids

    @property
    def is_whole(self) -> bool:
        """Return whether all tokens that its seed determines are there."""
        return not self.retractions and self.reason not in LEFT

    @property
    def is_verifiable(self) -> bool:
        """Return whether there is something to compare with the same request alone."""
        return bool(self.seeded) and not self.problem


def failed(request: Request, problem: str) -> list[Ending]:
    """Return the ending of a request without a readable answer."""
    return [Ending(request, 0, "failed", problem=problem)]


def ending(request: Request, index: int, answer: dict[str, Any], *, left: bool = False) -> Ending:
    """Return the ending of a complete answer or, with ``left``, of a stream's last chunk."""
    info, ids = answer["meta_info"], answer["output_ids"]
    finish = info["finish_reason"] or {"type": "left" if left else "no finish reason"}
    return Ending(
        request,
        index,
        finish["type"],
        ids,
        [logprob for logprob, *_ in info.get("output_token_logprobs", [])],
        # An abort in the queue reports no retractions; with tokens it was retracted before.
        info.get("num_retractions", int(bool(ids))),
        problem=_complaint(request, answer, finish["type"]),
    )


def was_queued(answer: dict[str, Any]) -> bool:
    """Return whether it was aborted in the queue; SGLang then sends only a stream's last token."""
    return "num_retractions" not in answer["meta_info"]


def _complaint(request: Request, answer: dict[str, Any], reason: str) -> str:
    """Return the fault of an answer that needs no second request to find, or ""."""
    ids, params = answer["output_ids"], request.params
    allowed = {"stop", "length", "left"} | ({"abort"} if request.leaves == "abort" else set())
    least, most = params["min_new_tokens"], params["max_new_tokens"]
    if reason not in allowed:
        return f"ended with {answer['meta_info']['finish_reason']}"
    if len(ids) > most or (reason == "length" and len(ids) != most):
        return f"has {len(ids)} tokens of {most} and ended with {reason}"
    if reason == "stop" and len(ids) < least:
        return f"has {len(ids)} tokens, and at least {least} were asked for"
    if request.grammar and reason == "stop" and not request.grammar.is_legal(answer["text"]):
        return f"has the illegal text {answer['text']!r}"
    return "" if was_queued(answer) else _bad_logprobs(request, answer)


def _bad_logprobs(request: Request, answer: dict[str, Any]) -> str:
    """Return the fault of log-probabilities: each token has its own, and a row of each kind."""
    ids, info, options = answer["output_ids"], answer["meta_info"], request.options
    if not options.get("return_logprob"):
        return ""
    of_tokens = [token for _, token, _ in info["output_token_logprobs"]]
    if of_tokens != ids:
        return f"has log-probabilities of {of_tokens} and is {ids}"
    most, listed = options.get("top_logprobs_num", 0), options.get("token_ids_logprob", [])
    rows = (("output_top_logprobs", most), ("output_token_ids_logprobs", len(listed)))
    for name, width in rows:
        found = [len(row) for row in info[name]] if width else []
        if width and found != [width] * len(ids):
            return f"has {found} {name} beside {len(ids)} tokens, {width} of each asked for"
    return ""
