"""What breaks on another release of SGLang: `make upstream VERSION=0.5.23`, in seconds.

    PYTHONPATH=tests python3 -m contract.upstream 0.5.23

Downloads the wheel, unless it is in the cache, and reads its source; neither SGLang nor torch is
installed or imported. A folder that holds `sglang/` may stand in a version's place. Status 1 where
something differs.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from contract.upstream.asked import everything
from contract.upstream.check import Finding, findings
from contract.upstream.tree import Tree
from contract.upstream.wheel import unpacked

HEADINGS = {
    "contract": "Names in tests/contract/symbols.py",
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
    parser.add_argument("release", help="a version, or a folder that holds sglang/")
    release = parser.parse_args().release
    is_folder = Path(release, "sglang").is_dir()
    root = Path(release) if is_folder else unpacked(release)
    found = findings(Tree(root), everything())
    print(f"SGLang {release}, in {root}")
    print("\n".join(report(found)))
    return 1 if found else 0


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
