"""Is an arena large enough for any round, and does a small pool say so?

`tests/property/test_ledger.py` fills arenas of this size with random programs.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sglang_smc.memory import arena
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig

configs = st.builds(
    SMCConfig,
    num_particles=st.integers(1, 64),
    num_steps=st.integers(1, 20),
    max_lag=st.none() | st.integers(1, 300),
)
quick = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@quick
@given(configs, st.integers(1, 1000))
def test_an_arena_holds_the_longest_tails_and_a_round_of_each(
    config: SMCConfig, remaining: int
) -> None:
    """Before a round a tail is shorter than the lag bound and than what may still be emitted.

    A particle without rivals has none.
    """
    longest_before = min(config.lag, remaining) - 1 if config.num_particles > 1 else 0
    in_use = config.num_particles * longest_before
    taken = config.num_particles * (config.num_steps + 1)
    assert arena.arena(config, remaining) >= in_use + taken


@quick
@given(configs, st.integers(1, 1000))
def test_no_arena_is_larger_than_the_largest(config: SMCConfig, remaining: int) -> None:
    assert arena.arena(config, remaining) <= arena.max_arena(config)
    longest = replace(config, max_lag=config.most_lag)
    assert arena.arena(longest, config.most_lag) == arena.max_arena(config)


@quick
@given(configs, st.integers(1, 200_000))
def test_a_row_holds_the_longest_text_and_its_arena_in_whole_cache_lines(
    config: SMCConfig, longest: int
) -> None:
    width = arena.row_width(config, longest)
    assert 0 <= width - longest - arena.max_arena(config) < 32
    assert width * 4 % 128 == 0


@quick
@given(configs)
def test_a_particles_row_goes_round_before_it_meets_itself(config: SMCConfig) -> None:
    """From the last committed position to the columns behind the longest tail, ended ones' too."""
    width = arena.tail_width(config)
    places = {p % width for p in range(-1, arena.max_tail(config) + config.num_steps + 1)}
    assert len(places) == arena.max_tail(config) + config.num_steps + 2
    assert width & (width - 1) == 0
    assert width < 2 * len(places)


def test_particles_rows_are_small_whatever_the_context() -> None:
    assert 257 * 8 * arena.tail_width(SMCConfig()) * 4 < 5e6


@quick
@given(configs, st.integers(100, 10_000), st.integers(1, 500), st.integers(1, 500))
def test_requests_that_fit_are_as_many_as_fit(
    config: SMCConfig, num_slots: int, prompt: int, answer: int
) -> None:
    one = prompt + answer + arena.arena(config, answer)
    count = arena.fits(config, num_slots, prompt, answer)
    assert count * one <= num_slots < (count + 1) * one


@quick
@given(configs)
def test_a_tail_can_grow_by_a_round_from_the_bound(config: SMCConfig) -> None:
    longest_before = config.most_lag - 1 if config.num_particles > 1 else 0
    assert arena.max_tail(config) >= longest_before + config.num_steps + 1


@quick
@given(configs, st.integers(-5, 1000))
def test_an_arena_never_grows_as_text_is_emitted(config: SMCConfig, remaining: int) -> None:
    """A token emitted moves one slot out of the arena; what is owned in total may stay the same."""
    assert arena.arena(config, remaining) >= arena.arena(config, remaining - 1)


def test_the_arena_follows_what_a_request_has_emitted() -> None:
    config = SMCConfig(num_particles=4, num_steps=3, max_lag=100)
    params = SimpleNamespace(max_new_tokens=50, custom_params=None, top_k=-1)
    req = SimpleNamespace(sampling_params=params, output_ids=[0] * 20, grammar=None)
    assert arena.arena_of(config, req) == 4 * (30 + 3) + 4
    params.max_new_tokens = 500
    assert arena.arena_of(config, req) == 4 * (100 + 3) + 4
    params.max_new_tokens = 10
    assert arena.arena_of(config, req) == 4 * 3 + 4, "overshoot counts as nothing left"


def test_a_request_with_fewer_particles_and_steps_owns_less() -> None:
    server = SMCConfig(num_particles=4, num_steps=3, max_lag=100)
    chosen = {"smc": {"num_particles": 2, "num_steps": 1}}
    params = SimpleNamespace(max_new_tokens=50, custom_params=chosen, top_k=-1)
    req = SimpleNamespace(sampling_params=params, output_ids=[], grammar=None)
    assert arena.arena_of(server, req) == 2 * (50 + 1) + 2


@pytest.mark.parametrize("mode", ["exact", "mixed", "auto"])
def test_verification_leaves_no_tail_to_hold(mode: str) -> None:
    server = SMCConfig(num_particles=4, num_steps=3, max_lag=100)
    config = request_config(server, {"smc": {"mode": mode}})
    assert arena.arena(config, 50) == 4 * (1 + 3) + 4, "K + 1 tokens each, from no tail"


@quick
@given(configs, st.integers(1, 1000), st.sampled_from(["smc", "exact", "mixed", "auto"]))
def test_no_request_asks_for_more_than_the_largest_arena_of_its_server(
    server: SMCConfig, remaining: int, mode: str
) -> None:
    chosen = {"mode": mode, "num_particles": (server.num_particles + 1) // 2, "num_steps": 1}
    config = request_config(server, {"smc": chosen})
    assert arena.arena(config, remaining) <= arena.max_arena(server)
    assert arena.tail(config, remaining) <= arena.max_tail(server)


def test_check_pool_takes_a_pool_of_just_the_size_it_asks_for() -> None:
    config = SMCConfig(num_particles=4, num_steps=3, max_lag=10)
    with pytest.raises(ValueError, match=r"holds 10 tokens.*at least (\d+)") as raised:
        arena.check_pool(config, 10)
    needed = int(str(raised.value).split("at least ")[1].split()[0])
    assert needed > arena.max_arena(config)
    arena.check_pool(config, needed)
    with pytest.raises(ValueError, match=f"holds {needed - 1} tokens"):
        arena.check_pool(config, needed - 1)


def test_check_pool_names_the_flags_their_values_and_the_mend() -> None:
    with pytest.raises(ValueError) as raised:
        arena.check_pool(SMCConfig(num_particles=7, num_steps=5, max_lag=33), 1)
    message = str(raised.value)
    for part in (
        "--speculative-smc-num-particles 7",
        "--speculative-smc-max-lag 33",
        "--speculative-num-steps 5",
        "--max-total-tokens",
        "--mem-fraction-static",
    ):
        assert part in message
