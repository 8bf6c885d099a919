"""Which families of models run: each is started, asked in all modes, and held against transformers.

    python bench/support                   the families that have no result yet
    python bench/support --only 'Gemma 2'  these again
    python bench/support --publish         write the results and the tables of docs/support.md

An engine that dies takes its process with it, so families are tried in a process of their own,
which a new one follows where it has ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import provenance
from study import REPOSITORY, parser
from support.families import FAMILIES, VOCAB, Family
from support.page import write_page
from support.trial import Trial, try_family

RESULTS = REPOSITORY / "bench" / "results" / "support"
PAGE = REPOSITORY / "docs" / "support.md"
PATIENCE = 300  # seconds for a family


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    folder = options.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    found = read(folder / "trials.json")
    wanted = [
        f for f in FAMILIES if (f.name in options.only if options.only else f.name not in found)
    ]
    for number, family in enumerate(wanted, 1):
        trial = in_own_process(family)
        found[family.name] = trial
        print(f"{number}/{len(wanted)}  {family.name}: {trial.outcome}  {trial.note}", flush=True)
        write(folder / "trials.json", found)
    if options.publish:
        publish(found)


def _parser() -> Any:
    found = parser("support", __doc__ or "")
    found.add_argument("--only", nargs="+", default=[], metavar="FAMILY")
    found.add_argument("--publish", action="store_true", help="write results and the page")
    found.set_defaults(output_dir=Path("support-output"))
    return found


def read(path: Path) -> dict[str, Trial]:
    """What an earlier run has found, by family."""
    if not path.exists():
        return {}
    return {one["family"]: Trial(**one) for one in json.loads(path.read_text())["families"]}


def write(path: Path, found: dict[str, Trial], **more: Any) -> None:
    rows = [found[family.name]._asdict() for family in FAMILIES if family.name in found]
    path.write_text(json.dumps({**more, "families": rows}, indent=1) + "\n")


def publish(found: dict[str, Trial]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    write(RESULTS / "support.json", found, provenance=provenance({"vocabulary": VOCAB}))
    write_page(PAGE, found)


def in_own_process(family: Family) -> Trial:
    """What came of a family, whatever becomes of the process that tries it."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "trial.json"), Path(folder, "log")
        process = multiprocessing.get_context("spawn").Process(
            target=_try, args=(family, Path(folder, "model"), answer, log)
        )
        process.start()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
        if answer.exists():
            return Trial(**json.loads(answer.read_text()))
        return Trial(family.name, "not here", _last_error(log))


def _try(family: Family, folder: Path, answer: Path, log: Path) -> None:
    os.setsid()  # what an engine ends, it ends with its group
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    trial = try_family(family, folder)
    answer.write_text(json.dumps(trial._asdict()))


def _last_error(log: Path) -> str:
    """The last line that names an exception."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    named = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return named[-1].strip()[:200] if named else "it did not answer"
