"""Check where answers end, by themselves: each is a part of a longer answer at temperature 0."""

from __future__ import annotations

import re

from conformance.checks.registry import check
from conformance.server import AbsentError, CheckedServer, WrongError

GROUP = "ends"
LENGTH = 40
#: Lengths that fall on each column of a round of eight drafts, and behind it.
LENGTHS = range(1, 11)
LONGEST = 240
LONGEST_TOKEN = 8  # characters
PATTERNS = (r"[aeiou]\w", r"[a-z]+ [a-z]+ ", r"\w \w+ \w+ \w+ ")


def _whole(server: CheckedServer) -> str:
    return server.complete(server.prompts[1], LENGTH, ignore_eos=True).text


def _cut(server: CheckedServer, expected: str, what: str, **params: object) -> None:
    """Check the text of an answer that ends early, whole and streamed."""
    params = {"ignore_eos": True, **params}
    found = server.complete(server.prompts[1], LENGTH, **params).text
    if found != expected:
        raise WrongError(f"{what}: {found!r} in place of {expected!r}")
    body = server.body(server.prompts[1], LENGTH, temperature=0.0, **params)
    chunks = server.client.stream("/v1/completions", body)
    streamed = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    if streamed != expected:
        raise WrongError(f"{what}, streamed: {streamed!r} in place of {expected!r}")


def _pieces(text: str) -> list[str]:
    """Return parts of a text to stop at, of which each stands there at several depths."""
    starts = range(4, max(5, len(text) - 12), max(1, len(text) // 6))
    return [text[start : start + 3] for start in starts]


@check("stop strings", GROUP)
def stop_strings(server: CheckedServer) -> str:
    """Check that a text ends before the first occurrence, wherever in a token it begins."""
    text = _whole(server)
    stops = _pieces(text)
    for stop in stops:
        _cut(server, text[: text.index(stop)], f"stop {stop!r}", stop=stop)
    return f"{len(stops)} strings"


@check("several stop strings in one round", GROUP)
def several_stops(server: CheckedServer) -> str:
    """Check that the earliest wins, though a later one is listed first."""
    text = _whole(server)
    pairs = [(text[at : at + 3], text[at + 9 : at + 12]) for at in (6, 15, 24)]
    for first, second in pairs:
        expected = text[: min(text.index(first), text.index(second))]
        _cut(server, expected, f"stops {second!r}, {first!r}", stop=[second, first])
    return f"{len(pairs)} pairs"


@check("stop token ids", GROUP)
def stop_token_ids(server: CheckedServer) -> str:
    """Check that an answer ends with the token's first occurrence."""
    tokens = server.complete(server.prompts[1], LENGTH, ignore_eos=True).tokens
    if not tokens:
        raise AbsentError("token ids")
    places = [place for place in LENGTHS if tokens.index(tokens[place]) == place]
    for place in places:
        asked = {"stop_token_ids": [tokens[place]], "ignore_eos": False}
        found = server.complete(server.prompts[1], LENGTH, **asked)
        if found.num_tokens != place + 1 or found.finish != "stop":
            raise WrongError(f"{found.num_tokens} tokens in place of {place + 1}, {found.finish}")
    return f"{len(places)} columns"


@check("stop patterns", GROUP)
def stop_regex(server: CheckedServer) -> str:
    """Check that a text ends with the token that completes a match of `stop_regex`."""
    text = _whole(server)
    for pattern in PATTERNS:
        match = re.search(pattern, text)
        if match is None:
            raise WrongError(f"no match of {pattern} in {text!r}")
        found = server.complete(server.prompts[1], LENGTH, ignore_eos=True, stop_regex=pattern).text
        is_part = text.startswith(found) and len(found) <= match.end() + LONGEST_TOKEN
        if not is_part or len(found) < match.start():
            raise WrongError(f"{found!r} of {text!r}")
    return f"{len(PATTERNS)} patterns"


@check("longest length", GROUP)
def max_tokens(server: CheckedServer) -> str:
    """Check that `max_tokens` is met exactly in each column of a round."""
    whole = server.complete(server.prompts[1], LENGTH, ignore_eos=True)
    for length in LENGTHS:
        found = server.complete(server.prompts[1], length, ignore_eos=True)
        if found.num_tokens != length or found.finish != "length":
            raise WrongError(f"{found.num_tokens} tokens for max_tokens {length}, {found.finish}")
        if not whole.text.startswith(found.text.rstrip("\ufffd")):
            raise WrongError(f"max_tokens {length} gives another text: {found.text!r}")
    return f"{len(LENGTHS)} lengths"


def _ended(server: CheckedServer) -> int:
    """Return how many tokens an answer has that ends by itself."""
    whole = server.complete(server.prompts[0], LONGEST)
    if whole.finish != "stop":
        raise AbsentError(f"an answer that ends within {LONGEST} tokens")
    return whole.num_tokens


@check("shortest length", GROUP)
def min_tokens(server: CheckedServer) -> str:
    """Check that `min_tokens` keeps an answer from ending, in each column of a round."""
    end = _ended(server)
    for more in LENGTHS:
        found = server.complete(server.prompts[0], end + more, min_tokens=end + more)
        if found.num_tokens < end + more:
            raise WrongError(f"{found.num_tokens} tokens for min_tokens {end + more}")
    return f"{len(LENGTHS)} lengths"


@check("ignored end", GROUP)
def ignore_eos(server: CheckedServer) -> str:
    """Check that `ignore_eos` goes on behind the model's own end."""
    end = _ended(server)
    found = server.complete(server.prompts[0], end + 9, ignore_eos=True)
    if found.num_tokens != end + 9 or found.finish != "length":
        raise WrongError(f"{found.num_tokens} tokens in place of {end + 9}, {found.finish}")
    return f"{end + 9} tokens"
