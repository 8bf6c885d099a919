"""What a finished request's meta_info shows, whoever finishes beside it."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_smc.patches.ingress import add_meta_info


class Letters:
    """A tokenizer: 1 reads a, 2 reads b, and so on; 0 is special."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        letters = "" if skip_special_tokens else "."
        return "".join(chr(96 + one) if one else letters for one in ids)


def shown(tokenizer: Any = None, times: int = 1, **accumulated: list[Any]) -> dict[str, Any]:
    state = SimpleNamespace(customized_info_accumulated=accumulated)
    manager: Any = SimpleNamespace(rid_to_state={"a": state}, tokenizer=tokenizer)
    meta_info: dict[str, Any] = dict(accumulated)
    for _ in range(times):
        add_meta_info(lambda *_: None, manager, meta_info, SimpleNamespace(rids=["a"]), 0)
    return meta_info


def test_totals_are_numbers_and_other_information_stays_as_it_is() -> None:
    """With no text at all, as after an abort in the queue, SGLang fills in an empty list."""
    assert shown(spec_smc_rounds_ct=[None, 3], theirs=[1, 2]) == {
        "spec_smc_rounds_ct": 3,
        "theirs": [1, 2],
    }
    for of_neighbours in ([], [None], [None, None]):
        assert shown(spec_smc_particles=of_neighbours, spec_smc_trace=of_neighbours) == {}
    assert shown(spec_smc_log_evidence=[None]) == {"spec_smc_log_evidence": None}


ROUND = {"begins": [1], "drafted": [[2, 3], []], "bonus": [0, None], "emitted": [4]}


@pytest.mark.parametrize("times", [1, 2])
def test_tokens_are_readable_where_there_is_a_tokenizer(times: int) -> None:
    """Red if a token of some field is left out, or if what ends a stream is read twice over."""
    particle, trace = {"output_ids": [1, 0, 2]}, {"rounds": [ROUND]}
    own = {"spec_smc_particles": [[dict(particle)]], "spec_smc_trace": [dict(trace)]}
    found = shown(Letters(), times, **own)
    assert found["spec_smc_particles"] == [{**particle, "text": "ab"}]
    assert found["spec_smc_trace"]["pieces"] == {"0": ".", "1": "a", "2": "b", "3": "c", "4": "d"}


def test_without_a_tokenizer_there_are_tokens_alone() -> None:
    own = {"spec_smc_particles": [[{"output_ids": [1]}]], "spec_smc_trace": [{"rounds": [ROUND]}]}
    assert shown(**own) == {name: values[-1] for name, values in own.items()}
