"""Names that only some of the supported releases of SGLang have.

`{"0.5.17": "a b", "0.5.22 0.5.23": "c"}`: a and b went, c came. All other names that somebody has
looked at are in every release. Both are checked on the release that is installed, so that a name
which is misspelled, or which came or went unnoticed, fails on one of them.
"""

from collections.abc import Collection, Iterable


def names(some: dict[str, str]) -> list[str]:
    """All of them."""
    return [name for each in some.values() for name in each.split()]


def contradictions(
    present: Collection[str], known: Iterable[str], some: dict[str, str], release: str
) -> list[str]:
    """What is said of SGLang's names that is not so in ``release``, which has those ``present``.

    ``known`` are the names that somebody has looked at.
    """
    listed = list(known)
    twice = [name for name in listed if listed.count(name) > 1]
    here = {
        name for where, each in some.items() if release in where.split() for name in each.split()
    }
    expected = (set(listed) - set(names(some))) | here
    return sorted(
        [
            *(f"{name} was looked at twice" for name in set(twice)),
            *(f"nobody has looked at {name}" for name in set(present) - set(listed)),
            *(f"{name} is not in {release}" for name in expected - set(present)),
            *(f"{name} is in {release}, too" for name in (set(listed) & set(present)) - expected),
            *(
                f"nobody has looked at {name}, of some releases"
                for name in set(names(some)) - set(listed)
            ),
        ]
    )
