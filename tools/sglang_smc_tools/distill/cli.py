"""Implement ``python -m sglang_smc_tools.distill``: sample texts, train, measure, write."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
import transformers

from sglang_smc.command.program import command, number, positive, several
from sglang_smc_tools.commands import table
from sglang_smc_tools.distill.checkpoints import new_head
from sglang_smc_tools.distill.drafts import TrainableDraft, begin_as_target, load_draft
from sglang_smc_tools.distill.losses import LOSSES
from sglang_smc_tools.distill.teacher import (
    Example,
    Sampling,
    Teacher,
    load_model,
    load_tokenizer,
    read_prompts,
    read_texts,
    sample_answers,
    sample_with_engine,
    write_texts,
)
from sglang_smc_tools.distill.train import Course, Worth, products_of, train, validate

REPORT = "distill.json"
INTERRUPTED = "training.pt"
ENGINE = "engine"
DTYPES = ("bfloat16", "float16", "float32")
_ALL = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size")
_BLOCK = (*_ALL, "layer_ids", "num_layers", "block_size", "mask_token_id")
#: Size options of a new head, by its kind.
SIZES = {
    "eagle3": (*_ALL, "layer_ids", "hot_tokens"),
    "mtp": _ALL,
    "dflash": _BLOCK,
    "dspark": (*_BLOCK, "markov_rank"),
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang_smc_tools.distill",
        description="Train a draft, or a head that drafts, on the target's own samples.",
    )
    add = result.add_argument
    above_0 = number(float, 0, is_open=True)
    add("--target", type=Path, required=True, help="the target's folder")
    add("--out", type=Path, required=True, help="where the checkpoint is written")
    begun = result.add_mutually_exclusive_group(required=True)
    kinds = "go on from this: a model, an EAGLE-3 head, an MTP layer or a block"
    begun.add_argument("--draft", type=Path, help=kinds)
    begun.add_argument("--new", choices=tuple(SIZES), help="begin a head of this kind")
    layers = "new EAGLE-3 heads, blocks: the target's layers to read, from 0; default: an early, "
    add("--layer-ids", type=several(int), metavar="I,J", help=f"{layers}the middle and a late one")
    hot = "new EAGLE-3 heads: draft this many tokens alone, the most frequent; default: all"
    add("--hot-tokens", type=positive, metavar="H", help=hot)
    add("--num-layers", type=positive, help="new blocks; default 1")
    size = "new blocks: tokens that one pass reads; default: 9, or 8, all drafts, of DSpark"
    add("--block-size", type=positive, help=size)
    add("--mask-token-id", type=int, help="new blocks; default: the padding token's")
    add("--markov-rank", type=positive, help="new DSpark blocks; default 64")
    for name in ("num-heads", "num-kv-heads", "head-dim", "intermediate-size"):
        add(f"--{name}", type=positive, help="new heads; default: as the target's")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the checkpoint")
    prompts = ".jsonl with prompt or messages on each line; or a prompt a line"
    add("--prompts", type=Path, help=prompts)
    texts = "keep the samples here; where it is, they are read, not sampled"
    add("--texts", type=Path, help=texts)
    add("--answers", type=positive, default=1, help="of each prompt; default 1")
    add("--max-new-tokens", type=positive, default=512, help="default 512")
    default = ENGINE if find_spec("sglang") else "transformers"
    engine = "what samples; default: SGLang's engine, if installed"
    add("--sampler", choices=(ENGINE, "transformers"), default=default, help=engine)
    add("--held-out", type=positive, default=200, help="texts that only measure; default 200")
    add("--temperature", type=above_0, default=1.0, help="of samples, p and q; default 1.0")
    add("--loss", choices=tuple(LOSSES), default="forward-kl", help="default forward-kl")
    particles = "N of the drafts that are measured; default 8"
    add("--particles", type=positive, default=8, help=particles)
    add("--steps", type=positive, default=1000, help="default 1000")
    add("--batch", type=positive, default=32, help="texts a step; default 32")
    add("--anchors", type=positive, default=16, help="heads: blocks a text and step; default 16")
    add("--depth", type=positive, default=8, help="tokens a block: K; default 8")
    decay = "heads: a column's weight, of the one before it"
    add("--decay", type=number(float, 0, 1), default=1.0, help=decay)
    add("--learning-rate", type=above_0, default=1e-3, help="the peak; default 0.001")
    add("--seed", type=int, default=0)
    cpu = torch.device("cpu")
    add("--device", type=torch.device, default=cpu, help="cpu, cuda, cuda:1 ...")
    return result


def run(arguments: argparse.Namespace) -> None:
    """Train a draft, and write the checkpoint and its report.

    Raises ValueError if files or settings are missing or inconsistent.
    """
    transformers.logging.disable_progress_bar()
    torch.manual_seed(arguments.seed)
    new_sizes = _sizes(arguments)
    products = products_of(arguments.device)
    stored = "auto" if products == torch.bfloat16 else products
    model = load_model(arguments.target, stored, arguments.device)
    teacher = Teacher(model, arguments.temperature)
    # Mistakes are told before texts are sampled, which takes minutes.
    texts = cache(lambda: _split(_texts(arguments, teacher), arguments.held_out))
    draft = _begin(arguments, new_sizes, teacher, lambda: texts()[0])
    course = _course(arguments, draft)
    learned, held_out = texts()
    names = ("depth", "anchors", "batch", "particles")
    sizes = {name: getattr(arguments, name) for name in names}
    before = validate(draft, teacher, held_out, **sizes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    interrupted = arguments.out / INTERRUPTED
    trained = train(draft, teacher, learned, course, interrupted)
    draft.save(arguments.out, getattr(torch, arguments.dtype))
    # Measure the checkpoint as written, rounded to its dtype.
    written = load_draft(arguments.out, arguments.target, arguments.device)
    after = validate(written, teacher, held_out, **sizes)
    report = {
        **{name: getattr(arguments, name) for name in ("loss", "particles", "temperature")},
        "course": msgspec.to_builtins(course),
        "texts": len(learned),
        "answer_tokens": sum(len(text.ids) - text.prompt for text in learned),
        "parameters": sum(weight.numel() for weight in draft.module.parameters()),
        "training_seconds": round(trained.seconds, 1),
        "threads": torch.get_num_threads(),
        "products": str(products).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "loss_last_50_steps": fmean(trained.losses[-50:]),
        "before": _rounded(before),
        "after": _rounded(after),
    }
    (arguments.out / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    interrupted.unlink(missing_ok=True)
    print(as_text(report, arguments.out))


def _rounded(worth: Worth) -> dict[str, Any]:
    """Return the measurements rounded to 4 digits, and None for the error of a single text's."""
    read = {"parse_float": lambda text: round(float(text), 4), "parse_constant": lambda _: None}
    return json.loads(json.dumps(worth._asdict()), **read)


def _sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of a new head that are given; raise ValueError for one it does not have."""
    given = {name: getattr(arguments, name) for sizes in SIZES.values() for name in sizes}
    found = {name: value for name, value in given.items() if value is not None}
    new = arguments.new
    for name in found:
        if name not in SIZES.get(new or "", ()):
            where = f"--new {new}" if new else "--draft, whose sizes are settled"
            raise ValueError(f"--{name.replace('_', '-')} does not go with {where}; leave it out.")
    return found


def _begin(
    arguments: argparse.Namespace,
    sizes: dict[str, Any],
    teacher: Teacher,
    texts: Callable[[], list[Example]],
) -> TrainableDraft:
    target = arguments.target
    device = arguments.device
    if arguments.draft is not None:
        return load_draft(arguments.draft, target, device)
    if "hot_tokens" in sizes:
        sizes["hot_tokens"] = _most_frequent(sizes["hot_tokens"], texts, teacher)
    with tempfile.TemporaryDirectory() as folder:
        how = {"dtype": torch.float32, "seed": arguments.seed}
        new_head(arguments.new, target, folder, **how, **sizes)
        draft = load_draft(Path(folder), target, device)
    begin_as_target(draft, teacher)
    return draft


def _most_frequent(count: int, texts: Callable[[], list[Example]], teacher: Teacher) -> list[int]:
    """Return the ``count`` most frequent tokens of the texts' answers, ascending.

    Of equal ones the first: a tokenizer's merges have those of frequent tokens first.
    """
    vocab_size = teacher.model.get_output_embeddings().weight.shape[0]
    if count > vocab_size:
        raise ValueError(f"--hot-tokens is {count}; allowed: 1 to {vocab_size}, the vocabulary.")
    answers = torch.tensor([token for text in texts() for token in text.ids[text.prompt :]])
    times = torch.bincount(answers, minlength=vocab_size)
    return times.argsort(descending=True, stable=True)[:count].sort().values.tolist()


def _course(arguments: argparse.Namespace, draft: TrainableDraft) -> Course:
    """Return the course for this draft; a draft model trains at depth 1.

    Its logits at a position are the same at any depth.

    Raises ValueError if the depth exceeds the block.
    """
    course = Course(**{name: getattr(arguments, name) for name in Course.__struct_fields__})
    if not draft.layer_ids:
        return msgspec.structs.replace(course, depth=1)
    if draft.longest is not None and course.depth > draft.longest:
        raise ValueError(
            f"--depth is {course.depth}; allowed: 1 to {draft.longest}, what the block "
            "drafts. Lower it, or begin a head with a larger --block-size."
        )
    return course


def _texts(arguments: argparse.Namespace, teacher: Teacher) -> list[Example]:
    """Return the texts: read if the file exists, else sampled, and written if a file is given."""
    path = arguments.texts
    temperature = arguments.temperature
    if path is not None and path.is_file():
        return read_texts(path, temperature)
    if arguments.prompts is None:
        raise ValueError("give --prompts, or --texts with a file that an earlier run wrote.")
    prompts = read_prompts(arguments.prompts, load_tokenizer(arguments.target))
    wanted = [prompt for prompt in prompts for _ in range(arguments.answers)]
    ends = teacher.model.generation_config.eos_token_id  # one, several or None
    how = Sampling(
        temperature,
        max_new_tokens=arguments.max_new_tokens,
        batch=8 * arguments.batch,
        ends=frozenset([ends] if isinstance(ends, int) else ends or ()),
    )
    if arguments.sampler == ENGINE:
        seed = arguments.seed
        device = arguments.device.type
        texts = sample_with_engine(arguments.target, wanted, how, seed=seed, device=device)
    else:
        texts = sample_answers(teacher.model, wanted, how)
    if path is not None:
        write_texts(path, texts, temperature)
    return texts


def _split(texts: list[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """Split off the last texts as held out, together with all answers to their prompts."""
    if not 1 <= held_out < len(texts):
        raise ValueError(
            f"--held-out is {held_out}, of {len(texts)} texts; allowed: 1 to {len(texts) - 1}."
        )
    prompts = [text.ids[: text.prompt] for text in texts]
    at = len(texts) - held_out
    while at > 1 and prompts[at - 1] == prompts[at]:
        at -= 1
    return texts[:at], texts[at:]


def as_text(report: dict[str, Any], out: Path) -> str:
    """Return the metrics before and after training as a text table."""
    metrics = {
        "accepted of a block, N = 1": "accepted",
        "KL(p || q), nats": "forward_kl",
        "log E_q[(p / q)^2], nats": "chi2",
        "rejection, one draft": "rejection",
        f"rejection, {report['particles']} drafts, at best": "rejection_of_all",
    }

    def mean(value: float | list[float]) -> float:
        return fmean(value) if isinstance(value, list) else value

    rows = [
        {"": words, **{when: f"{mean(report[when][name]):.4f}" for when in ("before", "after")}}
        for words, name in metrics.items()
    ]
    after = report["after"]
    return "\n".join(
        [
            *table(rows, [""], rule=False),
            f"{after['blocks']} blocks of {after['texts']} held-out texts; means over columns,",
            f"and by column in {out / REPORT}",
        ]
    )


main = command(parser, run)
