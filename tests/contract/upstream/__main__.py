"""What breaks on a release of SGLang: `make upstream VERSION=0.5.23`, in seconds.

    PYTHONPATH=tests python3 -m contract.upstream 0.5.23

Without a version, on all that are supported. What this interpreter has installed is read where it
is, any other release from its wheel, downloaded unless it is in the cache; neither SGLang nor torch
is imported. A folder that holds `sglang/` may stand in a version's place. Status 1 where something
differs, or was not compared.
"""

import argparse
import gc
import sys
from collections.abc import Iterator
from itertools import groupby

from contract.upstream import ours, release
from contract.upstream.check import SERVER_ARGS, Asked, Finding, Judged, findings
from contract.upstream.judged import MAY_KEEP_TABLE, METHODS
from contract.upstream.relied import symbols
from contract.upstream.sglang import Tree
from request_fields import GENERATE_REQUEST, SAMPLING_PARAMS
from server_arg_fields import LOOKED_AT

JUDGED = "tests/server_arg_fields.py, tests/request_fields.py or tests/contract/upstream/judged.py"
HEADINGS = {
    "relied on": "Follow these in our code, then in tests/contract/upstream/relied.py",
    "hooks": "Hooks of patches/: write them for the function as it is now",
    "names": "Names that our files import or mention: find where they are now",
    "calls": "Calls that our files make: pass what is taken now",
    "overrides": "Methods of ours that SGLang calls: take what it passes now",
    "attributes": "Attributes that our files read: find where they are now",
    "req_to_token": "Classes that keep the table that the worker exchanges: have it exchanged "
    "there too, or list them in tests/contract/upstream/judged.py",
    "to judge": f"Say what these mean to SMC in {JUDGED}, or take them out where they are gone",
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
    return int(any(differ) or len(trees) < len(given or release.supported()))


def compare(name: str, tree: Tree) -> bool:
    """Print what differs on one release, and say whether something does."""
    version, last = release.version_of(tree.root), release.supported()[-1]
    is_known = version in release.supported()
    known = None if is_known else Tree(release.root_of(last))
    found = findings(tree, everything(version), known)
    print(f"SGLang {name}, in {tree.root}", *report(found), sep="\n", end="\n\n")
    if not is_known:
        print(f"SGLang {version} is not in sglang_smc.upstream.SUPPORTED: compared with {last}")
    return bool(found)


def everything(version: str) -> Asked:
    """What is relied on, our files, and what has been judged, as they are for a release."""
    of = release.families(version)
    every = ours.sources(frozenset(release.FAMILIES))  # with the records of all families
    refused = [use.path for s in every if s.is_product for use in ours.requirement_fields(s)]
    fields = {
        SERVER_ARGS: [*LOOKED_AT, *refused],
        "sglang.srt.managers.io_struct.GenerateReqInput": GENERATE_REQUEST,
        "sglang.srt.sampling.sampling_params.SamplingParams": SAMPLING_PARAMS,
    }
    judged = (
        *(Judged(path, frozenset(names), "field") for path, names in fields.items()),
        *(Judged(path, frozenset(names.split()), "method") for path, names in METHODS.items()),
    )
    return Asked(symbols(of), ours.sources(of), judged, MAY_KEEP_TABLE)


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
