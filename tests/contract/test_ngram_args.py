"""Server arguments of n-gram matches: what is honoured, and what is refused by name."""

from typing import Any

import pytest
from resolved_args import resolve

from sglang_smc import upstream
from sglang_smc.options.server import SMCConfig

pytestmark = pytest.mark.skipif(not upstream.HAS_NGRAM_CACHE, reason="this SGLang has no cache")

WITH = {"speculative_smc_ngram_weight": 0.3}
ALONE = {
    "speculative_smc_ngram_weight": 1,
    "speculative_smc_mode": "exact",
    "speculative_draft_model_path": None,
}


def test_its_flags_act_with_a_weight_and_are_refused_without(smc: dict) -> None:
    given: dict[str, Any] = {
        "speculative_ngram_max_trie_depth": 8,
        "speculative_ngram_capacity": 5000,
        "speculative_ngram_min_bfs_breadth": 2,
        "speculative_ngram_max_bfs_breadth": 3,
        "speculative_ngram_match_type": "PROB",
    }
    resolve(**smc, **WITH, **given)
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')} is {value!r}"
        with pytest.raises(ValueError, match=f"{flag}; allowed.*ngram-weight is 0"):
            resolve(**smc, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_trie_depth", 1, "an integer >= 2"),
        ("min_bfs_breadth", 0, "an integer >= 1"),
        ("max_bfs_breadth", 0, "an integer >= 1"),
        ("capacity", 18, "an integer >= 19"),
        ("match_type", "best", "one of BFS, PROB"),
        ("external_corpus_path", "texts.jsonl", "None"),
        ("external_sam_budget", 4, "0"),
    ],
)
def test_what_the_cache_cannot_be_built_with_is_refused(
    smc: dict, name: str, value: Any, allowed: str
) -> None:
    """SGLang's own thread would end the process at some of these, in the middle of a request."""
    flag = f"--speculative-ngram-{name.replace('_', '-')} is {value!r}; allowed: {allowed}"
    with pytest.raises(ValueError, match=flag):
        resolve(**smc, **WITH, **{f"speculative_ngram_{name}": value})


def test_alone_there_is_no_draft_model(smc: dict) -> None:
    resolve(**{**smc, **ALONE})
    with pytest.raises(ValueError, match="ngram-weight is 1 and --speculative-draft-model-path"):
        resolve(**{**smc, **ALONE, "speculative_draft_model_path": smc["model_path"]})
    with pytest.raises(ValueError, match="without one, --speculative-smc-ngram-weight 1 drafts"):
        resolve(**{**smc, **ALONE, **WITH})


def test_alone_nothing_is_weighed(smc: dict) -> None:
    with pytest.raises(ValueError, match=r"ngram-weight is 1, but .* is 'smc'; allowed: 'exact'"):
        resolve(**{**smc, **ALONE, "speculative_smc_mode": "smc"})
    for mode in ("exact", "mixed", "auto"):
        SMCConfig(ngram_weight=1, mode=mode).validate()
