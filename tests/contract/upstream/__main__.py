"""What breaks on a release of SGLang: `make upstream VERSION=0.5.23`, in seconds.

    PYTHONPATH=tests python3 -m contract.upstream 0.5.23

Without a version, on all that are supported, and with the releases of speculators that heads are
read of. What this interpreter has installed is read where it
is, any other release from its wheel, downloaded unless it is in the cache; neither SGLang nor torch
is imported. A folder that holds `sglang/` may stand in a version's place. Status 1 where something
differs, or was not compared.
"""

import argparse
import gc
import sys
from collections.abc import Iterator
from itertools import groupby

from contract.upstream import ours, release, speculators
from contract.upstream.check import Asked, Finding, findings
from contract.upstream.judged import FIELDS, MAY_KEEP_TABLE, METHODS
from contract.upstream.relied import symbols
from contract.upstream.sglang import Tree

HEADINGS = {
    "relied on": "Follow these in our code, then in tests/contract/upstream/relied.py",
    "hooks": "Hooks of patches/: write them for the function as it is now",
    "names": "Names that our files import or mention: find where they are now",
    "calls": "Calls that our files make: pass what is taken now",
    "overrides": "Methods of ours that SGLang calls: take what it passes now",
    "attributes": "Attributes that our files read: find where they are now",
    "req_to_token": "Classes that keep the table that the worker exchanges: have it exchanged "
    "there too, or list them in tests/contract/upstream/judged.py",
    "to judge": "Judge what these mean to SMC: honour or refuse them; silent once the release is "
    "in sglang_smc.upstream.SUPPORTED",
    "changed": "Read these against the hooks that count on them; silent once the release is in "
    "sglang_smc.upstream.SUPPORTED",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("release", nargs="*", help="a version, or a folder that holds sglang/")
    given = parser.parse_args().release
    trees = {}
    for name in given or release.supported():
        try:
            trees[name] = Tree(release.root_of(name))
        except release.NoWheelError as error:
            print(f"SGLang {name} was not compared: {error}\n")
    differ = [compare(name, tree) for name, tree in trees.items()]
    if not given:
        differ += [speculators.differs(name) for name in speculators.RELEASES]
    return int(any(differ) or len(trees) < len(given or release.supported()))


def compare(name: str, tree: Tree) -> bool:
    """Print what differs on one release, and say whether something does."""
    version = release.version_of(tree.root)
    last = release.supported()[-1]
    is_known = version in release.supported()
    known = None if is_known else Tree(release.root_of(last))
    found = findings(tree, everything(version), known)
    print(f"SGLang {name}, in {tree.root}", *report(found), sep="\n", end="\n\n")
    if not is_known:
        print(f"SGLang {version} is not in sglang_smc.upstream.SUPPORTED: compared with {last}")
    return bool(found)


def everything(version: str) -> Asked:
    """What is relied on, our files, and what is to be judged, as they are for a release."""
    of = release.families(version)
    return Asked(symbols(of), ours.sources(of), FIELDS, METHODS, MAY_KEEP_TABLE)


def report(found: list[Finding]) -> Iterator[str]:
    """What is found, by kind, each once, with where it stands."""
    for group, heading in HEADINGS.items():
        lines = sorted(finding for finding in found if finding.group == group)
        if lines:
            yield f"\n{heading}: {len(lines)}"
        for (what, upstream), same in groupby(lines, key=lambda line: (line.what, line.upstream)):
            places = [finding.ours for finding in same if finding.ours]
            more = [f"and {len(places) - 3} more"] if len(places) > 3 else []
            yield f"  {what}"
            yield "      " + " <- ".join(filter(None, (upstream, ", ".join(places[:3] + more))))
    yield f"\n{len(found)} differences" if found else "\nnothing differs"


if __name__ == "__main__":
    gc.disable()  # syntax trees are many, and hold no circle
    sys.exit(main())
