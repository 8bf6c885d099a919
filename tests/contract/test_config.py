"""Every setting has a range, and a value outside it an error that teaches."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_smc.options.server import (
    MODES,
    RESAMPLING_METHODS,
    SERVER_ARGS_FIELDS,
    SMCConfig,
    flag_of,
)

BAD = [
    ("num_steps", 0, "an integer >= 1"),
    ("num_steps", "4", "an integer >= 1"),
    ("num_particles", 0, "an integer from 1 to 1024"),
    ("num_particles", 1025, "an integer from 1 to 1024"),
    ("num_particles", True, "an integer from 1 to 1024"),
    ("num_particles", 2.0, "an integer from 1 to 1024"),
    ("num_particles", 8.0, "an integer from 1 to 1024"),  # equal to the default, but no integer
    ("num_steps", 8.0, "an integer >= 1"),
    ("ess_threshold", -0.1, "a number from 0"),
    ("ess_threshold", 1.1, "a number from 0"),
    ("ess_threshold", math.nan, "a number from 0"),
    ("ess_threshold", "0.5", "a number from 0"),
    ("resampling_method", "killing", "systematic, stratified, multinomial, residual, ssp"),
    ("resample_at", "round", "block, token"),
    ("selection", "best", "sample, argmax"),
    ("mode", "fast", "smc, exact, mixed, auto"),
    ("mode", None, "smc, exact, mixed, auto"),
    ("power", 0, "a finite number > 0"),
    ("power", -1.0, "a finite number > 0"),
    ("power", math.inf, "a finite number > 0"),
    ("power", math.nan, "a finite number > 0"),
    ("power", True, "a finite number > 0"),
    ("power", "2", "a finite number > 0"),
    ("evidence_threshold", -0.1, "a finite number >= 0"),
    ("evidence_threshold", math.inf, "a finite number >= 0"),
    ("evidence_threshold", math.nan, "a finite number >= 0"),
    ("evidence_threshold", False, "a finite number >= 0"),
    ("tilt", -0.1, "a finite number >= 0"),
    ("tilt", math.nan, "a finite number >= 0"),
    ("draft_temperature", 1e-7, "a finite number >= 1e-06"),
    ("draft_temperature", 0, "a finite number >= 1e-06"),
    ("draft_temperature", math.inf, "a finite number >= 1e-06"),
    ("draft_temperature", [1.0], "a finite number >= 1e-06"),
    ("ngram_weight", -0.1, "a number from 0 (none) to 1"),
    ("ngram_weight", 1.1, "a number from 0 (none) to 1"),
    ("ngram_weight", math.nan, "a number from 0 (none) to 1"),
    ("ngram_weight", True, "a number from 0 (none) to 1"),
    ("max_lag", 0, "an integer >= 1"),
    ("adaptive", 1, "True or False"),
    ("adaptive", "yes", "True or False"),
]

LIMITS = [
    ("num_steps", 1),
    ("num_particles", 1),
    ("num_particles", 1024),
    ("ess_threshold", 0),
    ("ess_threshold", 1.0),
    ("max_lag", 1),
    ("power", 1e-3),
    ("power", 100),
    ("evidence_threshold", 0),
    ("evidence_threshold", 1e9),
    ("evidence_threshold", None),
    ("draft_temperature", 1e-6),
    ("draft_temperature", None),
    ("ngram_weight", 0),
    ("ngram_weight", 0.99),
    ("adaptive", True),
    *(("mode", mode) for mode in MODES),
    *(("resampling_method", method) for method in RESAMPLING_METHODS),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_bad_value_names_flag_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        SMCConfig(**{name: value}).validate()
    for part in (flag_of(name), repr(value), allowed, "leave the flag out"):
        assert part in str(error.value)


@pytest.mark.parametrize(("name", "value"), LIMITS)
def test_limits_are_allowed(name: str, value: Any) -> None:
    SMCConfig(**{name: value}).validate()


def test_a_tilt_goes_with_the_mode_that_follows_it() -> None:
    SMCConfig(mode="auto", tilt=0.0).validate()
    with pytest.raises(ValueError, match=r"--speculative-smc-tilt is 0.1, but .*'auto'"):
        SMCConfig(mode="smc", tilt=0.1).validate()
    flags = {**dict.fromkeys(SERVER_ARGS_FIELDS.values()), "speculative_smc_tilt": 0.2}
    assert SMCConfig.from_server_args(SimpleNamespace(**flags)).mode == "auto"


@pytest.mark.parametrize("mode", ["exact", "mixed", "auto"])
def test_verification_knows_no_other_target_than_p(mode: str) -> None:
    SMCConfig(mode=mode, power=1.0).validate()
    with pytest.raises(ValueError) as error:
        SMCConfig(mode=mode, power=2.0).validate()
    for part in ("--speculative-smc-power is 2.0", "--speculative-smc-mode", repr(mode), "allowed"):
        assert part in str(error.value)


def test_evidence_is_measured_against_p_alone() -> None:
    for threshold in (None, 0, 0.0):
        SMCConfig(power=2.0, evidence_threshold=threshold).validate()
    SMCConfig(power=1.0, evidence_threshold=0.5).validate()
    with pytest.raises(ValueError) as error:
        SMCConfig(power=0.5, evidence_threshold=0.25).validate()
    for part in ("--speculative-smc-power is 0.5", "--speculative-smc-evidence-threshold is 0.25"):
        assert part in str(error.value)


def test_every_setting_has_a_flag() -> None:
    """But for what the draft's checkpoint says."""
    assert set(SERVER_ARGS_FIELDS) | {"drafts_all"} == set(SMCConfig.__struct_fields__)


def test_flags_not_given_take_the_defaults() -> None:
    flags = dict.fromkeys(SERVER_ARGS_FIELDS.values())
    assert SMCConfig.from_server_args(SimpleNamespace(**flags)) == SMCConfig()
    flags |= {"speculative_num_steps": 4, "speculative_smc_ess_threshold": 0.0}
    config = SMCConfig.from_server_args(SimpleNamespace(**flags))
    assert config == SMCConfig(num_steps=4, ess_threshold=0.0)
