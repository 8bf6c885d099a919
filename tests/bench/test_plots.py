"""The picture is drawn for every set of rows that the demo can end with."""

from pathlib import Path

import pytest
from matplotlib.image import imread
from plots import plot_rows
from results import Row, wilson


def row(name: str, per_pass: float | None, ess_share: float | None) -> Row:
    return Row(
        name=name,
        accuracy=wilson(9, 10),
        tokens_per_target_pass=per_pass,
        tokens_per_second=100.0,
        seconds_to_first=0.1,
        seconds_per_request=1.0,
        ess_share=ess_share,
        resample_rate=ess_share,
        completion_tokens=100,
        seconds=1.0,
    )


AR, SMC = row("AR, target", 1.0, None), row("SMC", 6.8, 0.5)
AUTO, EXACT = row("SMC, auto", 6.2, None), row("SMC, exact", 5.7, None)
DRAFT = row("AR, draft", None, None)


@pytest.mark.parametrize("rows", [[AR, SMC], [AR, SMC, AUTO, EXACT, DRAFT]], ids=len)
def test_a_picture_is_written(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "comparison.png"
    plot_rows(rows, path, title="n=10", hardware="here")
    height, width, _ = imread(path).shape
    assert width > height > 400
