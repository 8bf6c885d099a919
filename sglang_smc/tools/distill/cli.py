"""Parse the command line of ``python -m sglang_smc.tools.distill`` and train a draft."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from sglang_smc.tools.commands import positive
from sglang_smc.tools.distill.job import NEW, REPORT, Job, run
from sglang_smc.tools.distill.losses import LOSSES
from sglang_smc.tools.distill.train import Course

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZES = {
    "eagle3": ("layer_ids", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
    "dflash": (
        "layer_ids",
        "num_layers",
        "block_size",
        "mask_token_id",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train a draft; return 0, or 2 with an error on stderr for invalid arguments."""
    arguments = parser().parse_args(argv)
    logging.disable_progress_bar()
    try:
        report = run(job_of(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_text(report, arguments.out))
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang_smc.tools.distill",
        description="Train a draft, or a head that drafts, on the target's own samples.",
    )
    result.add_argument("--target", type=Path, required=True, help="the target's folder")
    result.add_argument("--out", type=Path, required=True, help="where the checkpoint is written")
    _add_draft(result)
    _add_texts(result)
    _add_course(result)
    return result


def _add_draft(result: argparse.ArgumentParser) -> None:
    begun = result.add_mutually_exclusive_group(required=True)
    begun.add_argument(
        "--draft", type=Path, help="go on from this: a model, an EAGLE-3 head or a DFlash head"
    )
    begun.add_argument("--new", choices=tuple(NEW), help="begin a head of this kind")
    result.add_argument(
        "--layer-ids",
        type=naturals,
        metavar="I,J",
        help="new heads: layers of the target, from 0, that it reads; default: an early, the "
        "middle and a late one",
    )
    result.add_argument("--num-layers", type=positive, help="new DFlash heads; default 1")
    result.add_argument(
        "--block-size", type=positive, help="new DFlash heads: a token and its drafts; default 9"
    )
    result.add_argument(
        "--mask-token-id", type=int, help="new DFlash heads; default: the padding token's"
    )
    for name in ("num-heads", "num-kv-heads", "head-dim", "intermediate-size"):
        result.add_argument(f"--{name}", type=positive, help="new heads; default: as the target's")
    result.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the checkpoint")


def _add_texts(result: argparse.ArgumentParser) -> None:
    result.add_argument(
        "--prompts",
        type=Path,
        help=".jsonl with prompt or messages on each line; or a prompt a line",
    )
    result.add_argument(
        "--texts", type=Path, help="keep the samples here; where it is, they are read, not sampled"
    )
    result.add_argument("--answers", type=positive, default=1, help="of each prompt; default 1")
    result.add_argument("--max-new-tokens", type=positive, default=512, help="default 512")
    result.add_argument(
        "--held-out", type=positive, default=200, help="texts that only measure; default 200"
    )
    result.add_argument(
        "--temperature", type=temperature, default=1.0, help="of samples and laws; default 1.0"
    )


def _add_course(result: argparse.ArgumentParser) -> None:
    result.add_argument(
        "--loss", choices=tuple(LOSSES), default="forward-kl", help="default forward-kl"
    )
    result.add_argument(
        "--particles", type=positive, default=8, help="N of the drafts that are measured; default 8"
    )
    result.add_argument("--steps", type=positive, default=1000, help="default 1000")
    result.add_argument("--batch", type=positive, default=32, help="texts a step; default 32")
    result.add_argument(
        "--anchors", type=positive, default=16, help="heads: blocks a text and step; default 16"
    )
    result.add_argument("--depth", type=positive, default=8, help="tokens a block: K; default 8")
    result.add_argument(
        "--decay", type=weight, default=1.0, help="heads: a column's weight, of the one before it"
    )
    result.add_argument(
        "--learning-rate", type=temperature, default=1e-3, help="the peak; default 0.001"
    )
    result.add_argument("--seed", type=int, default=0)
    result.add_argument(
        "--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda, cuda:1 ..."
    )


def job_of(arguments: argparse.Namespace) -> Job:
    """Return the job; raise ValueError for a size option that does not apply to the draft."""
    given = vars(arguments)
    course = Course(**{name: given[name] for name in Course.__struct_fields__})
    own = {"sizes": _sizes(given), "course": course, "dtype": DTYPES[arguments.dtype]}
    rest = {name: given[name] for name in Job.__struct_fields__ if name not in own}
    return Job(**rest, **own)


def _sizes(given: dict[str, Any]) -> dict[str, Any]:
    every = {name: given[name] for names in SIZES.values() for name in names}
    found = {name: value for name, value in every.items() if value is not None}
    known = SIZES.get(given["new"] or "", ())
    for name in found:
        if name not in known:
            where = f"--new {given['new']}" if given["new"] else "--draft, whose sizes are settled"
            raise ValueError(f"--{name.replace('_', '-')} does not go with {where}; leave it out.")
    return found


def as_text(report: dict[str, Any], out: Path) -> str:
    """Return the metrics before and after training as a text table."""
    lines = [f"{'':34}{'before':>10}{'after':>10}"]
    pairs = {
        "accepted of a block, N = 1": "accepted",
        "KL(p || q), nats": "forward_kl",
        "log E_q[(p / q)^2], nats": "chi2",
        "rejection, one draft": "rejection",
        f"rejection, {report['particles']} drafts, at best": "rejection_of_all",
    }
    for words, name in pairs.items():
        values = [_mean(report[when][name]) for when in ("before", "after")]
        lines.append(f"{words:34}{values[0]:>10.4f}{values[1]:>10.4f}")
    after = report["after"]
    lines.append(
        f"{after['blocks']} blocks of {after['texts']} held-out texts; means over columns,"
    )
    lines.append(f"and by column in {out / REPORT}")
    return "\n".join(lines)


def _mean(value: float | list[float]) -> float:
    return sum(value) / len(value) if isinstance(value, list) else value


def naturals(text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas; the head validates their range."""
    return tuple(int(part) for part in text.split(","))


def temperature(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def weight(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    value = temperature(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return value
