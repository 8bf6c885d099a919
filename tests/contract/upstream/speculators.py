"""What heads of `speculators` say of themselves, by release: read here, or refused.

Its releases are read as those of SGLang: an installed one where it is, others from a wheel. A class
of configurations is registered under a type, and its annotated fields are the keys of a head's
config.json.
"""

import ast
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from contract.upstream import release

from sglang_smc.drafts import heads, reading

RELEASES = ("0.5.0", "0.6.0", "0.7.0", "0.9.0")
_FORMATS = "sglang_smc/drafts/heads"
_BASE = "SpeculatorModelConfig"
# Classes within a configuration, with the fields that are read or are of no account: those of
# rules of acceptance are another program's.
_WITHIN = {
    "SpeculatorsConfig": "algorithm proposal_methods default_proposal_method verifier",
    "VerifierConfig": "name_or_path architectures",
    "GreedyTokenProposalConfig": "proposal_type speculative_tokens verifier_accept_k "
    "accept_tolerance",
}


class Settings(NamedTuple):
    """A class of configurations."""

    name: str
    type: str | None  # by which a head is told as its
    place: str  # file and line
    bases: list[str]
    fields: dict[str, str]  # file and line by name


def root_of(version: str) -> Path:
    """Return the folder that holds a release's `speculators/`, or raise NoWheelError."""
    spec = find_spec("speculators")
    if spec is not None and spec.origin and metadata.version("speculators") == version:
        return Path(spec.origin).parents[1]
    return release.unpacked_of("speculators", version)


def differs(version: str) -> bool:
    """Print what a release saves and nobody here has judged, and say whether there is something."""
    try:
        root = root_of(version)
    except release.NoWheelError as error:
        print(f"speculators {version} was not compared: {error}\n")
        return True
    found = findings(root)
    print(
        f"speculators {version}, in {root}\n", *(found or ["nothing differs"]), sep="\n", end="\n\n"
    )
    return bool(found)


def findings(root: Path) -> list[str]:
    """Return a line for each field, and each type of heads, that nobody has judged."""
    known = {one.name: one for one in _classes(root)}
    types = {one.type for one in known.values()}
    refused = {row.type for row in heads.REFUSED}
    lost = sorted({"eagle3", "dflash"} - types) + sorted(_WITHIN.keys() - known.keys())
    found = [f"{name} is in no class of a configuration: find where it is now" for name in lost]
    for one in known.values():
        if one.type is not None and one.type not in {*heads.BY_TYPE, *refused}:
            found.append(f"{one.place} {one.name}: say in REFUSED what heads of {one.type} are")
        judged = _judged(one)
        new = {} if judged is None else _fields(one, known)
        found += [
            f"{place} {one.name}.{name}: read it, or say that it concerns training alone"
            for name, place in new.items()
            if name not in (judged or ())
        ]
    return [f"{line}, in {_FORMATS}" for line in found]


def _judged(one: Settings) -> set[str] | None:
    """Return the fields of a class that are known here; None for one that is not read."""
    if one.type in heads.BY_TYPE:
        return reading.known_fields(one.type)
    return set(_WITHIN[one.name].split()) if one.name in _WITHIN else None


def _classes(root: Path) -> Iterator[Settings]:
    for file in sorted((root / "speculators").rglob("*.py")):
        text = file.read_text("utf-8")
        if "Config(" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                place = str(file.relative_to(root))
                yield Settings(
                    node.name,
                    _type(node),
                    f"{place}:{node.lineno}",
                    [ast.unparse(base) for base in node.bases],
                    {name: f"{place}:{line}" for name, line in _annotated(node)},
                )


def _type(node: ast.ClassDef) -> str | None:
    """Return the type that a class is registered under, as a decorator says."""
    told = " ".join(ast.unparse(one) for one in node.decorator_list)
    found = re.search(rf"{_BASE}\.register\('(\w+)'\)", told)
    return found and found[1]


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation):
            yield ast.unparse(one.target), one.lineno


def _fields(one: Settings, known: dict[str, Settings]) -> dict[str, str]:
    """Return the fields of a class with those that it inherits."""
    found = dict(one.fields)
    for base in one.bases:
        if base in known:
            found = _fields(known[base], known) | found
    return found
