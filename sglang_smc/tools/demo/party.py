"""Start servers of the shipped pair with a client each, and show answers as they stream."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from openai import OpenAI, OpenAIError

from sglang_smc.kv.arena import max_arena
from sglang_smc.options.server import SMCConfig
from sglang_smc.pair.task import held_out
from sglang_smc.tools.demo.chat import Answer, Sampling, ask, connect
from sglang_smc.tools.demo.serving import (
    Launch,
    Server,
    ServerError,
    describe_log,
    running,
    wait_for_records,
)

#: The model pair that is shipped with the package, trained on `pair.task`.
PAIR = Path(str(files("sglang_smc"))) / "pair"
#: Problems shown lie beyond all measured ones, here and in published tables.
FIRST_SHOWN = 1_000_000
#: Bound on the tokens of a problem and its answer.
TEXT_TOKENS = 1024

BOLD, GREEN, RED = "1", "32", "31"


@dataclass(frozen=True)
class Party:
    """A running server and its client."""

    launch: Launch
    server: Server
    client: OpenAI

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Convert errors of the ``with`` block to ServerError, with the end of the server's log."""
        try:
            yield
        except (OpenAIError, httpx.HTTPError, ServerError) as error:
            told = describe_log(self.launch.log)
            raise ServerError(f"{self.launch.label}: {error}\n{told}") from error

    def infos(self, answers: Iterable[Answer]) -> dict[str, dict[str, Any]]:
        """Return the server's ``meta_info`` of these answers, by request id."""
        with self.blamed():
            return wait_for_records(self.server, [answer.request_id for answer in answers])


class Common(NamedTuple):
    """Settings that all servers of a demo share, since they run side by side."""

    logs: Path
    concurrency: int
    seed: int
    num_particles: int
    num_steps: int

    def launch(self, label: str, name: str, model: Path, flags: Sequence[str] = ()) -> Launch:
        """Return a server to start, with these flags last on its command line."""
        config = SMCConfig(num_particles=self.num_particles, num_steps=self.num_steps)
        slots = self.concurrency * (TEXT_TOKENS + 2 * max_arena(config))
        own = ("--max-total-tokens", str(slots), "--sleep-on-idle", *flags)
        log = self.logs / f"server-{name}.log"
        return Launch(label, model, log, self.concurrency, self.seed, own)


@contextlib.contextmanager
def parties(started: Mapping[str, Launch]) -> Iterator[dict[str, Party]]:
    """Start these servers together for the ``with`` block; yield each with a client."""
    with running(*started.values()) as servers:
        yield {
            name: Party(launch, server, connect(server.url))
            for (name, launch), server in zip(started.items(), servers, strict=True)
        }


def check_pair(folder: Path) -> None:
    """Raise ServerError if a checkpoint is missing: SGLang would download it from the Hub."""
    for model in (folder / "target", folder / "draft"):
        if not list(model.glob("*.safetensors")):
            raise ServerError(f"{model} holds no checkpoint; see bench/pair/ for how to train one.")


def show_question(index: int) -> None:
    print(f"\n{painted(held_out(index).question, BOLD)}", flush=True)


def show_answer(party: Party, index: int, sampling: Sampling) -> Answer:
    """Print the answer as it streams, and whether it is right."""
    with party.blamed():
        answer = ask(party.client, index, sampling, lambda text: print(text, end="", flush=True))
    verdict = painted("right", GREEN) if answer.right else painted("wrong", RED)
    print(
        f"\n-> {verdict} (the answer is {held_out(index).number}); first token after "
        f"{1000 * answer.seconds_to_first:.0f} ms, all after {answer.seconds:.2f} s"
    )
    return answer


def show(party: Party, count: int, sampling: Sampling, began: float) -> None:
    """Print questions and answers, and the time from ``began`` to the first token, in seconds."""
    for index in range(FIRST_SHOWN, FIRST_SHOWN + count):
        show_question(index)
        asked = time.monotonic()
        answer = show_answer(party, index, sampling)
        if index == FIRST_SHOWN:
            print(f"It came {asked + answer.seconds_to_first - began:.0f} s after the demo began.")
    print()


def painted(text: str, code: str) -> str:
    """Return the text in a colour, or plain if stdout is no terminal or NO_COLOR is set."""
    is_plain = "NO_COLOR" in os.environ or not sys.stdout.isatty()
    return text if is_plain else f"\033[{code}m{text}\033[0m"
