"""Write a draft's checkpoint as stock SGLang or speculators reads it: `sglang-smc convert`."""

from __future__ import annotations

import argparse
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sglang_smc.command.program import command
from sglang_smc.drafts import checkpoint, heads, reading
from sglang_smc.drafts.heads.base import Config, architecture
from sglang_smc.drafts.heads.dflash import OWN_LM_HEAD
from sglang_smc.drafts.heads.dspark import DSPARKS
from sglang_smc.drafts.heads.eagle3 import EAGLE3, QK_NORM
from sglang_smc_tools import speculators_format
from sglang_smc_tools.plan.shapes import contents

# What stock SGLang has no part for, by the setting that says so.
_OURS = {
    "norm_before_residual": "a norm before the residual",
    QK_NORM: "norms of queries and keys",
    OWN_LM_HEAD: "an LM head of its own",
}
_NOTES = (reading.SPECULATORS, "speculators_config", reading.UNKNOWN)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sglang-smc convert",
        description="Write the configuration of a draft that speculators or EAGLE's authors saved "
        "with the keys of stock SGLang, beside links to its weights. SMC servers need no such "
        "copy. With --verifier, write what speculators and vLLM load.",
    )
    made.add_argument("source", type=Path, help="folder of the draft's checkpoint")
    made.add_argument("target", type=Path, help="folder to write, new or empty")
    made.add_argument(
        "--verifier",
        metavar="MODEL",
        help="folder of the target that the draft was made for: write the format of speculators, "
        "which reads the target's tables from there",
    )
    made.add_argument("--copy", action="store_true", help="copy files instead of linking them")
    return made


def run(options: argparse.Namespace) -> None:
    """Write the checkpoint; raise ValueError for one that stock SGLang cannot compute."""
    source = options.source
    target = options.target
    if options.verifier is None:
        told = converted(source)
    else:
        told = for_speculators(source, options.verifier)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty. Give a new folder.")
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.name == checkpoint.CONFIG or file.is_dir():
            continue
        place = target / file.name
        if options.verifier is not None and _has_other_names(file):
            tensors = {speculators_format.renamed(n): w for n, w in load_file(file).items()}
            save_file(tensors, place, metadata={"format": "pt"})
            continue
        shutil.copy2(file, place) if options.copy else place.symlink_to(file.resolve())
    text = json.dumps(told, indent=2, sort_keys=True)
    (target / checkpoint.CONFIG).write_text(f"{text}\n")
    name = architecture(told)
    reader = f"--speculative-algorithm {_algorithm(told)}"
    print(f"{target}: {name}, for {reader if options.verifier is None else 'speculators'}")


def for_speculators(source: Path, verifier: str) -> dict[str, Any]:
    """Return a draft's configuration for speculators; raise ValueError if there is none."""
    target = contents(verifier)
    told, found = _checked(source)
    if (source / checkpoint.MASK).exists():
        found.append(f"has a {checkpoint.MASK}, which speculators does not read")
    if list(source.glob("*.bin")) and not list(source.glob("*.safetensors")):
        found.append("has pickled weights; save them as safetensors")
    wanted: dict[str, Any] = {}
    try:
        wanted = speculators_format.to_speculators(told, target, verifier)
    except ValueError as error:
        found.append(str(error))
    _refuse(source, found)
    return wanted


def _has_other_names(file: Path) -> bool:
    """Return whether a file has weights that speculators calls otherwise."""
    if file.suffix != ".safetensors":
        return False
    with safe_open(file, framework="pt") as tensors:
        return any(speculators_format.renamed(name) != name for name in tensors.keys())  # noqa: SIM118


def converted(source: Path) -> dict[str, Any]:
    """Return a draft's configuration for stock SGLang; raise ValueError if there is none."""
    told, found = _checked(source)
    found += [
        f"has {what} ({name}), which stock SGLang has no part for: an SMC server loads it as it is"
        for name, what in _OURS.items()
        if told.get(name)
    ]
    _refuse(source, found)
    return {name: value for name, value in told.items() if name not in _NOTES}


def _checked(source: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a draft's configuration with SGLang's keys, and what is wrong with the draft."""
    if not source.is_dir():
        raise ValueError(f"{source} is no folder. Give that of a draft's checkpoint.")
    shapes = checkpoint.shapes_in(source)
    told = reading.normalized(contents(source), shapes or None)
    try:
        wanted = reading.expected(told)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if wanted is None:
        name = told.get(reading.SPECULATORS) or architecture(told) or "no architecture"
        raise ValueError(
            f"{source} is a checkpoint of {name}; allowed: heads of "
            f"{', '.join(heads.BY_TYPE)}. Others are not translated."
        )
    if not shapes:
        raise ValueError(f"{source} has no weights, *.safetensors or *.bin. Download them.")
    found = [*reading.problems(told, shapes, partial(checkpoint.tensor_in, source))]
    found += [
        f"sets {name}, which nothing here reads: take it out of config.json if it concerns "
        "training alone"
        for name in told.get(reading.UNKNOWN, ())
    ]
    return told, found


def _refuse(source: Path, found: list[str]) -> None:
    if found:
        raise ValueError("; ".join(f"{source} {what}" for what in found) + ".")


def _algorithm(config: Config) -> str:
    name = architecture(config)
    if name == EAGLE3:
        return "EAGLE3"
    return "DSPARK" if name in DSPARKS else "DFLASH"


main = command(parser, run)
