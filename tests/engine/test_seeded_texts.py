"""A seeded text is the same on every supported release of SGLang, and stays so.

`seeded_texts.json` was written on the oldest. Where a release has other logits, in more than the
last bits, it has other texts, and this page of answers has to be written anew, with a reason:

    PYTHONPATH=tests/support python tests/engine/test_seeded_texts.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tiny_models import ENGINE_DEFAULTS, make_tiny_model, smc_arguments

pytestmark = pytest.mark.engine

RECORD = Path(__file__).with_suffix("").with_name("seeded_texts.json")
MODEL = {"vocab_size": 64, "scale": 0.5}
SERVER = {"num_particles": 4, "num_steps": 3, "max_lag": 12}
PROMPTS = [[5, 9, 3], [7] * 9, [11, 4, 30, 21, 8]]
#: What a request asks for, beside its seed: `custom_params.smc` and sampling parameters.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "smc": ({}, {}),
    "smc as in the paper": ({"evidence_threshold": 0, "ess_threshold": 1.0}, {}),
    "smc at each token": ({"resample_at": "token", "resampling_method": "multinomial"}, {}),
    "power": ({"power": 2.0, "proposal": "draft"}, {}),
    "exact": ({"mode": "exact"}, {}),
    "exact of two": ({"mode": "exact", "num_particles": 2, "num_steps": 2}, {}),
    "auto": ({"mode": "auto", "evidence_threshold": 0.5}, {}),
    "filters": ({"mode": "exact"}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    "top-k": ({"evidence_threshold": 0}, {"top_k": 4, "temperature": 1.7}),
    "edits": ({}, {"frequency_penalty": 0.4, "logit_bias": {"9": 2.0}, "min_new_tokens": 8}),
    "stop": ({}, {"stop": ["t4"], "stop_token_ids": [12]}),
}
SAMPLES = 3  # of the first prompt, with one seed
REQUESTS = [(name, seed) for name in ASKED for seed in range(len(PROMPTS))]


def params(name: str, seed: int) -> dict[str, Any]:
    smc, others = ASKED[name]
    own = {"temperature": 0.8, "max_new_tokens": 20, "sampling_seed": seed}
    return {**own, "custom_params": {"smc": smc}, **others}


def record(engine: Any) -> dict[str, list[list[int]]]:
    """The tokens of each answer, by what was asked for; nearly all requests run at once."""
    prompts = PROMPTS * len(ASKED)
    sampling = [params(*each) for each in REQUESTS]
    found = engine.generate(input_ids=prompts, sampling_params=sampling)
    texts: dict[str, list[list[int]]] = {name: [] for name in ASKED}
    for (name, _), answer in zip(REQUESTS, found, strict=True):
        texts[name].append(answer["output_ids"])
    samples = engine.generate(
        input_ids=PROMPTS[0], sampling_params={**params("exact", 0), "n": SAMPLES}
    )
    return {**texts, "samples": [answer["output_ids"] for answer in samples]}


def test_seeded_texts_are_those_that_were_written_down(
    engine: Callable[..., Any], tiny: Callable[..., str]
) -> None:
    pair = tiny(seed=1, **MODEL), tiny(seed=2, **MODEL)
    assert record(engine(**smc_arguments(*pair, **SERVER))) == json.loads(RECORD.read_text())


def main() -> None:
    import sglang

    with TemporaryDirectory() as folder:
        pair = (make_tiny_model(f"{folder}/{seed}", seed=seed, **MODEL) for seed in (1, 2))
        engine = sglang.Engine(**{**ENGINE_DEFAULTS, **smc_arguments(*pair, **SERVER)})
        texts = record(engine)
        engine.shutdown()
    RECORD.write_text(
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in texts.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main()
