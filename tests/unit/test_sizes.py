"""N and K that a server chooses, by draft, target and mode."""

from pathlib import Path
from typing import Any

import pytest

from sglang_smc.drafts import sizes
from sglang_smc.drafts.sizes import MIXTURE, ROWS, WEIGHED, choose, is_mixture
from sglang_smc.options.server import SMCConfig

RESULTS = Path(__file__).parents[2] / "bench" / "results"
EXACT = SMCConfig(mode="exact")
SMC = SMCConfig()
FIXED = SMCConfig(mode="exact", adaptive="off")
BLOCK: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "block_size": 7}
HEAD = {"architectures": ["LlamaForCausalLMEagle3"]}
PROPOSED = HEAD | {
    "speculators_config": {
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
    }
}


@pytest.mark.parametrize("row", [*ROWS.values(), MIXTURE, WEIGHED])
def test_each_number_has_a_file_that_it_comes_from(row: sizes.SizesRow) -> None:
    for source in row.source.split(", "):
        assert (RESULTS / source).exists(), source


@pytest.mark.parametrize(
    ("draft", "config", "server", "expected"),
    [
        ("eagle3", HEAD, EXACT, (8, 16)),
        ("eagle3", HEAD, SMCConfig(mode="auto"), (8, 16)),
        ("eagle3", HEAD, SMCConfig(tilt=0.1, mode="auto"), (8, 16)),
        ("eagle3", HEAD, FIXED, (8, 8)),
        ("eagle3", HEAD, SMC, (8, 8)),
        ("eagle3", HEAD, SMCConfig(adaptive="on"), (8, 8)),
        ("eagle3", PROPOSED, EXACT, (8, 5)),
        ("model", {}, EXACT, (8, 8)),
        ("dflash", BLOCK, EXACT, (8, 6)),
        ("dflash", BLOCK | {"block_size": 33}, EXACT, (8, 16)),
        ("dflash", BLOCK | {"block_size": 33}, FIXED, (8, 8)),
        (sizes.NGRAM, None, EXACT, (8, 8)),
    ],
)
def test_the_table_by_draft_and_mode(
    draft: str, config: dict[str, Any] | None, server: SMCConfig, expected: tuple[int, int]
) -> None:
    """Red where a fixed server gets what only pays while N and K follow the load."""
    assert choose(draft, config, server)[:2] == expected


def test_chains_of_a_mixture_are_one_where_it_costs_no_fidelity() -> None:
    for draft, config in (("eagle3", HEAD), ("mtp", None), ("dflash", BLOCK), ("model", {})):
        assert choose(draft, config, EXACT, is_mixture=True)[:2] == (1, 4)
    assert choose("mtp", None, SMC, is_mixture=True).num_particles == 8


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 128},
        {"num_local_experts": 8},
        {"n_routed_experts": 64},
        {"text_config": {"num_experts": 256}},
    ],
)
def test_a_mixture_is_known_by_its_experts(config: dict[str, Any]) -> None:
    assert is_mixture(config)
    assert not is_mixture(dict.fromkeys(config, None))


@pytest.mark.parametrize("config", [{}, {"num_experts": 1}, {"num_experts": None}])
def test_a_dense_model_is_none(config: dict[str, Any]) -> None:
    assert not is_mixture(config)


def test_a_server_tells_what_was_given_and_what_was_chosen() -> None:
    chosen = choose("eagle3", HEAD, EXACT)
    told = {
        (n, k): chosen.told(SMCConfig(mode="exact", num_particles=n, num_steps=k))
        for n, k in ((8, 16), (4, 16), (8, 3), (2, 2))
    }
    assert told[8, 16].startswith("an EAGLE head, ") and "bench/results/load" in told[8, 16]
    assert told[4, 16].startswith("N as given; an EAGLE head, ")
    assert told[8, 3].startswith("K as given; ")
    assert told[2, 2] == "as given"
