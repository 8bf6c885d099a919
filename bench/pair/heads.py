"""Train what drafts for the shipped target, with the tool that ships: ``sglang_smc.tools.distill``.

    python bench/pair/heads.py                  # all three, an hour on one core
    python bench/pair/heads.py eagle3           # one of them
    python bench/pair/heads.py --texts t.jsonl  # keeps the target's samples there

Each is written to its own folder next to this file, its training record to provenance.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from task import messages, problem
from train import FIRST_SEED, HERE, circumstances, note, with_environment

from sglang_smc.tools.distill import cli

PROMPTS = 8000
COMMON = ("--max-new-tokens", "160", "--held-out", "400")
LAYERS = ("--layer-ids", "0,2,3")
#: The tool's arguments for each course; a further course continues from the one before.
_SIXTEEN = ("--loss", "forward-kl", "--decay", "0.9", "--batch", "16")
_FIRST = (*_SIXTEEN, "--steps", "300", "--learning-rate", "0.004")
_FURTHER = (*_SIXTEEN, "--anchors", "32", "--learning-rate", "0.005", "--seed", "1")
RECIPES = {
    "eagle3": (("--new", "eagle3", *LAYERS, *_FIRST), (*_FURTHER, "--steps", "1000")),
    "dflash": (
        ("--new", "dflash", *LAYERS, "--num-layers", "2", "--block-size", "9", *_FIRST),
        (*_FURTHER, "--steps", "700"),
    ),
    "tuned": (
        (
            *("--draft", str(HERE / "draft"), "--loss", "chi2", "--held-out", "200"),
            *("--batch", "32", "--steps", "100", "--learning-rate", "0.002"),
        ),
    ),
}


def write_prompts(path: Path, count: int) -> None:
    """Write questions with seeds reserved for heads, below the held-out ones."""
    questions = (messages(problem(FIRST_SEED["heads"] + index)) for index in range(count))
    path.write_text("".join(json.dumps({"messages": asked}) + "\n" for asked in questions))


def train_one(name: str, prompts: Path, texts: Path, out: Path, steps: int | None) -> None:
    """Train one of `RECIPES` into ``out``; raise SystemExit if the tool fails."""
    own, seconds, said = out / name, 0.0, []
    files = ["--target", HERE / "target", "--out", own, "--prompts", prompts, "--texts", texts]
    for course in RECIPES[name]:
        words = [*COMMON, *course, *(["--steps", str(steps)] if steps else [])]
        words += ["--draft", str(own)] if said else []
        failed = cli.main([*words, *map(str, files)])
        if failed:
            raise SystemExit(failed)
        report = json.loads((own / "distill.json").read_text())
        seconds += report["training_seconds"]
        said.append(" ".join(words))
    note(out, name, entry_of(name, said, {**report, "training_seconds": round(seconds, 1)}))


def entry_of(name: str, said: list[str], made: dict[str, Any]) -> dict[str, object]:
    """Return an entry of provenance.json, from the tool's arguments and its last report."""
    return {
        **circumstances("heads", name),
        "recipe": "; then ".join(said).replace(f"{HERE}/", ""),
        "parameters": made["parameters"],
        "seeds": [FIRST_SEED["heads"], FIRST_SEED["heads"] + PROMPTS],
        "tokens": made["answer_tokens"],
        "wall_seconds": made["training_seconds"],
        "last_50_steps": {"loss": made["loss_last_50_steps"]},
    }


def main() -> None:
    """Train the heads that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RECIPES), help=", ".join(RECIPES))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the checkpoints")
    parser.add_argument("--texts", type=Path, help="keep the target's samples here")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="fewer, for a try")
    parser.add_argument("--steps", type=int, help="fewer steps, for a try")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, options.prompts)
        texts = options.texts or Path(folder) / "texts.jsonl"
        for name in options.names:
            train_one(name, prompts, texts, options.out, options.steps)


if __name__ == "__main__":
    with_environment()
    main()
