"""Train the shipped model pair from scratch on a CPU: tokenizer, target and draft.

    python bench/pair/train.py                  # all of it, under an hour on two cores
    python bench/pair/train.py draft            # the tokenizer, then only the draft

Each model is written to its own folder next to this file, its training record to provenance.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from task import DRAFT_STYLE, TARGET_STYLE, Style, messages, problem
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
PROVENANCE = "provenance.json"
VOCABULARY = 512
MAX_LENGTH = 2048
PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Read by libgomp and glibc only when a program starts. Threads that sleep instead of spinning
#: at barriers make training several times faster on cores that other programs use too. The
#: thresholds (32 MiB is the most that glibc takes for the first) keep the tensors of one step
#: for the next one, instead of giving their pages back and faulting them in again.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(8 * 10**9),
}


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of one model of the pair."""

    lean: float
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    steps: int
    batch: int
    muon_lr: float
    adam_lr: float
    seed: int
    warmup: int = 100
    checkpoint_every: int = 250

    def config(self, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
        """Return the Hugging Face configuration of this shape, for ``tokenizer``'s vocabulary."""
        return LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=64,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )


RECIPES = {
    "target": Recipe(
        lean=TARGET_STYLE.lean,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=704,
        steps=2000,
        batch=32,
        muon_lr=0.005,
        adam_lr=0.003,
        seed=1,
    ),
    "draft": Recipe(
        lean=DRAFT_STYLE.lean,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=256,
        steps=800,
        batch=32,
        muon_lr=0.006,
        adam_lr=0.003,
        seed=2,
    ),
}
# Each model's training problems are a seed range of its own, below the held-out ones.
FIRST_SEED = {"tokenizer": 0, "target": 1_000_000, "draft": 101_000_000, "heads": 201_000_000}


def train_tokenizer(problems: int = 4000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCABULARY` tokens with single digits and the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # With uniform choices both models' wordings have equal weight.
    items = (problem(FIRST_SEED["tokenizer"] + i, Style(0.0)) for i in range(problems))
    texts = (text for item in items for text in (item.question, item.answer))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


class Batch(NamedTuple):
    """Token ids ``[rows, length]`` (int64) and labels, -100 outside the loss."""

    ids: torch.Tensor
    labels: torch.Tensor


def encode(
    tokenizer: PreTrainedTokenizerFast, seeds: range, style: Style
) -> list[tuple[list[int], int]]:
    """Return for each seed the token ids of question and answer, and the question's length."""
    items = [problem(seed, style) for seed in seeds]
    prompts = tokenizer.apply_chat_template(
        [messages(item) for item in items], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer(prompts)["input_ids"]
    answer_ids = tokenizer([item.answer + EOS for item in items])["input_ids"]
    pairs = zip(prompt_ids, answer_ids, strict=True)
    return [(prompt + answer, len(prompt)) for prompt, answer in pairs]


def collate(rows: list[tuple[list[int], int]], pad: int) -> Batch:
    """Pad on the right, which causal attention ignores."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), -100)
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt : len(tokens)] = ids[row, prompt : len(tokens)]
    return Batch(ids, labels)


def batches(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe, first_seed: int, pool: int = 40
) -> Iterator[Batch]:
    """Yield endless batches of fresh problems; sort each pool by length to reduce padding."""
    order = torch.Generator().manual_seed(recipe.seed)
    size = recipe.batch * pool
    start = first_seed
    while True:
        rows = encode(tokenizer, range(start, start + size), Style(recipe.lean))
        rows.sort(key=lambda row: len(row[0]))
        for index in torch.randperm(pool, generator=order).tolist():
            chunk = rows[index * recipe.batch : (index + 1) * recipe.batch]
            yield collate(chunk, tokenizer.pad_token_id)
        start += size


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [w for w in model.model.layers.parameters() if w.ndim == 2]
    known = {id(w) for w in matrices}
    others = [w for w in model.parameters() if id(w) not in known]
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.muon_lr,
        momentum=0.95,
        weight_decay=0.01,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.98))]


def rate(step: int, recipe: Recipe) -> float:
    """Return the learning rate's factor: linear warm-up, then linear decay to nearly 0."""
    rise = (step + 1) / recipe.warmup
    return min(1.0, rise, (recipe.steps - step) / (recipe.steps - recipe.warmup))


def answer_loss(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
    """Return the mean cross-entropy per answer token in nats, and the accuracy of the argmax."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
    labels = batch.labels[:, 1:]
    counted = labels != -100
    logits, labels = logits[counted].float(), labels[counted]
    right = (logits.argmax(-1) == labels).float().mean().item()
    return cross_entropy(logits, labels), right


def update(
    model: LlamaForCausalLM, batch: Batch, steppers: list[torch.optim.Optimizer]
) -> tuple[float, float]:
    """Take one training step; return the loss in nats and the accuracy of the argmax."""
    loss, right = answer_loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        stepper.step()
        stepper.zero_grad()
    return loss.item(), right


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a bf16 checkpoint that Hugging Face and SGLang load; ``model`` stays float32."""
    weights = {name: w.detach().bfloat16() for name, w in model.state_dict().items()}
    shipped = LlamaForCausalLM(model.config).bfloat16()
    shipped.load_state_dict(weights)
    shipped.generation_config.temperature = 0.7
    shipped.generation_config.do_sample = True
    shipped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_model(
    name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, object]:
    """Train one model of the pair into ``folder``; return its provenance (times in s)."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.config(tokenizer)).train()
    steppers = optimizers(model, recipe)
    peaks = [stepper.param_groups[0]["lr"] for stepper in steppers]
    supply = batches(tokenizer, recipe, FIRST_SEED[name])
    began, tokens, losses, rights = time.monotonic(), 0, [], []
    for step in (bar := tqdm(range(recipe.steps), desc=name, unit="step", mininterval=2)):
        for stepper, peak in zip(steppers, peaks, strict=True):
            stepper.param_groups[0]["lr"] = peak * rate(step, recipe)
        batch = next(supply)
        loss, right = update(model, batch, steppers)
        losses.append(loss)
        rights.append(right)
        tokens += batch.ids.numel()
        bar.set_postfix(loss=f"{loss:.3f}", right=f"{right:.3f}", refresh=False)
        if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == recipe.steps:
            save(model, tokenizer, folder)
    tail = losses[-100:], rights[-100:]
    return {
        "recipe": asdict(recipe),
        "parameters": sum(w.numel() for w in model.parameters()),
        "seeds": [FIRST_SEED[name], FIRST_SEED[name] + recipe.steps * recipe.batch],
        "tokens": tokens,
        "wall_seconds": round(time.monotonic() - began, 1),
        "last_100_steps": {
            "loss_nats": sum(tail[0]) / len(tail[0]),
            "tokens_right": sum(tail[1]) / len(tail[1]),
        },
    }


def note(folder: Path, name: str, entry: dict[str, object]) -> None:
    """Write one model's entry to the provenance file, keeping the others."""
    path = folder / PROVENANCE
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = entry
    path.write_text(json.dumps(known, indent=2) + "\n")


def circumstances(program: str, *names: str) -> dict[str, object]:
    """Return the command, date and versions, which a repetition needs besides the recipe."""
    words = [f"python bench/pair/{program}.py", *names, f"--threads {torch.get_num_threads()}"]
    return {
        "command": " ".join(words),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def with_environment() -> None:
    """Restart this program with `ENVIRONMENT` set, unless it is set already."""
    if ENVIRONMENT.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})


def main() -> None:
    """Train the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(RECIPES), help="target, draft or both")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, help="fewer steps, for a try")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    for name in options.models:
        recipe = RECIPES[name]
        if options.steps:
            recipe = Recipe(**{**asdict(recipe), "steps": options.steps})
        entry = train_model(name, recipe, tokenizer, options.out / name)
        note(options.out, name, {**circumstances("train", name), **entry})


if __name__ == "__main__":
    with_environment()
    main()
