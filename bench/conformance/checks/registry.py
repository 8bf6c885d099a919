"""Keep all checks by feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from conformance.server import CheckedServer

#: How a ready-made server is started for a check: `run.VARIANTS` has the arguments.
BASE = "base"


class FeatureCheck(NamedTuple):
    """A feature of requests, and how a server shows that it honours it.

    Attributes:
        run: asks the server; returns what it measured. Raises WrongError for an answer that
            is not what was asked for, AbsentError where a kind of server has no such feature,
            `RefusedError` (HTTP 400) passes through.
        variant: of the ready-made server that has what the feature needs.
    """

    feature: str
    group: str
    run: Callable[[CheckedServer], str]
    variant: str = BASE

    @property
    def slug(self) -> str:
        return self.feature.replace(" ", "-").replace("`", "").replace(",", "")


CHECKS: list[FeatureCheck] = []


def check(
    feature: str, group: str, variant: str = BASE
) -> Callable[[Callable[[CheckedServer], str]], Callable[[CheckedServer], str]]:
    """Register the function below as the check of a feature."""

    def register(run: Callable[[CheckedServer], str]) -> Callable[[CheckedServer], str]:
        CHECKS.append(FeatureCheck(feature, group, run, variant))
        return run

    return register
