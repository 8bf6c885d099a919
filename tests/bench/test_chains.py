"""The study of chains from one pass: what is compared with what, and that it runs and publishes."""

from pathlib import Path
from typing import Any

import pytest
from chains.run import PARTICLES, ChainStudy, as_sglang, cells, sampled
from pair.task import held_out
from speed_stand_ins import Runner

from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig


def reply(engine: str, index: int, params: dict[str, Any]) -> dict[str, Any]:
    """Two tokens a pass with one chain, one more with each further one; half for likeliest ones."""
    smc = params["custom_params"]["smc"]
    tokens = 1 + smc["num_particles"] / (2 if "draft_temperature" in smc else 1)
    info = {
        "completion_tokens": 37,
        "finish_reason": {"type": "stop"},
        "spec_verify_ct": 36 / tokens,
    }
    text = f"#### {held_out(index).number}"
    return {"text": text, "output_ids": [5] * 36 + [index], "meta_info": info}


def test_the_server_takes_every_setting_and_no_file_is_written_twice() -> None:
    every = cells()
    for cell in every:
        config = request_config(SMCConfig(), {"smc": cell.smc})
        assert (config.mode, config.num_particles) == ("exact", cell.num_particles)
    assert len({cell.slug for cell in every}) == len(every) == 4 * len(PARTICLES) + 2


def test_each_draft_is_compared_with_what_sglang_keeps_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Runner(ChainStudy, tmp_path, monkeypatch, reply, ("--problems", "4"))
    assert bench("--publish") == 0
    found = ChainStudy.report.read(bench.folder)
    of = {(row.label, row.temperature): row for row in found}
    for draft, mean in (("DFlash", 9 / 1.5), ("DSpark", 9 / 2)):
        row = of[f"{draft} N=8", 1.0]
        assert row.to_sglang is not None and row.to_one_chain is not None
        assert row.to_sglang.mean == pytest.approx(mean)
        assert row.to_one_chain.mean == pytest.approx(9 / 2)
        assert as_sglang(draft, 1.0).label in {label for label, _ in of}
    assert sampled("DSpark", 0.7, 1) == as_sglang("DSpark", 0.7) != as_sglang("DFlash", 0.7)
