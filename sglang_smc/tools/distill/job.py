"""Run a distillation: sample texts, train, measure, write a checkpoint."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from sglang_smc.tools.distill.checkpoints import new_dflash, new_eagle3
from sglang_smc.tools.distill.drafts import Draft, begin_as_target, load_draft
from sglang_smc.tools.distill.losses import LOSSES
from sglang_smc.tools.distill.teacher import (
    Sampling,
    Teacher,
    load_model,
    load_tokenizer,
    sample_answers,
)
from sglang_smc.tools.distill.texts import Text, read_prompts, read_texts, write_texts
from sglang_smc.tools.distill.train import Course, products_of, train
from sglang_smc.tools.distill.validate import Worth, validate

REPORT = "distill.json"
NEW = {"eagle3": new_eagle3, "dflash": new_dflash}


class Job(msgspec.Struct, frozen=True):
    """Resolved arguments of a distillation run."""

    target: Path
    out: Path
    draft: Path | None  # a checkpoint to continue from; or else
    new: str | None  # the kind of a new head
    sizes: Mapping[str, Any]  # of a new head, as `new_eagle3` and `new_dflash` take them
    prompts: Path | None
    texts: Path | None
    answers: int  # of each prompt
    max_new_tokens: int
    held_out: int  # texts
    loss: str
    particles: int
    temperature: float
    course: Course
    device: torch.device
    dtype: torch.dtype  # of the checkpoint


def run(job: Job) -> dict[str, Any]:
    """Run the job; return the report that is written beside the checkpoint.

    Raises:
        ValueError: files or settings are missing or inconsistent.
    """
    torch.manual_seed(job.course.seed)
    products = products_of(job.device)
    stored = "auto" if products == torch.bfloat16 else products
    teacher = Teacher(load_model(job.target, stored, job.device), job.temperature)
    draft = _begin(job, teacher)
    course = fitting(job.course, draft)
    learned, held_out = _split(_texts(job, teacher), job.held_out)
    before = _measure(job, draft, teacher, held_out)
    began = time.monotonic()
    steps = train(draft, teacher, learned, LOSSES[job.loss], course)
    seconds = time.monotonic() - began
    job.out.mkdir(parents=True, exist_ok=True)
    draft.save(job.out, job.dtype)
    # Measure the checkpoint as written, rounded to its dtype.
    written = load_draft(job.out, job.target, job.device)
    after = _measure(job, written, teacher, held_out)
    report = {
        "loss": job.loss,
        "particles": job.particles,
        "temperature": job.temperature,
        "course": msgspec.to_builtins(course),
        "texts": len(learned),
        "answer_tokens": sum(len(text.ids) - text.prompt for text in learned),
        "parameters": sum(weight.numel() for weight in draft.module.parameters()),
        "training_seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "products": str(products).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "loss_last_50_steps": sum(steps[-50:]) / len(steps[-50:]),
        "before": _rounded(before),
        "after": _rounded(after),
    }
    (job.out / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    return report


def _rounded(worth: Worth) -> dict[str, Any]:
    """Return the measurements rounded to 4 digits: standard errors are larger."""
    texts = json.dumps(worth._asdict())
    return json.loads(texts, parse_float=lambda text: round(float(text), 4))


def fitting(course: Course, draft: Draft) -> Course:
    """Return ``course`` for this draft; a draft model trains at depth 1.

    Its logits at a position are the same at any depth.

    Raises:
        ValueError: the depth exceeds the block.
    """
    if not draft.layer_ids:
        return msgspec.structs.replace(course, depth=1)
    if draft.longest is not None and course.depth > draft.longest:
        raise ValueError(
            f"--depth is {course.depth}; allowed: 1 to {draft.longest}, the block less its first "
            "token. Lower it, or begin a head with a larger --block-size."
        )
    return course


def _begin(job: Job, teacher: Teacher) -> Draft:
    if job.draft is not None:
        return load_draft(job.draft, job.target, job.device)
    if job.new is None:
        raise ValueError("give --draft, a checkpoint to go on from, or --new, a kind of head.")
    with tempfile.TemporaryDirectory() as folder:
        make = NEW[job.new]
        make(job.target, folder, dtype=torch.float32, seed=job.course.seed, **job.sizes)
        draft = load_draft(Path(folder), job.target, job.device)
    begin_as_target(draft, teacher)
    return draft


def _texts(job: Job, teacher: Teacher) -> list[Text]:
    """Return the texts: read if the file exists, else sampled, and written if a file is given."""
    if job.texts is not None and job.texts.is_file():
        return read_texts(job.texts, job.temperature)
    if job.prompts is None:
        raise ValueError("give --prompts, or --texts with a file that an earlier run wrote.")
    prompts = read_prompts(job.prompts, load_tokenizer(job.target))
    rng = torch.Generator(job.device).manual_seed(job.course.seed)
    wanted = [prompt for prompt in prompts for _ in range(job.answers)]
    settings = Sampling(job.temperature, job.max_new_tokens, 8 * job.course.batch, _ends(teacher))
    texts = sample_answers(teacher.model, wanted, settings, rng)
    if job.texts is not None:
        write_texts(job.texts, texts, job.temperature)
    return texts


def _ends(teacher: Teacher) -> frozenset[int]:
    """Return the ids that end an answer: one, several or none."""
    found = teacher.model.generation_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _split(texts: list[Text], held_out: int) -> tuple[list[Text], list[Text]]:
    """Split off the last texts as held out, together with all answers to their prompts."""
    if not 1 <= held_out < len(texts):
        raise ValueError(
            f"--held-out is {held_out}, of {len(texts)} texts; allowed: 1 to {len(texts) - 1}."
        )
    at = len(texts) - held_out
    while at > 1 and _prompt(texts[at - 1]) == _prompt(texts[at]):
        at -= 1
    return texts[:at], texts[at:]


def _prompt(text: Text) -> list[int]:
    return text.ids[: text.prompt]


def _measure(job: Job, draft: Draft, teacher: Teacher, texts: list[Text]) -> Worth:
    return validate(
        draft,
        teacher,
        texts,
        depth=job.course.depth,
        anchors=job.course.anchors,
        batch=job.course.batch,
        particles=job.particles,
    )
