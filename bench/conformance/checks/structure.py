"""Check grammars, tool calls, and where thinking ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from conformance.checks.registry import check
from conformance.scripted import ARGUMENTS, REASONING, THOUGHT_BEGINS, THOUGHT_ENDS, TOOL
from conformance.server import CHAT, AbsentError, CheckedServer, WrongError

GROUP = "structure"
SAMPLES = 12
LENGTH = 120
THINKING = "thinking"
STRICT = "strict thinking"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2,4}-\d{2}x?"
EBNF = 'root ::= ("yes" | "no") (" " [x-z])? "!"'
TAG = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "regex", "pattern": REGEX},
    "end": "</call>",
}


def is_person(text: str) -> bool:
    """Return whether a text is JSON of `PERSON`."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    ages = range(10)
    return (
        found.keys() == {"name", "age"} and found["name"] in ("ann", "bob") and found["age"] in ages
    )


def _all_match(server: CheckedServer, is_legal: Callable[[str], bool], **params: Any) -> str:
    """Check samples at temperature 1, of which an unfinished one is no answer."""

    def ask(seed: int) -> str:
        found = server.complete(server.prompts[1], LENGTH, temperature=1.0, seed=seed, **params)
        return found.text if found.finish == "stop" else f"(unfinished) {found.text}"

    texts = server.at_once(ask, range(1, SAMPLES + 1))
    bad = [text for text in texts if not is_legal(text)]
    if bad:
        raise WrongError(f"{len(bad)} of {SAMPLES} texts are not legal: {bad[0]!r:.120}")
    return f"{SAMPLES} texts, {len(set(texts))} distinct"


def _schema_format() -> dict[str, Any]:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


@check("JSON schema", GROUP)
def json_schema(server: CheckedServer) -> str:
    return _all_match(server, is_person, response_format=_schema_format())


@check("regular expressions", GROUP)
def regex(server: CheckedServer) -> str:
    return _all_match(server, lambda text: bool(re.fullmatch(REGEX, text)), regex=REGEX)


@check("EBNF grammars", GROUP)
def ebnf(server: CheckedServer) -> str:
    def is_legal(text: str) -> bool:
        return bool(re.fullmatch("(yes|no)( [x-z])?!", text))

    return _all_match(server, is_legal, ebnf=EBNF)


@check("structural tags", GROUP)
def structural_tags(server: CheckedServer) -> str:
    def is_legal(text: str) -> bool:
        inner = re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)
        return inner is not None and bool(re.fullmatch(REGEX, inner[1]))

    asked = {"type": "structural_tag", "format": TAG}
    return _all_match(server, is_legal, response_format=asked)


# --- Chats of a model that thinks, and then calls a tool


def _chat(server: CheckedServer, **params: Any) -> dict[str, Any]:
    custom = {**server.own, **params.pop("custom_params", {})}
    body: dict[str, Any] = {"model": server.endpoint.model, "temperature": 0.0, "max_tokens": 120}
    if custom:
        body["custom_params"] = custom
    message = {"role": "user", "content": "about the weather"}
    return {**body, "messages": [message], **params}


def _message(server: CheckedServer, **params: Any) -> dict[str, Any]:
    return server.client.post(CHAT, _chat(server, **params))["choices"][0]["message"]


@check("tool calls, streamed", GROUP, THINKING)
def streamed_calls(server: CheckedServer) -> str:
    """Check that pieces of a stream join to the whole answer's reasoning and calls."""
    calls: dict[int, list[str]] = {}
    reasoning = ""
    for chunk in server.client.stream(CHAT, _chat(server, tools=[TOOL])):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                written = calls.setdefault(call["index"], ["", ""])
                written[0] += call["function"].get("name") or ""
                written[1] += call["function"].get("arguments") or ""
    found = [(name, json.loads(arguments or "null")) for name, arguments in calls.values()]
    if found != [("forecast", ARGUMENTS)] or reasoning.split() != REASONING:
        raise WrongError(f"calls {found}, reasoning {reasoning!r:.80}")
    return "1 call"


@check("grammar from where thinking ends", GROUP, THINKING)
def grammar_behind_thinking(server: CheckedServer) -> str:
    """Check that a thought is free, and what stands behind it is of the schema."""
    found = _message(server, response_format=_schema_format())
    thought = (found.get("reasoning_content") or "").split()
    if thought != REASONING or not is_person(found.get("content") or ""):
        raise WrongError(f"thought {thought}, content {found.get('content')!r:.100}")
    return "1 answer"


@check("thinking budgets by a processor", GROUP, THINKING)
def budget_processor(server: CheckedServer) -> str:
    """Check that SGLang's processor ends a thought behind so many tokens."""
    for budget in (1, 2, 3):
        count = _count_thought(server, budget)
        if count > budget + 1:  # and the new line that the processor writes
            raise WrongError(f"{count} thought tokens for a budget of {budget}")
    return "3 budgets"


def _count_thought(server: CheckedServer, budget: int) -> int:
    """Return how many tokens a thought has, without its marks."""
    from conformance.scripted import processor

    if server.model is None:
        raise AbsentError("SGLang's custom logit processors")
    asked = {"custom_logit_processor": processor(), "custom_params": {"thinking_budget": budget}}
    body = _chat(server, **asked, return_meta_info=True, separate_reasoning=False, logprobs=True)
    told = server.client.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    words = [one["token"].strip() for one in told]
    if THOUGHT_ENDS not in words:
        raise WrongError(f"the thought does not end: {words[:12]}")
    return words.index(THOUGHT_ENDS) - 1  # less its opening


@check("max_thinking_tokens", GROUP, STRICT)
def max_thinking_tokens(server: CheckedServer) -> str:
    """Check that a thought has no more tokens than the request allows."""
    prompt = {"text": "about the weather <start>", "max_thinking_tokens": 3}
    told = server.generate({**prompt, "require_reasoning": True}, max_new_tokens=60)
    thought, ended, _ = told["text"].partition(THOUGHT_ENDS)
    if not ended:
        raise WrongError(f"the thought does not end: {told['text']!r:.120}")
    count = len(thought.replace(THOUGHT_BEGINS, "").split())
    if count > 3:
        raise WrongError(f"{count} thought tokens in place of 3: {told['text']!r:.120}")
    return "1 budget"
