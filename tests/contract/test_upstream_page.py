"""docs/upstream.md has a text for each hook, and names places that are there."""

import re
from pathlib import Path

import pytest
from contract.upstream import ours, release
from contract.upstream.tree import Tree

from sglang_smc import upstream
from sglang_smc.server import hooks

PAGE = (Path(__file__).parents[2] / "docs" / "upstream.md").read_text()
PROSE = re.sub(r"```.*?```", "", PAGE, flags=re.S)
PLACE = re.compile(r"`(srt/[\w/]+)\.py`((?:(?:,|\s+and)\s+`[\w.]+`)+)")


def places() -> list[str]:
    """What the page names behind a file, as dotted names."""
    return [
        f"sglang.{path.replace('/', '.')}.{name}"
        for path, names in PLACE.findall(PROSE)
        for name in re.findall(r"`([\w.]+)`", names)
    ]


def test_every_hook_has_a_text() -> None:
    retired = re.findall(r"\*\*Retires here:\*\*(.*?)(?:\n\n|\Z)", PROSE, re.S)
    named = {name for text in retired for name in re.findall(r"`([\w.]+)`", text)}
    groups = (hooks.FLAGS, hooks.DRAFTS, hooks.SMC, hooks.ROUTES)
    files = {f"patches/{name}.py" for group in groups for name in group.modules}
    own = [source for source in ours.sources(newer=True) if source.path in files]
    targets = [hook.target for source in own for hook in ours.hooks(source)]
    assert len(targets) > 15
    missing = [t for t in targets if not any(t.endswith(f".{name}") for name in named)]
    assert missing == []


def test_places_are_found_on_the_page() -> None:
    assert "sglang.srt.managers.schedule_policy.PrefillAdder.__init__" in places()
    assert len(places()) > 20


@pytest.mark.skipif(not upstream.IS_NEWER, reason="the texts are about the newer releases")
def test_places_are_there() -> None:
    root = release.installed()
    assert root is not None
    tree = Tree(root)
    assert [place for place in places() if tree.find(place) is None] == []
