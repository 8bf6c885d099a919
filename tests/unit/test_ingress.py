"""What a finished request's meta_info shows, whoever finishes beside it."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_smc.patches.ingress import add_meta_info


def shown(**accumulated: list[Any]) -> dict[str, Any]:
    state = SimpleNamespace(customized_info_accumulated=accumulated)
    manager: Any = SimpleNamespace(rid_to_state={"a": state})
    meta_info: dict[str, Any] = dict(accumulated)
    add_meta_info(lambda *_: None, manager, meta_info, SimpleNamespace(rids=["a"]), 0)
    return meta_info


def test_totals_are_numbers_and_other_information_stays_as_it_is() -> None:
    assert shown(spec_smc_rounds_ct=[None, 3], theirs=[1, 2]) == {
        "spec_smc_rounds_ct": 3,
        "theirs": [1, 2],
    }


@pytest.mark.parametrize("values", [[], [None], [None, None]])
def test_what_only_a_neighbour_has_to_tell_is_left_out(values: list[None]) -> None:
    """With no text at all, as after an abort in the queue, SGLang fills in an empty list."""
    assert shown(spec_smc_particles=values) == {}


def test_an_evidence_that_is_not_known_is_shown_as_such() -> None:
    assert shown(spec_smc_log_evidence=[None]) == {"spec_smc_log_evidence": None}
