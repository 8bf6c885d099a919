"""Pages, manifests and the table of published drafts name one draft for one target."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_smc_tools.published import ROWS, drafts_of

ROOT = Path(__file__).parents[2]
PLACES = ("README.md", "docs/*.md", "deploy/*", "examples/**/*.md")
HUB = r"[\w.-]+/[\w.-]+"
TARGET = re.compile(rf"--model-path[ =]({HUB})")
DRAFT = re.compile(rf"--speculative-draft-model-path[ =]({HUB})")


def commands(text: str) -> Iterator[str]:
    """Launch lines, with what continues them."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return (line for line in joined.splitlines() if "launch_server" in line)


def named_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Targets and drafts of a hub; a folder of this repository is none."""
    for line in commands(path.read_text()):
        target = TARGET.search(line)
        draft = DRAFT.search(line)
        if target and draft and not (ROOT / target[1]).exists() and any(drafts_of(target[1])):
            yield target[1], draft[1]


FOUND = [
    (path, *pair)
    for place in PLACES
    for path in sorted(ROOT.glob(place))
    if path.is_file()
    for pair in named_pairs(path)
]


@pytest.mark.parametrize(
    ("path", "target", "draft"), FOUND, ids=lambda one: str(one).split("/")[-1]
)
def test_a_command_names_the_draft_of_the_table(path: Path, target: str, draft: str) -> None:
    """Or a smaller model of the target's publisher."""
    if target.split("/")[0] == draft.split("/")[0]:
        return
    assert draft in [one.draft for one in drafts_of(target)], path.name


def test_the_first_pair_fits_as_it_is_published() -> None:
    """Without a licence to accept, in bfloat16, at all of the target's positions."""
    target, draft = next(named_pairs(ROOT / "README.md"))
    row = next(one for one in ROWS if one.draft == draft)
    assert target == "Qwen/Qwen3-8B" and row in drafts_of(target)
    assert row.runs and (row.dtype, row.context) == ("bfloat16", 40960)
