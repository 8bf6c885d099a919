"""Which families of models run: each is started, asked in all modes, and held against transformers.

    python bench/support                   the families that have no result yet
    python bench/support --only 'Gemma 2'  these again
    python bench/support --publish         write the results and the tables of docs/support.md

An engine that dies takes its process with it, so each family is tried in one of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from results import provenance
from study import GOES_ON, PUBLISHED, REPOSITORY, main_of, parser, positive, write_between
from support.families import FAMILIES, VOCAB, Family
from support.trial import Trial, try_family, try_plain

RESULTS = PUBLISHED / "support" / "support.json"
PAGE = REPOSITORY / "docs" / "support.md"
MARKS = "<!-- made by bench/support -->", "<!-- end -->"
WORDS = {"run": "yes", "refused": "refused", "not here": "not here", "failed": "**fails**"}
PATIENCE = 300  # seconds per family
#: Flags of a family's own process.
ATTEMPTS = {"--try": try_family, "--plain": try_plain}


def main(argv: Sequence[str] | None = None) -> int:
    """Try the families; return exit status 0 if it completes."""
    made = parser("support", (__doc__ or "").splitlines()[0])
    made.add_argument("--only", nargs="+", default=[], metavar="FAMILY")
    made.add_argument("--jobs", type=positive, default=1, help="families at a time")
    made.add_argument("--publish", action="store_true", help="write results and the page")
    for name in ATTEMPTS:
        made.add_argument(name, metavar="FAMILY", help=argparse.SUPPRESS)
    options = made.parse_args(argv)
    return main_of(lambda: run(options), GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    for flag, attempt in ATTEMPTS.items():
        if name := vars(options)[flag.strip("-")]:
            (family,) = (family for family in FAMILIES if family.name == name)
            trial = attempt(family, options.output_dir)
            (options.output_dir / "trial.json").write_text(json.dumps(trial._asdict()))
            return
    path = options.output_dir / "trials.json"
    found = read(path)
    wanted = [
        f for f in FAMILIES if (f.name in options.only if options.only else f.name not in found)
    ]
    with ThreadPoolExecutor(options.jobs) as jobs:
        for number, trial in enumerate(jobs.map(in_own_process, wanted), 1):
            found[trial.family] = trial
            print(f"{number}/{len(wanted)}  {'  '.join(trial)}", flush=True)
            write(path, found)
    if options.publish:
        write(RESULTS, found, provenance=provenance({"vocabulary": VOCAB}))
        write_between(PAGE, MARKS, tables(found))


def read(path: Path) -> dict[str, Trial]:
    """Return the trials of an earlier run, by family."""
    if not path.exists():
        return {}
    return {one["family"]: Trial(**one) for one in json.loads(path.read_text())["families"]}


def write(path: Path, found: dict[str, Trial], **more: Any) -> None:
    """Write the trials, in the families' order."""
    rows = [found[family.name]._asdict() for family in FAMILIES if family.name in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**more, "families": rows}, indent=1) + "\n")


def tables(found: dict[str, Trial]) -> str:
    """Return a table for each kind of attention."""
    parts = []
    for attention, families in groupby(FAMILIES, key=lambda family: family.attention):
        parts += [f"**{attention.capitalize()}**\n", "| families | target | draft | |"]
        parts += ["| --- | --- | --- | --- |", *_rows(list(families), found), ""]
    return "\n".join(parts).rstrip()


def _rows(families: Sequence[Family], found: dict[str, Trial]) -> Iterator[str]:
    """Yield a row for all families with the same result, in the order of the first ones."""
    named: dict[tuple[str, str, str], list[str]] = {}
    for trial in (found[family.name] for family in families if family.name in found):
        named.setdefault((trial.target, trial.draft, trial.note), []).append(trial.family)
    for (target, draft, note), names in named.items():
        yield f"| {'; '.join(names)} | {WORDS[target]} | {WORDS[draft]} | {note} |"


def in_own_process(family: Family) -> Trial:
    """Return the trial of a family, run in a process of its own, which may fail."""
    with tempfile.TemporaryDirectory() as name:
        trial, error = _run("--try", family, Path(name))
        if trial is None:  # test whether SMC is the cause
            trial, of_sglang = _run("--plain", family, Path(name))
            if trial is None:
                return Trial(family.name, "not here", "not here", of_sglang)
            trial = trial._replace(note=error)
        return trial


def _run(flag: str, family: Family, folder: Path) -> tuple[Trial | None, str]:
    """Return the trial, or None, and the last error."""
    answer, log = folder / "trial.json", folder / flag
    command = [sys.executable, str(Path(__file__).parent), flag, family.name]
    with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*command, "--output-dir", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=PATIENCE,
            start_new_session=True,  # an engine that fails ends its process group
            check=False,
        )
    found = Trial(**json.loads(answer.read_text())) if answer.exists() else None
    return found, last_error(log)


def last_error(log: Path) -> str:
    """Return the last line that names an exception."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    named = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return named[-1].strip()[:200] if named else "it did not answer"
