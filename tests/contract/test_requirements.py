"""What of SGLang's server arguments SMC refuses, and that somebody has looked at all the others."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
from resolved_args import field_names
from server_arg_fields import LOOKED_AT, MOOT, SOME_RELEASES
from sglang.srt.server_args import ServerArgs
from some_releases import contradictions

from sglang_smc import upstream
from sglang_smc.patches.server_args import FLAG_FIELDS
from sglang_smc.server.requirements import REQUIREMENTS, Requirement, unmet


@pytest.fixture(scope="module")
def options() -> set[str]:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return set(parser._option_string_actions)


def server_args(**changed: Any) -> Any:
    """Arguments as `unmet` reads them, all of them as SMC wants them."""
    meeting = {requirement.field: requirement.allowed[0] for requirement in REQUIREMENTS}
    experts = {"moe_runner_backend": "auto", "speculative_moe_runner_backend": None}
    own = {"speculative_smc_ngram_weight": None}
    return SimpleNamespace(**{**meeting, **experts, **own, **changed})


def other_than(allowed: tuple[Any, ...]) -> Any:
    """A value of about the same kind that is not allowed."""
    first = allowed[0]
    if isinstance(first, bool):
        return not first
    return max(allowed[-1], first) + 1 if isinstance(first, int | float) else "something else"


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.field)
def test_what_smc_cannot_honour_is_refused(requirement: Requirement) -> None:
    for value in requirement.allowed:
        assert unmet(server_args(**{requirement.field: value})) == []
    (problem,) = unmet(server_args(**{requirement.field: other_than(requirement.allowed)}))
    assert problem.startswith(f"--{requirement.field.replace('_', '-')} is ")
    assert "; allowed: " in problem and problem.endswith(".")


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.field)
def test_a_requirement_is_an_option_where_sglang_has_the_field(
    options: set[str], requirement: Requirement
) -> None:
    flag = f"--{requirement.field.replace('_', '-')}"
    assert (flag in options) == (requirement.field in fields())


def test_what_this_sglang_has_not_needs_no_refusal() -> None:
    given = vars(server_args())
    for requirement in REQUIREMENTS:
        rest = {name: value for name, value in given.items() if name != requirement.field}
        assert unmet(SimpleNamespace(**rest)) == []


def test_experts_of_the_draft_run_as_the_targets_do() -> None:
    assert unmet(server_args(moe_runner_backend="triton")) == []
    same = {"moe_runner_backend": "triton", "speculative_moe_runner_backend": "triton"}
    assert unmet(server_args(**same)) == []
    (problem,) = unmet(server_args(**{**same, "speculative_moe_runner_backend": "cutlass"}))
    assert problem.startswith("--speculative-moe-runner-backend is 'cutlass'; allowed: 'triton'")


# What SMC leaves to SGLang to refuse: without something that SMC refuses it does.
LEFT_TO_SGLANG: dict[str, Any] = {
    "enable_http_worker_reuseport": True,
    "enable_kv_cache_sharding": True,
    "enable_linker_mla_dedup": True,
    "enable_megamoe_for_layernorm_sp": True,
    "enable_tp_lm_head_all_to_all": True,
    "flashinfer_a2a_dispatch_type": "bf16",
    "prefill_kv_cache_dequant_dtype": "fp8_e4m3",
}


@pytest.mark.parametrize("name", [name for name in LEFT_TO_SGLANG if hasattr(ServerArgs, name)])
def test_what_is_left_to_sglang_it_refuses(smc: dict, name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises((ValueError, AssertionError), match=flag) as error:
        ServerArgs(**smc, **{name: LEFT_TO_SGLANG[name]}).resolve_once()
    assert "SMC cannot start" not in str(error.value)


def test_what_is_left_to_sglang_is_written_down() -> None:
    assert sorted(LEFT_TO_SGLANG) == sorted(MOOT["refused by SGLang"].split())


def fields() -> list[str]:
    """Those of SGLang's own server arguments."""
    return [name for name in field_names() if name not in FLAG_FIELDS]


def test_every_field_of_sglang_has_been_looked_at() -> None:
    refused = [requirement.field for requirement in REQUIREMENTS]
    known = [*refused, *LOOKED_AT]
    assert contradictions(fields(), known, SOME_RELEASES, upstream.release()) == []
