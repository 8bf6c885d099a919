"""Blocks whose rows depend on the tokens of a chain, in SGLang's scheduler.

Texts and evidence are those of rounds over transformers, in which heads draft by the classes that
define them: a state of another particle, or a candidate of another row, changes both. Seeds are
fixed, so that nothing is left to chance; `test_golden.py` asks more of engines, nightly.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_rounds import CheckpointRounds, check
from head_laws import DFLASH2, DOMINO, GATED, LILICORR, NARROW, Draft
from in_process import Server
from model_families import make_model
from tiny_models import smc_arguments

from sglang_smc import upstream

NUM_STEPS = 3
SETTINGS: dict[str, Any] = {"num_particles": 3, "num_steps": NUM_STEPS, "max_lag": 16}
#: What requests ask for in turn: of chains that are verified together, one by one, and weighed.
ASKED: list[dict[str, Any]] = [{"mode": "exact"}, {"mode": "exact", "num_particles": 1}, {}]
PROMPTS = [[5 + seed, *range(2, 2 + 3 * seed)] for seed in range(4 * len(ASKED))]
RELEASES = {DFLASH2: upstream.NEWER, DOMINO: upstream.NEWER, LILICORR: upstream.NEWEST}


@pytest.mark.parametrize("kind", [GATED, DFLASH2, DOMINO, LILICORR])
def test_chains_are_drafted_by_the_law_of_their_head(
    kind: str, start: Callable[..., Server], tmp_path: Path
) -> None:
    if not RELEASES.get(kind, upstream.EVERY).is_installed:
        pytest.skip("older releases have no class of it")
    target = make_model(tmp_path / "target", "llama", 3)
    draft = make_model(tmp_path / "draft", kind, 2, target)
    params = [
        {
            "temperature": 1.0,
            "max_new_tokens": 12,
            "sampling_seed": seed,
            "custom_params": {"smc": ASKED[seed % len(ASKED)]},
        }
        for seed in range(len(PROMPTS))
    ]
    known = {"drafts_all": False} if kind in NARROW else {}
    law = Draft(kind, target, draft, NUM_STEPS)
    own = CheckpointRounds(target, law, SETTINGS | known, len(PROMPTS))
    server = start(**smc_arguments(target, draft, **SETTINGS))
    sent = [
        {"input_ids": prompt, "sampling_params": each}
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]
    none = dict.fromkeys(("spec_smc_log_evidence", "spec_smc_watched_ct"))
    replies = server.play(sent, every=0)
    found = [{"output_ids": one.output_ids, "meta_info": none | one.meta} for one in replies]
    assert check(found, own.generate(PROMPTS, params)) == len(PROMPTS)
    rounds = sum(one.meta["spec_smc_rounds_ct"] for one in replies)
    assert rounds < sum(len(one.output_ids) - 1 for one in replies), "no draft was kept"
