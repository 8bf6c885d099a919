"""``sglang-smc compile``: at which sizes it compiles, and what it says.

It imports kernels, which tests/kernels has interpreted: so none is imported as tests are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sglang_smc.command import cli

if TYPE_CHECKING:
    from sglang_smc.ops import compiling
    from sglang_smc.ops.check_cases import CheckSizes

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TARGET = ["compile", "--target", str(PAIR / "target")]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CheckSizes]:
    """The sizes that are compiled at; nothing is compiled."""
    from sglang_smc.ops import compiling

    found: list[CheckSizes] = []

    def compile_checks(
        device: Any, jobs: Sequence[compiling.Job], told: Callable[[], Any], processes: int
    ) -> list[compiling.Variant]:
        assert device == compiling.DEVICES["h200"] and 1 <= processes <= 4
        found.extend(job.sizes for job in jobs if job.check == "ledger")
        return [compiling.Variant("sample._draw", "key")]

    monkeypatch.setattr(compiling, "compile_checks", compile_checks)
    return found


def test_it_compiles_at_the_sizes_of_a_server(
    asked: list[CheckSizes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Red where a check of a start, or a number of particles of an adaptive one, is left out."""
    assert cli.main([*TARGET, "--draft", str(PAIR / "draft"), "--device", "H200"]) == 0
    (only,) = asked
    assert (only.num_particles, only.num_steps) == (8, 8)
    assert {one.columns for one in only.passes} == {(9,), (1, 2)}
    said = capsys.readouterr().out
    assert "1 variants of kernels for h200 (sm_90), N = 8, K = 8" in said and "CPU s, in /" in said
    asked.clear()
    adaptive = ["--device", "h200", "--mode", "exact", "--num-particles", "4", "--num-steps", "16"]
    assert cli.main([*TARGET, "--draft", "ngram", *adaptive]) == 0
    assert [one.num_particles for one in asked] == [4, 2, 1]
    assert {one.columns for of in asked for one in of.passes} == {(17,)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*TARGET, "--device", "mi300"], "--device is 'mi300'; allowed: a100, h100, h200"),
        (
            ["compile", "--target", "/nowhere", "--device", "h200"],
            "'/nowhere' has no configuration",
        ),
        ([*TARGET, "--device", "h200", "--num-particles", "2000"], "num-particles is 2000"),
    ],
)
def test_it_says_what_is_allowed(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err
