"""Train the shipped reward model on a CPU: are all steps of an answer right so far?

    python bench/pair/reward.py                 # half an hour on one core that others use, too
    python bench/pair/reward.py --steps 20 --samples 64 --held-out 20 --out try

A second course continues from the first one's checkpoint, with other samples and lower rates.

It begins as the target's first layers and is trained on the draft's samples at temperature 1, on
right answers and on synthetic mistakes. It is written to reward/ next to this file, its training
record and accuracy to provenance.json.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import load, sample
from reward_texts import TEMPLATE, WHOLE_TEMPLATE, Judged, judged, wrong_answer
from task import HELD_OUT_START, Style, problem
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from train import HERE, PROVENANCE, circumstances, note, optimizers, rate, with_environment
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

NAME = "reward"
FIRST_SEED = 301_000_000
SEEDS_OF_COURSE = 10_000_000
#: Held-out problems behind those of the benchmarks.
HELD_OUT_SEED = HELD_OUT_START + 500_000


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the reward model's training."""

    num_hidden_layers: int = 4
    intermediate_size: int = 160
    course: int = 1
    steps: int = 1500
    batch: int = 32
    samples: int = 8000
    muon_lr: float = 0.004
    adam_lr: float = 0.002
    of_language: float = 0.3
    """Weight of the language-model loss, which preserves the learned arithmetic."""
    at_ends: float = 4.0
    """Weight of line ends, where the model is evaluated, relative to other tokens."""
    seed: int = 3
    warmup: int = 50


COURSES = (
    Recipe(),
    Recipe(course=2, steps=500, samples=4000, muon_lr=0.002, adam_lr=0.001, seed=4),
)


class Example(NamedTuple):
    """A text's token ids; for each token its label (all right so far) and its loss weight."""

    ids: list[int]
    is_right: list[float]
    weight: list[float]


class Batch(NamedTuple):
    """Examples, padded on the right ``[rows, length]``."""

    ids: torch.Tensor
    is_right: torch.Tensor
    weight: torch.Tensor  # 0 outside the loss


def beginning_of(target: Any, recipe: Recipe) -> LlamaForSequenceClassification:
    """Return a model of the target's first layers, with narrower MLPs and one label."""
    known = {**target.config.to_dict(), "intermediate_size": recipe.intermediate_size}
    known |= {"num_hidden_layers": recipe.num_hidden_layers, "num_labels": 1}
    for name in ("architectures", "layer_types", "dtype"):
        known.pop(name, None)
    model = LlamaForSequenceClassification(LlamaConfig(**known))
    torch.nn.init.zeros_(model.score.weight)
    weights = dict(target.model.state_dict())
    for layer in range(recipe.num_hidden_layers):
        keep_largest(weights, f"layers.{layer}.mlp.", recipe.intermediate_size)
    wanted = model.model.state_dict().keys()
    model.model.load_state_dict({name: weights[name] for name in wanted})
    return model


def keep_largest(weights: dict[str, torch.Tensor], prefix: str, count: int) -> None:
    """Cut an MLP down to the units with the largest weights, in place."""
    gate, up, down = (f"{prefix}{part}_proj.weight" for part in ("gate", "up", "down"))
    size = weights[gate].norm(dim=1) * weights[up].norm(dim=1) * weights[down].norm(dim=0)
    kept = size.topk(count).indices.sort().values
    weights[gate], weights[up] = weights[gate][kept], weights[up][kept]
    weights[down] = weights[down][:, kept]


def example(one: Judged, tokenizer: PreTrainedTokenizerFast, at_ends: float) -> Example:
    """Return the model's input for a labelled answer, with a label for each of its tokens."""
    front = TEMPLATE.format(prompt=one.question, output="")
    text = WHOLE_TEMPLATE.format(prompt=one.question, output=one.answer)
    coded = tokenizer(text, return_offsets_mapping=True)
    ids, is_right, weight = coded["input_ids"], [], []
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    for token, (_, end) in zip(ids, coded["offset_mapping"], strict=True):
        is_eos = token == tokenizer.eos_token_id
        right = one.is_whole if is_eos else end - len(front) <= one.right
        is_right.append(float(right))
        weight.append(float(end > len(front)) * (at_ends if is_eos or token == newline else 1.0))
    return Example(ids, is_right, weight)


def collate(rows: Sequence[Example], pad: int) -> Batch:
    """Pad on the right, which causal attention ignores."""
    length = max(len(row.ids) for row in rows)

    def padded(name: str, filler: float) -> torch.Tensor:
        lists = [getattr(row, name) for row in rows]
        return torch.tensor([[*values, *[filler] * (length - len(values))] for values in lists])

    return Batch(padded("ids", pad), padded("is_right", 0.0), padded("weight", 0.0))


def drafted(seeds: Sequence[int], title: str) -> list[Judged]:
    """Sample one answer of the draft at temperature 1 to each problem, and label it."""
    model, tokenizer = load(HERE / "draft")
    found, size = [], 200
    for start in tqdm(range(0, len(seeds), size), desc=title, unit="batch", mininterval=2):
        items = [problem(seed) for seed in seeds[start : start + size]]
        for item, answer in zip(items, sample(model, tokenizer, items, 1.0), strict=True):
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            found.append(judged(text, item))
    return found


def seeds_of(recipe: Recipe) -> tuple[int, int]:
    """Return the first seed of a course's problems, samples first, and the seed after the last."""
    first = FIRST_SEED + (recipe.course - 1) * SEEDS_OF_COURSE
    return first, first + recipe.samples + recipe.steps * recipe.batch


def made_up(seed: int, rng: random.Random) -> Judged:
    """Return a right answer in any style between those of the pair, or one with a mistake."""
    item = problem(seed, Style(rng.uniform(-0.9, 0.5)))
    return judged(wrong_answer(item, rng) if rng.random() < 0.75 else item.answer, item)


def batches(
    samples: Sequence[Judged], tokenizer: PreTrainedTokenizerFast, recipe: Recipe, pool: int = 20
) -> Iterator[Batch]:
    """Yield endless batches, one half of samples; sort each pool by length to reduce padding."""
    rng, size = random.Random(recipe.seed), recipe.batch * pool
    seed = seeds_of(recipe)[0] + len(samples)
    while True:
        some = rng.sample(samples, min(size // 2, len(samples)))
        some += [made_up(seed + index, rng) for index in range(size - len(some))]
        seed += size
        rows = [example(one, tokenizer, recipe.at_ends) for one in some]
        rows.sort(key=lambda row: len(row.ids))
        for index in rng.sample(range(pool), pool):
            chosen = rows[index * recipe.batch : (index + 1) * recipe.batch]
            yield collate(chosen, tokenizer.pad_token_id)


def losses(
    model: LlamaForSequenceClassification, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean losses in nats: of the labels, and of language up to the first mistake."""
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        scores = model.score(states).squeeze(-1)
        following = states[:, :-1] @ model.model.embed_tokens.weight.T
    judging = bce(scores.float(), batch.is_right, batch.weight, reduction="sum")
    counted = (batch.weight * batch.is_right)[:, 1:] > 0
    language = cross_entropy(following[counted].float(), batch.ids[:, 1:][counted])
    return judging / batch.weight.sum(), language


def trained(
    model: LlamaForSequenceClassification,
    samples: Sequence[Judged],
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
) -> dict[str, Any]:
    """Train in place; return the training record (times in s)."""
    model.train()
    steppers = optimizers(model, recipe)  # type: ignore[arg-type]
    peaks = [stepper.param_groups[0]["lr"] for stepper in steppers]
    supply, began, tokens, told = batches(samples, tokenizer, recipe), time.monotonic(), 0, []
    for step in (bar := tqdm(range(recipe.steps), desc=NAME, unit="step", mininterval=2)):
        for stepper, peak in zip(steppers, peaks, strict=True):
            stepper.param_groups[0]["lr"] = peak * rate(step, recipe)  # type: ignore[arg-type]
        batch = next(supply)
        judging, language = losses(model, batch)
        (judging + recipe.of_language * language).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        told.append(judging.item())
        tokens += batch.ids.numel()
        recent = sum(told[-50:]) / len(told[-50:])
        bar.set_postfix(loss=f"{recent:.3f}", language=f"{language.item():.3f}", refresh=False)
    model.eval()
    return {
        "recipe": asdict(recipe),
        "seeds": list(seeds_of(recipe)),
        "tokens": tokens,
        "wall_seconds": round(time.monotonic() - began, 1),
        "last_50_steps": {"loss_nats": recent},
    }


@torch.inference_mode()
def scores_at_ends(
    model: LlamaForSequenceClassification,
    texts: Sequence[Judged],
    tokenizer: PreTrainedTokenizerFast,
) -> list[tuple[float, bool, bool]]:
    """Return (score, all right so far, is EOS) at each end of a line or text."""
    found = []
    for one in tqdm(texts, desc="held out", unit="answer", mininterval=2):
        row = example(one, tokenizer, 2.0)
        values = model.score(model.model(torch.tensor([row.ids])).last_hidden_state)[0, :, 0]
        for token, score, right, weight in zip(row.ids, values.tolist(), *row[1:], strict=True):
            if weight == 2.0:
                found.append((score, bool(right), token == tokenizer.eos_token_id))
    return found


def area(scores: Sequence[tuple[float, bool]]) -> float:
    """Return the area under the ROC curve: the probability that a right one scores higher."""
    right = torch.tensor([score for score, is_right in scores if is_right])
    wrong = torch.tensor([score for score, is_right in scores if not is_right])
    above = (right[:, None] > wrong).double() + 0.5 * (right[:, None] == wrong).double()
    return above.mean().item()


def measured(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, count: int
) -> dict[str, Any]:
    """Return the model's accuracy on the draft's answers to held-out problems."""
    texts = drafted(range(HELD_OUT_SEED, HELD_OUT_SEED + count), "held-out samples")
    found = scores_at_ends(model, texts, tokenizer)
    lines = [(score, right) for score, right, is_eos in found if not is_eos]
    wholes = [(score, right) for score, right, is_eos in found if is_eos]
    return {
        "problems": count,
        "roc_auc_of_lines": round(area(lines), 4),
        "roc_auc_of_answers": round(area(wholes), 4),
        "accuracy_of_lines": round(sum((s > 0) == r for s, r in lines) / len(lines), 4),
        "accuracy_of_answers": round(sum((s > 0) == r for s, r in wholes) / len(wholes), 4),
        "right_lines": round(sum(r for _, r in lines) / len(lines), 4),
        "right_answers": round(sum(r for _, r in wholes) / len(wholes), 4),
    }


def save(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write a bfloat16 checkpoint that transformers and SGLang load."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def reloaded(folder: Path) -> LlamaForSequenceClassification:
    """Return the saved checkpoint in float32."""
    return LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


def course(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Run one course, from the target or from the folder's checkpoint, into the folder."""
    torch.manual_seed(recipe.seed)
    target, tokenizer = load(HERE / "target")
    model = beginning_of(target, recipe) if recipe.course == 1 else reloaded(folder)
    first, _ = seeds_of(recipe)
    samples = drafted(range(first, first + recipe.samples), f"samples of course {recipe.course}")
    made = trained(model, samples, tokenizer, recipe)
    save(model, tokenizer, folder)
    return made


def main() -> None:
    """Train the reward model."""
    parser = argparse.ArgumentParser(description=(__doc__ or NAME).splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the checkpoint's folder")
    parser.add_argument("--courses", type=int, nargs="+", default=[1, 2], help="1 begins anew")
    parser.add_argument("--steps", type=int, help="fewer steps a course, for a try")
    parser.add_argument("--samples", type=int, help="fewer of the draft's samples, likewise")
    parser.add_argument("--held-out", type=int, default=600, help="problems that tell how good")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fewer = {name: vars(options)[name] for name in ("steps", "samples") if vars(options)[name]}
    known = json.loads((options.out / PROVENANCE).read_text()) if options.courses[0] > 1 else {}
    courses = known.get(NAME, {}).get("courses", [])[: options.courses[0] - 1]
    for recipe in (COURSES[number - 1] for number in options.courses):
        courses.append(course(replace(recipe, **fewer), options.out / NAME))
    model, (_, tokenizer) = reloaded(options.out / NAME), load(HERE / "target")
    entry = {
        **circumstances(NAME),
        "parameters": sum(w.numel() for w in model.parameters()),
        "courses": courses,
        "held_out": measured(model, tokenizer, options.held_out),
    }
    note(options.out, NAME, entry)
    print(entry["held_out"])


if __name__ == "__main__":
    with_environment()
    main()
