"""Drafts for shorter texts, in another dtype, beside the shipped target: texts stay its own."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import prompt_ids
from pair.task import held_out
from tiny_models import smc_arguments

from sglang_smc.dtype import AUTO_DTYPE_ENV

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TARGET = str(PAIR / "target")
POSITIONS = 256  # that a draft says it has
#: Of prompts: up to the draft's length, across it, twice beyond it and further.
LENGTHS = (8, 230, 240, 250, 254, 255, 256, 257, 270, 300, 511, 512, 520, 700, 1000)
NEAR = 0.13  # nats: rounding in bfloat16 decides between tokens that are so close


def shortened(name: str, folder: Path, dtype: str) -> str:
    shutil.copytree(PAIR / name, folder)
    told = json.loads((folder / "config.json").read_text())
    told |= {"max_position_embeddings": POSITIONS, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(told))
    return str(folder)


def prompts() -> list[list[int]]:
    """Problems in a row, the last of them cut."""
    problems = [token for index in range(100) for token in prompt_ids(held_out(index))]
    return [problems[-length:] for length in LENGTHS]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("eagle3", "float16"),
        pytest.param("draft", "float32", marks=pytest.mark.nightly),
        pytest.param("dflash", "float16", marks=pytest.mark.nightly),
    ],
)
def test_beyond_its_length_a_draft_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    engine: Callable[..., Any],
    tmp_path: Path,
    name: str,
    dtype: str,
) -> None:
    """Red where it is refused, loaded in a dtype of its own, or its positions end.

    All at defaults, with `--dtype auto` as on a GPU.
    """
    monkeypatch.setenv(AUTO_DTYPE_ENV, "1")
    draft = shortened(name, tmp_path / "draft", dtype)
    sizes = {"context_length": None, "max_total_tokens": 60_000, "dtype": "auto"}
    running = engine(**smc_arguments(TARGET, draft, **sizes))
    found = {}
    for num_steps in (0, 3):
        smc = {"mode": "exact", "num_steps": num_steps}
        sampling = {"temperature": 0, "max_new_tokens": 24, "custom_params": {"smc": smc}}
        scores = {"return_logprob": True, "top_logprobs_num": 2}
        asked = {"input_ids": prompts(), "sampling_params": sampling, **scores}
        found[num_steps] = running.generate(**asked)
    for length, plain, answer in zip(LENGTHS, found[0], found[3], strict=True):
        assert all(math.isfinite(one[0]) for one in answer["meta_info"]["output_token_logprobs"])
        pairs = zip(plain["output_ids"], answer["output_ids"], strict=False)
        places = (place for place, (one, other) in enumerate(pairs) if one != other)
        if (place := next(places, None)) is not None:
            best, second = plain["meta_info"]["output_top_logprobs"][place]
            assert best[0] - second[0] < NEAR, (length, place)
