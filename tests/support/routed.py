"""Requests of every route that generates text, with or without a preset, and what they answer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from http_server import Server
from tiny_models import smc_arguments

PAIR = Path(__file__).parents[2] / "bench" / "pair"

PRESETS = {
    "exact": {"mode": "exact"},
    "two": {"mode": "exact", "num_particles": 2},
    "all-particles": {"num_particles": 3, "return_particles": True},
    "traced": {"num_particles": 3, "trace": True},
}


def pair_arguments() -> dict[str, Any]:
    return smc_arguments(
        str(PAIR / "target"),
        str(PAIR / "draft"),
        num_particles=4,
        num_steps=4,
        max_total_tokens=60_000,
        context_length=2048,
        enable_metrics=True,
        presets=json.dumps(PRESETS),
        decode_log_interval=1,  # the accept length that benchmarks ask for is renewed as often
        tool_call_parser="pythonic",
        constrained_json_disable_any_whitespace=True,  # what the pair writes, where it may
    )


QUESTION = "Sam has 12 caps. He buys 5 bags of 7. How many caps does Sam have now?"
PROMPT = f"<|user|>{QUESTION}<|assistant|>"
MESSAGES = [{"role": "user", "content": QUESTION}]


def generate(model: str, preset: str | None, **more: Any) -> dict[str, Any]:
    return {"text": PROMPT, "lora_path": preset, "sampling_params": {"max_new_tokens": 24, **more}}


def chat(model: str, preset: str | None, **more: Any) -> dict[str, Any]:
    return {"model": _name(model, preset), "messages": MESSAGES, "max_tokens": 24, **more}


def completion(model: str, preset: str | None, **more: Any) -> dict[str, Any]:
    return {"model": _name(model, preset), "prompt": PROMPT, "max_tokens": 24, **more}


def response(model: str, preset: str | None, **more: Any) -> dict[str, Any]:
    return {"model": _name(model, preset), "input": QUESTION, "max_output_tokens": 24, **more}


def ollama_chat(model: str, preset: str | None, **more: Any) -> dict[str, Any]:
    asked = {"model": _name(model, preset), "messages": MESSAGES, "stream": False}
    return asked | {"options": {"num_predict": 24, **more}}


def ollama_generate(model: str, preset: str | None, **more: Any) -> dict[str, Any]:
    asked = {"model": _name(model, preset), "prompt": PROMPT, "stream": False}
    return asked | {"options": {"num_predict": 24, **more}}


def _name(model: str, preset: str | None) -> str:
    return f"{model}:{preset}" if preset else model


ROUTES = {
    "/generate": generate,
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/responses": response,
    "/v1/messages": chat,
    "/api/chat": ollama_chat,
    "/api/generate": ollama_generate,
}
WITH_PRESETS = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages")
STREAMED = {
    "/generate": lambda part: part["text"],
    "/v1/chat/completions": lambda part: _delta(part, "delta", "content"),
    "/v1/completions": lambda part: _delta(part, "text"),
    "/v1/responses": lambda part: part["delta"] if part["type"].endswith("text.delta") else "",
    "/v1/messages": lambda part: part.get("delta", {}).get("text", ""),
}


def _delta(part: dict[str, Any], *keys: str) -> str:
    if not part["choices"]:
        return ""
    found: Any = part["choices"][0]
    for key in keys:
        found = found.get(key)
    return found or ""


def text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    if "content" in answer:
        return answer["content"][0]["text"]
    if "message" in answer:
        return answer["message"]["content"]
    return answer.get("response", answer.get("text"))


def counts_of(answer: dict[str, Any]) -> tuple[int, int]:
    """Prompt and completion tokens, in each route's own words."""
    if "eval_count" in answer:
        return answer["prompt_eval_count"], answer["eval_count"]
    usage = answer.get("usage") or answer["meta_info"]
    if "input_tokens" in usage:
        cached = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + cached, usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def parts_of(streamed: str) -> Iterator[dict[str, Any]]:
    """The objects of a stream, of events or of lines of JSON."""
    for line in streamed.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            yield json.loads(data)


def rounds_and_particles(server: Server) -> tuple[float, float]:
    lines = server.get("/metrics").text.splitlines()
    found = [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"sglang_spec_smc_{name}"))
        for name in ("rounds_total", "particles_total")
    ]
    return found[0], found[1]
