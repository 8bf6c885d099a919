"""What a request may choose for itself, and what it is told when it may not."""

import math
import re
from typing import Any

import pytest
from toy_request import ToyRequest

from sglang_smc.kv import arena
from sglang_smc.options.request import (
    Budget,
    RequestConfig,
    apply_budget,
    config_of,
    request_config,
)
from sglang_smc.options.server import (
    AUTO_EVIDENCE_THRESHOLD,
    EVIDENCE_THRESHOLD,
    LAG,
    LONG_LAG,
    MODES,
    SERVER_ARGS_FIELDS,
    SERVER_FIELDS,
    SMCConfig,
)

SERVER = SMCConfig(num_particles=6, num_steps=5)

CHOICES: dict[str, Any] = {
    "num_steps": 2,
    "mode": "exact",
    "num_particles": 3,
    "ess_threshold": 0.9,
    "resampling_method": "stratified",
    "proposal": "draft",
    "resample_at": "token",
    "selection": "argmax",
    "power": 2.5,
    "evidence_threshold": 0.75,
    "tilt": 0.1,
    "draft_temperature": 0.5,
    "max_lag": 3,
    "return_particles": True,
    "trace": True,
}
SWITCHES = ("return_particles", "trace")


def choose(server: SMCConfig = SERVER, **chosen: Any) -> RequestConfig:
    return request_config(server, {"smc": chosen})


def arrived(smc: dict[str, Any], **params: Any) -> Any:
    return ToyRequest(0, 27, 8, {"custom_params": {"smc": smc}, **params}, None)


def refusal(server: SMCConfig = SERVER, **chosen: Any) -> str:
    with pytest.raises(ValueError) as error:
        choose(server, **chosen)
    assert str(error.value).startswith("custom_params['smc'] ")
    return str(error.value)


def test_every_setting_but_the_servers_own_may_be_chosen() -> None:
    """A new setting without a line here is noticed."""
    assert set(CHOICES) == set(SERVER_ARGS_FIELDS) - set(SERVER_FIELDS) | set(SWITCHES)


@pytest.mark.parametrize("name", list(CHOICES))
def test_what_is_chosen_replaces_the_servers_and_nothing_else(name: str) -> None:
    found = choose(**{name: CHOICES[name]})
    plain = choose()
    changed = {one for one in found.__struct_fields__ if getattr(found, one) != getattr(plain, one)}
    assert getattr(found, name) == CHOICES[name]
    assert changed <= ({"tilt", "mode"} if name == "tilt" else {name})  # which the tilt implies


@pytest.mark.parametrize(
    "given", [None, {}, {"smc": None}, {"smc": {}}, {"other": {"num_steps": 99}}, "text"]
)
def test_who_chooses_nothing_gets_the_servers_settings(given: Any) -> None:
    server = SMCConfig(num_particles=3, mode="auto", max_lag=7, draft_temperature=0.3)
    found = request_config(server, given)
    assert not found.return_particles and not found.trace
    for name in SERVER_ARGS_FIELDS:
        assert getattr(found, name) == getattr(server, name)


def test_what_is_no_object_and_unknown_keys_are_refused_with_the_keys_there_are() -> None:
    """What chooses code is the server's."""
    for given in (3, "mode=exact", [], [["mode", "exact"]], True, 0):
        told = re.escape(f"custom_params['smc'] is {given!r}; allowed: an object")
        with pytest.raises(ValueError, match=told) as error:
            request_config(SERVER, {"smc": given})
        assert all(name in str(error.value) for name in CHOICES)
    for name in (*SERVER_FIELDS, "particles", "", "NUM_STEPS", "temperature"):
        message = refusal(**{name: getattr(SERVER, name, 1)})
        assert f"unknown key {name!r}; allowed: num_steps, mode" in message
        assert "return_particles" in message


INTEGER_6 = "an integer from 1 to 6"
INTEGER_5 = "an integer from 0 to 5"
POSITIVE = "a finite number > 0"
WORDS = "one of "
BAD = [
    *(("num_particles", value, INTEGER_6) for value in (0, -1, 7, True, "4", 2.0, None, [4])),
    *(("num_steps", value, INTEGER_5) for value in (-1, 6, False, "4", math.nan, {})),
    *(("mode", value, WORDS) for value in ("fast", "SMC", 1, None, True, ["smc"])),
    *(("ess_threshold", value, "from 0") for value in (-0.1, 1.1, math.nan, True, "0.5", None)),
    *(("resampling_method", value, WORDS) for value in ("killing", 0, None, [])),
    *(("proposal", value, WORDS) for value in ("weighed", True, None)),
    *(("resample_at", value, WORDS) for value in ("round", 1, None)),
    *(("selection", value, WORDS) for value in ("best", True)),
    *(("power", value, POSITIVE) for value in (0, -1, math.inf, math.nan, True, "2", None, [2])),
    *(("evidence_threshold", value, ">= 0") for value in (-1, math.inf, math.nan, True, "0", [])),
    *(("tilt", value, "a finite number >= 0") for value in (-1, math.nan, True, "a", {})),
    *(("max_lag", value, "an integer from 1") for value in (0, 2.0, math.nan, True, "a", [])),
    *(("draft_temperature", value, ">= 1e-06") for value in (0, -1, math.inf, math.nan, True, "1")),
    *((name, value, "true or false") for name in SWITCHES for value in (1, 0, "true", None, [])),
    ("num_particles", 6.0, INTEGER_6),  # True == 1.0 and 6.0 == 6 to Python
]


def test_bad_values_are_refused_with_their_keys_and_what_is_allowed() -> None:
    for name, value, allowed in BAD:
        message = refusal(**{name: value})
        assert f"has {name}={value!r}; allowed: " in message and allowed in message
    message = refusal(num_steps=99, mode="fast", speed=11, power="2", return_particles=1)
    for part in ("num_steps=99", "mode='fast'", "unknown key 'speed'", "power='2'", "particles=1"):
        assert part in message


WEIGHING = (
    "proposal ess_threshold resampling_method resample_at selection max_lag return_particles power"
)
WITHOUT_EFFECT = [
    *((mode, name) for mode in ("exact", "auto") for name in WEIGHING.split()),
    ("exact", "evidence_threshold"),
    *((mode, "tilt") for mode in ("smc", "exact")),
]


@pytest.mark.parametrize(("mode", "name"), WITHOUT_EFFECT)
def test_a_key_without_effect_is_refused_with_the_modes_that_know_it(mode: str, name: str) -> None:
    """The mode may be the request's own or the server's, though a tilt implies one."""
    knows = {"tilt": "'auto'", "evidence_threshold": "'smc' or 'auto'"}.get(name, "'smc'")
    asked = {name: CHOICES[name]}
    both = {name: CHOICES[name], "mode": mode}
    for message in (
        refusal(**both),
        refusal(SMCConfig(mode=mode), **both if knows == "'auto'" else asked),
    ):
        assert f"has {name}={CHOICES[name]!r}, which has" in message
        assert f"no effect in mode {mode!r}; allowed: mode {knows}" in message
        assert ("or 'auto'" in message) == (name == "evidence_threshold")


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_modes_that_verify_have_no_weights_but_a_trace(mode: str) -> None:
    """What is so anyway may be said; all that has no effect is told at once."""
    assert choose(mode=mode, power=1, return_particles=False, trace=True).mode == mode
    message = refusal(mode=mode, ess_threshold=0.5, selection="argmax")
    assert "has ess_threshold=0.5" in message and "has selection='argmax'" in message
    server = SMCConfig(power=2.0)
    message = refusal(server, mode=mode)
    for part in (
        f"has mode={mode!r} beside power=2.0",
        "server's --speculative-smc-power",
        "power 1,",
    ):
        assert part in message
    assert choose(server, mode=mode, power=1).power == 1


@pytest.mark.parametrize("mode", [None, "smc", "exact", "auto"])
def test_without_drafts_a_request_is_one_particle_of_the_target(
    mode: str | None,
) -> None:
    """All that would be ignored beside it is refused, and a power, which it would not follow."""
    server = SMCConfig(num_particles=6, num_steps=5, tilt=0.1, mode="auto")
    chosen: dict[str, Any] = {"num_steps": 0} | ({} if mode is None else {"mode": mode})
    for constrained in (False, True):
        found = request_config(server, {"smc": chosen}, constrained=constrained)
        assert found.round_sizes == (1, 0, True) and found.is_normalized
        assert apply_budget(found, Budget(4, 1)) == found
        assert arena.arena(found, 100) == 2, "the token of a round, and of the one under way"
    assert config_of(server, arrived(chosen, top_k=1)).round_sizes == (1, 0, True)
    assert choose(**chosen, num_particles=1, trace=True, return_particles=False, power=1).trace
    for name in CHOICES.keys() - {"num_steps", "mode", "trace"}:
        message = refusal(**chosen | {name: CHOICES[name]})
        assert f"has num_steps=0 beside {name}={CHOICES[name]!r}; allowed: num_part" in message
    assert "beside potentials=" in refusal(**chosen, potentials=[{"name": "count"}])
    message = refusal(SMCConfig(power=2.0), **chosen)
    assert "beside power=2.0 (this server's --speculative-smc-power); allowed:" in message
    assert choose(SMCConfig(power=2.0), **chosen, power=1).is_normalized


def test_verified_proposals_have_no_weights_of_draft_tokens() -> None:
    """So nothing about these is accepted and ignored, and n-gram matches may draft alone."""
    for other in ({"evidence_threshold": 0.5}, {"resample_at": "token"}):
        message = refusal(proposal="verified", **other)
        assert "has proposal='verified' beside evidence_threshold=" in message
        with pytest.raises(ValueError, match="--speculative-smc-proposal is 'verified' and"):
            SMCConfig(proposal="verified", **other).validate()
    alone = SMCConfig(proposal="verified", ngram_matches=True)
    alone.validate()
    assert choose(alone, power=2.0).extends and not choose(alone, mode="exact").extends
    knows_part = SMCConfig(drafts_all=False)
    assert "proposal 'verified'" in refusal(knows_part, power=2.0, proposal="draft")
    assert choose(knows_part, power=2.0).extends
    assert (
        choose(SMCConfig(power=2.0)).extends and not choose(SMCConfig(power=2.0), power=1).extends
    )


def test_a_power_of_p_has_no_evidence_to_measure() -> None:
    """Though the threshold be the server's."""
    message = refusal(power=2.0, evidence_threshold=0.5)
    assert "has power=2.0 beside evidence_threshold=0.5; allowed: evidence_threshold 0" in message
    assert "evidence_threshold=0.5" in refusal(SMCConfig(evidence_threshold=0.5), power=2.0)


@pytest.mark.parametrize(
    ("server", "chosen", "expected"),
    [
        ({}, {"mode": "exact"}, math.inf),
        ({}, {"mode": "auto"}, AUTO_EVIDENCE_THRESHOLD),
        ({}, {"mode": "smc"}, EVIDENCE_THRESHOLD),
        *(({}, {"mode": "auto", "evidence_threshold": own}, own) for own in (0.0, 3)),
        *(({}, {"mode": "smc", "evidence_threshold": own}, own) for own in (0, 0.25)),
        ({}, {"mode": "smc", "power": 2.0}, math.inf),
        ({}, {"mode": "smc", "power": 2.0, "proposal": "draft"}, 0.0),
        ({}, {"mode": "smc", "power": 1.0}, EVIDENCE_THRESHOLD),
        ({"power": 2.0}, {"evidence_threshold": 0}, math.inf),
        ({"power": 2.0}, {"resample_at": "token"}, 0.0),
        ({"evidence_threshold": 0.5}, {"power": 1, "evidence_threshold": 0}, 0.0),
        ({"evidence_threshold": 0.125}, {"mode": "exact"}, math.inf),
        ({"evidence_threshold": 0.125}, {"mode": "auto"}, 0.125),
        ({"mode": "auto", "tilt": 0.0}, {"evidence_threshold": 3}, 3),
    ],
)
def test_the_evidence_threshold_in_force(server: dict, chosen: dict, expected: float) -> None:
    """A server's is no concern of modes that ignore it."""
    found = choose(SMCConfig(**server), **chosen)
    assert found.effective_evidence_threshold == expected
    assert found.weighs == (found.mode == "smc")


@pytest.mark.parametrize(
    ("server", "chosen", "expected"),
    [
        ({}, {}, LAG),
        ({}, {"max_lag": 9}, 9),
        ({}, {"power": 2.0}, LONG_LAG),
        ({}, {"power": 2.0, "max_lag": 9}, 9),
        ({}, {"return_particles": True}, LONG_LAG),
        ({}, {"potentials": [{"name": "count"}]}, LONG_LAG),
        ({}, {"mode": "auto"}, 1),
        ({}, {"mode": "auto", "potentials": "[]"}, 1),
        ({}, {"num_particles": 1}, 1),
        ({"max_lag": 7}, {}, 7),
        ({"max_lag": 7}, {"power": 2.0}, 7),
        ({"max_lag": 7}, {"max_lag": 3}, 3),
    ],
)
def test_the_lag_in_force(server: dict[str, Any], chosen: dict[str, Any], expected: int) -> None:
    assert choose(SMCConfig(num_particles=6, **server), **chosen).lag == expected


def test_a_text_under_a_grammar_is_settled_late_where_it_is_weighed() -> None:
    """Its first tokens' law depends on all that may follow; verification's does not."""
    for mode, expected in (("smc", LONG_LAG), ("auto", 1)):
        found = request_config(SERVER, {"smc": {"mode": mode}}, constrained=True)
        assert found.lag == expected


def test_no_request_lags_further_than_the_tables_reach() -> None:
    for server, most in ((SMCConfig(max_lag=7), 7), (SERVER, LONG_LAG)):
        message = refusal(server, max_lag=most + 1)
        assert f"has max_lag={most + 1}; allowed: an integer from 1 to {most}" in message


def test_a_tilt_implies_the_mode_that_has_one() -> None:
    for mode in MODES:
        assert choose(SMCConfig(mode=mode, evidence_threshold=1.0), tilt=0.1).mode == "auto"
    assert "has tilt=0.1 beside evidence_threshold=2" in refusal(tilt=0.1, evidence_threshold=2)
    assert choose(tilt=0.1, mode="auto").tilt == 0.1


def test_a_request_in_the_scheduler_is_not_refused() -> None:
    """SGLang takes the grammar from one that it aborts: what was allowed beside it is not now."""
    chosen = {"ess_threshold": 0.9}
    server = SMCConfig(ngram_matches=True)
    assert request_config(server, {"smc": chosen}, constrained=True).ngram_matches
    with pytest.raises(ValueError, match="ngram_matches=True"):
        request_config(server, {"smc": chosen})
    assert config_of(server, arrived(chosen)).ngram_matches


def test_a_request_in_the_scheduler_is_read_once() -> None:
    req = arrived({"num_particles": 2})
    first = config_of(SERVER, req)
    req.sampling_params.custom_params = {"smc": {"num_particles": 4}}
    assert config_of(SERVER, req) is first
    assert first.num_particles == 2


@pytest.mark.parametrize(
    ("chosen", "num_particles"),
    [
        ({}, 6),
        ({"mode": "auto", "num_particles": 2}, 2),
        ({"power": 3.0}, 6),
        ({"mode": "exact", "num_particles": 1}, 1),
        ({"return_particles": True}, 1),
        ({"potentials": [{"name": "count"}]}, 1),
    ],
)
def test_at_temperature_0_a_tree_is_verified(chosen: dict[str, Any], num_particles: int) -> None:
    """And particles that are returned or weighed, which would all be equal, are one."""
    played = config_of(SERVER, arrived({"num_steps": 3, **chosen}, top_k=1))
    assert (played.num_particles, played.num_steps, played.power) == (num_particles, 3, 1.0)
    assert played.branches is (num_particles > 1)
    assert played.greedy and played.lag == 1
    weighed = {"return_particles", "potentials"} & chosen.keys()
    assert played.mode == ("smc" if weighed else "exact")


def test_matches_draft_for_all_requests_of_a_server_where_drafts_are_verified() -> None:
    """And for none that drafts nothing."""
    server = SMCConfig(mode="exact", ngram_matches=True)
    assert choose(server).uses_matches and choose(server, mode="auto").uses_matches
    assert choose(server, mode="smc", proposal="verified").uses_matches
    assert not choose(server, num_steps=0).uses_matches and not choose().uses_matches
    message = refusal(server, mode="smc")
    assert "has mode='smc' beside ngram_matches=True (this server's --speculative-smc" in message
    assert "; allowed: proposal 'verified', or mode 'exact'" in message
