"""Every setting has a range, and a value outside it an error that teaches."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_smc.config import RESAMPLING_METHODS, SERVER_ARGS_FIELDS, SMCConfig, flag_of

BAD = [
    ("num_steps", 0, "an integer >= 1"),
    ("num_steps", "4", "an integer >= 1"),
    ("num_particles", 0, "an integer from 1 to 1024"),
    ("num_particles", 1025, "an integer from 1 to 1024"),
    ("num_particles", True, "an integer from 1 to 1024"),
    ("num_particles", 2.0, "an integer from 1 to 1024"),
    ("ess_threshold", -0.1, "a number from 0"),
    ("ess_threshold", 1.1, "a number from 0"),
    ("ess_threshold", math.nan, "a number from 0"),
    ("ess_threshold", "0.5", "a number from 0"),
    ("resampling_method", "killing", "systematic, stratified, multinomial, residual, ssp"),
    ("resample_at", "round", "block, token"),
    ("selection", "best", "sample, argmax"),
    ("max_lag", 0, "an integer >= 1"),
]

LIMITS = [
    ("num_steps", 1),
    ("num_particles", 1),
    ("num_particles", 1024),
    ("ess_threshold", 0),
    ("ess_threshold", 1.0),
    ("max_lag", 1),
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


def test_every_setting_has_a_flag() -> None:
    assert set(SERVER_ARGS_FIELDS) == set(SMCConfig.__struct_fields__)


def test_flags_not_given_take_the_defaults() -> None:
    flags = dict.fromkeys(SERVER_ARGS_FIELDS.values())
    assert SMCConfig.from_server_args(SimpleNamespace(**flags)) == SMCConfig()
    flags |= {"speculative_num_steps": 4, "speculative_smc_ess_threshold": 0.0}
    config = SMCConfig.from_server_args(SimpleNamespace(**flags))
    assert config == SMCConfig(num_steps=4, ess_threshold=0.0)
