"""What breaks on a release of SGLang: `make upstream VERSION=0.5.23`, in seconds.

    PYTHONPATH=tests python3 -m contract.upstream 0.5.23

Without a version, on all that are supported. What this interpreter has installed is read where it
is, any other release from its wheel, downloaded unless it is in the cache; neither SGLang nor torch
is imported. A folder that holds `sglang/` may stand in a version's place. Status 1 where something
differs, or was not compared.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from contract.upstream import release, wheel
from contract.upstream.asked import everything
from contract.upstream.check import Finding, findings
from contract.upstream.tree import Tree

HEADINGS = {
    "contract": "Names in tests/contract/symbols.py and symbols_{older,newer}.py",
    "hooks": "Hooks of patches/",
    "names": "Names that our files import or mention",
    "calls": "Calls that our files make",
    "overrides": "Methods of ours that SGLang calls",
    "attributes": "Attributes that our files read",
    "requirements": "Fields in sglang_smc/server/requirements.py",
    "req_to_token": "Classes that keep the table that the worker exchanges",
    "to judge": "Somebody has to judge these, and write them into tests/server_arg_fields.py, "
    "tests/request_fields.py or tests/contract/judged.py",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", nargs="*", help="a version, or a folder that holds sglang/")
    compared = [compare(name) for name in parser.parse_args().release or release.supported()]
    return 0 if all(compared) else 1


def compare(name: str) -> bool:
    """Print what differs on one release; False where something does, or there is no such wheel."""
    try:
        root = _root(name)
    except wheel.NoWheelError as error:
        print(f"SGLang {name} was not compared: {error}\n")
        return False
    found = findings(Tree(root), everything(release.version_of(root)))
    print(f"SGLang {name}, in {root}", *report(found), sep="\n", end="\n\n")
    return not found


def _root(name: str) -> Path:
    if Path(name, "sglang").is_dir():
        return Path(name)
    present = release.installed()
    is_present = present is not None and release.version_of(present) == name
    return present if is_present else wheel.unpacked(name)


def report(found: list[Finding]) -> Iterator[str]:
    """What is found, by kind, each once, with where it stands."""
    for group, heading in HEADINGS.items():
        lines = sorted(finding for finding in found if finding.group == group)
        if lines:
            yield f"\n{heading}: {len(lines)}"
        for (what, upstream), same in groupby(lines, key=lambda line: (line.what, line.upstream)):
            places = [finding.ours for finding in same if finding.ours]
            yield f"  {what}"
            yield "      " + " <- ".join(filter(None, (upstream, _shortened(places))))
    yield f"\n{len(found)} differences" if found else "\nnothing differs"


def _shortened(places: list[str]) -> str:
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return ", ".join(places[:3]) + more


if __name__ == "__main__":
    sys.exit(main())
