"""Chat with a real language model in a terminal: ``sglang-smc demo --real``.

SmolLM2-135M-Instruct comes from the package index. N-gram matches draft for it where its text
repeats; elsewhere it decodes plainly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from sglang_smc.kv.arena import max_arena
from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.commands import client_of
from sglang_smc_tools.demo.serving import Launch, ServerError, describe_log, running, streamed
from sglang_smc_tools.real.models import CACHE, check_room, install, is_current, told

MODEL = "smollm2"
NUM_PARTICLES, NUM_STEPS = 4, 4
TEMPERATURE = 0.2  # as its makers advise
#: Tokens of a chat, and of an answer; older turns are left out.
TEXT_TOKENS, MAX_TOKENS = 2048, 300


def chat(logs: Path) -> None:
    """Fetch the model where it is not there, start a server, and answer questions from stdin.

    Args:
        logs: the folder of the server's log.

    Raises ScriptError if there is no index, no room or no server; each says what to do.
    """
    if not is_current(CACHE / MODEL, MODEL):
        print(told(MODEL))
        check_room([MODEL], CACHE)
    target = install(MODEL, CACHE)
    arena = max_arena(SMCConfig(num_particles=NUM_PARTICLES, num_steps=NUM_STEPS))
    arguments = {
        "model_path": str(target),
        "max_running_requests": 1,
        "max_total_tokens": TEXT_TOKENS + 2 * arena,
        "sleep_on_idle": True,
        "speculative_algorithm": "SMC",
        "speculative_smc_num_particles": NUM_PARTICLES,
        "speculative_num_steps": NUM_STEPS,
        "speculative_smc_mode": "exact",
        "speculative_smc_ngram_matches": True,
        "speculative_smc_adaptive": True,
    }
    launch = Launch(arguments, label="SmolLM2-135M-Instruct", log=logs / "server.log")
    with running(launch) as (url,):
        try:
            _talk(url, target)
        except httpx.HTTPError as error:
            raise ServerError(f"{error}\n{describe_log(launch.log)}") from error


def _talk(url: str, target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    messages: list[dict[str, str]] = []
    client = client_of(url, None, None)
    for question in questions():
        messages.append({"role": "user", "content": question})
        ids = read(messages, tokenizer)
        sampling = {"temperature": TEMPERATURE, "max_new_tokens": MAX_TOKENS}
        began, text, info = time.perf_counter(), "", {}
        body = {"input_ids": ids, "sampling_params": sampling}
        for answer in streamed(client, body):
            print(answer["text"][len(text) :], end="", flush=True)
            text, info = answer["text"], answer["meta_info"]
        print(f"\n{summary(info, time.perf_counter() - began)}\n")
        messages.append({"role": "assistant", "content": text})


def questions() -> Iterator[str]:
    """Yield lines of stdin up to an empty one."""
    print("\nAsk in English; an empty line ends.")
    with contextlib.suppress(EOFError):
        yield from iter(lambda: input("> ").strip(), "")


def read(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    """Return the tokens of a chat; the oldest turns are dropped until an answer has room."""
    while True:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= TEXT_TOKENS - MAX_TOKENS or len(messages) == 1:
            return ids[: TEXT_TOKENS - MAX_TOKENS]
        del messages[:2]


def summary(info: dict[str, Any], seconds: float) -> str:
    """Return what an answer took, by its ``meta_info``."""
    tokens, passes = info["completion_tokens"], max(1, info["spec_verify_ct"])
    return (
        f"({tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} a second, "
        f"{(tokens - 1) / passes:.2f} a target pass)"
    )
