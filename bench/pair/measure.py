"""Measure the pair without an engine: accuracies, and what exact speculative decoding gets.

    python bench/pair/measure.py                      # a table
    python bench/pair/measure.py --json numbers.json  # and the numbers in a file

The acceptance of exact speculative sampling needs no speculative decoder. Its output has the
distribution of the target p, and an output token x is the draft q's proposal with
probability min(1, q(x) / p(x)). So answers are sampled from p, both models score them
once, and the rounds that would have generated them are simulated.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from task import Problem, check, held_out, messages
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, logging
from transformers.modeling_utils import PreTrainedModel

HERE = Path(__file__).resolve().parent
Z95 = 1.96


class Interval(NamedTuple):
    """An estimate with its 95 % interval; ``n`` is the number of problems."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n})"


class Answer(NamedTuple):
    """A sampled answer: token ids of the question and of the answer, with EOS if it came."""

    prompt: list[int]
    tokens: list[int]
    right: bool


class Replay(NamedTuple):
    """Counters of exact speculative decoding of one answer."""

    accepted: int
    tested: int
    passes: int
    tokens: int


def share(hits: int, n: int) -> Interval:
    """Return a proportion with Wilson's interval."""
    mean, spread = hits / n, Z95**2 / n
    middle = (mean + spread / 2) / (1 + spread)
    half = math.sqrt(mean * (1 - mean) * spread + spread**2 / 4) / (1 + spread)
    return Interval(mean, middle - half, middle + half, n)


def ratio(tops: list[float], bottoms: list[float]) -> Interval:
    """Return a ratio of two sums over problems, with its linearized interval."""
    n, mean = len(tops), sum(tops) / sum(bottoms)
    residue = sum((top - mean * bottom) ** 2 for top, bottom in zip(tops, bottoms, strict=True))
    half = Z95 * math.sqrt(residue) / sum(bottoms)
    return Interval(mean, mean - half, mean + half, n)


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a checkpoint in float32 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _until_eos(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def _grade(
    prompt: list[int], tokens: list[int], item: Problem, tokenizer: PreTrainedTokenizerFast
) -> Answer:
    tokens = _until_eos(tokens, tokenizer.eos_token_id)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    right = tokens[-1] == tokenizer.eos_token_id and check(text, item)
    return Answer(prompt, tokens, right)


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    items: list[Problem],
    temperature: float,
    max_new_tokens: int = 160,
) -> list[Answer]:
    """Sample one answer to each of ``items`` in one batch."""
    chats = [messages(item) for item in items]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    output = model.generate(
        **padded,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
    )
    new = output[:, padded["input_ids"].shape[1] :].tolist()
    rows = zip(prompts, new, items, strict=True)
    return [_grade(prompt, tokens, item, tokenizer) for prompt, tokens, item in rows]


@torch.inference_mode()
def log_probs(
    model: PreTrainedModel, answers: list[Answer], temperature: float
) -> list[torch.Tensor]:
    """Return each answer's log-probabilities in nats ``[answer tokens, vocabulary]``."""
    rows = [torch.tensor(answer.prompt + answer.tokens) for answer in answers]
    logits = model(input_ids=pad_sequence(rows, batch_first=True), use_cache=False).logits
    spans = [(len(a.prompt) - 1, len(a.prompt) + len(a.tokens) - 1) for a in answers]
    cut = [logits[row, start:end] for row, (start, end) in enumerate(spans)]
    return [(scores.float() / temperature).log_softmax(-1) for scores in cut]


def replay(keep: list[float], draft_tokens: int, rng: torch.Generator) -> Replay:
    """Simulate the rounds of exact speculative decoding that generate an answer.

    ``keep[t]`` is the probability that token t, if verified, is the accepted draft token. A round
    verifies up to ``draft_tokens`` tokens and ends at the first rejected one; if all are accepted
    it adds one token of the target.
    """
    coins = torch.rand(len(keep), generator=rng).tolist()
    accepted = tested = passes = at = 0
    while at < len(keep):
        passes += 1
        column = 0
        while column < draft_tokens and at < len(keep):
            tested, at, column = tested + 1, at + 1, column + 1
            if coins[at - 1] >= keep[at - 1]:
                break
            accepted += 1
        else:
            at += 1
    return Replay(accepted, tested, passes, len(keep))


def replays(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    answers: list[Answer],
    temperature: float,
    draft_tokens: int,
) -> list[Replay]:
    """Simulate the rounds of each of the target's ``answers`` once."""
    rng = torch.Generator().manual_seed(0)
    rows = zip(
        answers,
        log_probs(target, answers, temperature),
        log_probs(draft, answers, temperature),
        strict=True,
    )
    found = []
    for answer, log_p, log_q in rows:
        chosen = torch.tensor(answer.tokens)[:, None]
        odds = (log_q - log_p).gather(1, chosen)[:, 0].exp().clamp(max=1)
        found.append(replay(odds.tolist(), draft_tokens, rng))
    return found


def measure(folder: Path, n: int, batch: int, temperature: float, k: int) -> dict[str, Interval]:
    """Measure the pair in ``folder`` on its first ``n`` held-out problems."""
    target, tokenizer = load(folder / "target")
    draft, _ = load(folder / "draft")
    torch.manual_seed(0)
    right = {"target": 0, "draft": 0}
    rounds: list[Replay] = []
    for start in tqdm(range(0, n, batch), desc="measuring", unit="batch"):
        items = [held_out(index) for index in range(start, min(start + batch, n))]
        answers = sample(target, tokenizer, items, temperature)
        right["target"] += sum(answer.right for answer in answers)
        drafted = sample(draft, tokenizer, items, temperature)
        right["draft"] += sum(answer.right for answer in drafted)
        rounds += replays(target, draft, answers, temperature, k)
    return {
        "target accuracy": share(right["target"], n),
        "draft accuracy": share(right["draft"], n),
        "token acceptance": ratio([r.accepted for r in rounds], [r.tested for r in rounds]),
        "tokens per target pass": ratio([r.tokens for r in rounds], [r.passes for r in rounds]),
        "answer tokens": ratio([r.tokens for r in rounds], [1] * n),
    }


def main() -> None:
    """Print the table and, if requested, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=HERE, help="folder of target and draft")
    parser.add_argument("-n", type=int, default=2000, help="held-out problems")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("-k", type=int, default=4, help="draft tokens a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    temperature, k = options.temperature, options.k
    numbers = measure(options.pair, options.n, options.batch, temperature, k)
    print(f"temperature {temperature}, {k} draft tokens a round, 95 % intervals")
    for name, value in numbers.items():
        print(f"{name:24}{value}")
    if options.json:
        entries = {name: value._asdict() for name, value in numbers.items()}
        settings = {"temperature": temperature, "draft_tokens": k}
        options.json.write_text(json.dumps({**settings, **entries}, indent=2) + "\n")


if __name__ == "__main__":
    main()
