"""Chat with a real language model in a terminal: ``sglang-smc demo --real``.

SmolLM2-135M-Instruct comes from the package index. N-gram matches draft for it where its text
repeats what it has read; elsewhere it decodes plainly. The demo asks first, for a list to be
copied.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from sglang_smc.kv.arena import max_arena
from sglang_smc.options.server import SMCConfig
from sglang_smc_tools.commands import client_of
from sglang_smc_tools.demo.serving import Launch, ServerError, describe_log, running, streamed
from sglang_smc_tools.real.models import CACHE, check_room, install, is_current, told

MODEL = "smollm2"
NUM_PARTICLES = 4
NUM_STEPS = 4
TEMPERATURE = 0.2  # as its makers advise
#: What it answers rightly, by matches: a model of this size copies, but does not edit.
FIRST = """\
Repeat this list exactly:
1. Wash the red apples
2. Cut the bread
3. Boil four eggs
4. Set the table
5. Call the children"""
EXPECT = """\
What to expect: so small a model copies, and chats in simple sentences; many of its facts are wrong.
Where its text repeats what it has read, as above, matches make several tokens a target pass; new
text has about 1, as in plain decoding. For text of all kinds a draft model or a head makes more."""
#: Tokens of a chat, and of an answer; older turns are left out.
TEXT_TOKENS = 2048
MAX_TOKENS = 300


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
    }
    launch = Launch(arguments, label="SmolLM2-135M-Instruct", log=logs / "server.log")
    with running(launch) as (url,):
        try:
            _talk(url, target)
        except httpx.HTTPError as error:
            raise ServerError(f"{error}\n{describe_log(launch.log)}") from error


def _talk(url: str, target: Path) -> None:
    from transformers import AutoTokenizer

    answer = partial(_answer, client_of(url, None, None), AutoTokenizer.from_pretrained(target))
    print(f"\n> {FIRST}\n")
    answer([], FIRST)
    print(f"{EXPECT}\n\nAsk in English; an empty line ends.")
    messages: list[dict[str, str]] = []  # without the list, which it would go on copying
    with contextlib.suppress(EOFError):
        for question in iter(lambda: input("> ").strip(), ""):
            answer(messages, question)


def _answer(
    client: httpx.Client, tokenizer: Any, messages: list[dict[str, str]], question: str
) -> None:
    """Stream the answer to a chat's next question, print what it took, and add both to the chat."""
    messages.append({"role": "user", "content": question})
    ids = read(messages, tokenizer)
    sampling = {"temperature": TEMPERATURE, "max_new_tokens": MAX_TOKENS}
    began = time.perf_counter()
    text = ""
    info = {}
    for answer in streamed(client, {"input_ids": ids, "sampling_params": sampling}):
        print(answer["text"][len(text) :], end="", flush=True)
        text = answer["text"]
        info = answer["meta_info"]
    print(f"\n{summary(info, time.perf_counter() - began)}\n")
    messages.append({"role": "assistant", "content": text})


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
    tokens = info["completion_tokens"]
    passes = max(1, info["spec_verify_ct"])
    return (
        f"({tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} a second, "
        f"{(tokens - 1) / passes:.2f} a target pass)"
    )
