"""How many KV slots requests reserve, whether a pool holds them, and what a server tells of it.

`tests/property/test_ledger.py` fills arenas of this size with random programs.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc import process, upstream
from sglang_smc.kv import arena
from sglang_smc.kv.report import MemorySizes, Table
from sglang_smc.kv.sizes import slot_bytes, tensor_bytes
from sglang_smc.ops import TORCH
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.patches import admission
from sglang_smc.state.request import arena_end, num_new
from sglang_smc.worker import SMCWorker

configs = st.builds(
    SMCConfig,
    num_particles=st.integers(1, 64),
    num_steps=st.integers(1, 20),
    max_lag=st.none() | st.integers(1, 300),
    page_size=st.sampled_from([1, 4, 64]),
)
quick = settings(max_examples=200)


@quick
@given(configs, st.integers(-5, 1000), st.sampled_from(["smc", "exact", "auto"]))
def test_an_arena_holds_the_longest_tails_and_a_round(
    config: SMCConfig, remaining: int, mode: str
) -> None:
    """Before a round a tail is shorter than the lag bound and than what may still be emitted."""
    reserved = arena.arena(config, remaining)
    taken = config.num_steps + 1
    if remaining > 0:
        longest_before = min(config.lag, remaining) - 1 if config.num_particles > 1 else 0
        assert reserved >= config.num_particles * (longest_before + taken)
    assert arena.arena(config, remaining - 1) <= reserved <= arena.max_arena(config)
    longest = replace(config, max_lag=config.most_lag)
    assert arena.arena(longest, config.most_lag) == arena.max_arena(config)
    most_before = config.most_lag - 1 if config.num_particles > 1 else 0
    assert arena.max_tail(config) >= most_before + taken
    chosen = {"mode": mode, "num_particles": (config.num_particles + 1) // 2, "num_steps": 1}
    own = request_config(config, {"smc": chosen})
    assert arena.arena(own, remaining) <= arena.max_arena(config)
    assert arena.tail(own, remaining) <= arena.max_tail(config)


@quick
@given(configs, st.integers(1, 900), st.integers(0, 999), st.data())
def test_a_round_leaves_whole_pages_with_room_for_it(
    config: SMCConfig, prompt: int, num_emitted: int, data: st.DataObject
) -> None:
    """Of a text that is not in a whole number of pages the first round takes the rest, too."""
    page = config.page_size
    asked = req(1000)
    asked.kv = asked
    texts = prompt, prompt + data.draw(st.integers(0, num_emitted))
    for length, output in zip(texts, ([], [0] * num_emitted), strict=True):
        asked.kv_committed_len = asked.kv_allocated_len = length
        asked.output_ids = output
        needed = arena.arena(config, arena.remaining(asked)) - (page - 1)
        end = arena_end(config, asked)
        new = num_new(config, asked)
        assert end % page == new % page == 0
        assert needed <= end - asked.kv_committed_len < needed + page
        assert 0 <= end - new - asked.kv_committed_len < page
        asked.kv_allocated_len = end
        assert num_new(config, asked) == 0


@quick
@given(configs, st.integers(1, 200_000))
def test_rows_hold_what_they_must_and_no_more(config: SMCConfig, longest: int) -> None:
    """A particle's row goes round from the last committed position to behind its longest tail."""
    width = arena.row_width(config, longest)
    assert 0 <= width - longest - arena.max_arena(config) < 32
    assert width * 4 % 128 == 0
    width = arena.tail_width(config)
    count = arena.max_tail(config) + config.num_steps + 2
    assert count <= width < 2 * count
    assert width & (width - 1) == 0


@quick
@given(configs, st.integers(100, 10_000), st.integers(1, 500), st.integers(1, 500))
def test_the_most_that_fit(config: SMCConfig, num_slots: int, prompt: int, answer: int) -> None:
    one = prompt + answer + arena.arena(config, answer)
    count = arena.fits(config, num_slots, prompt, answer)
    assert count * one <= num_slots < (count + 1) * one


def test_the_arena_follows_what_a_request_chose_and_has_emitted() -> None:
    server = SMCConfig(num_particles=4, num_steps=3, max_lag=100)
    for asked, expected in (
        (req(50, 20), 4 * (30 + 3) + 4),
        (req(500, 20), 4 * (100 + 3) + 4),
        (req(10, 20), 4 * 3 + 4),  # overshoot counts as nothing left
        (req(50, num_particles=2, num_steps=1), 2 * (50 + 1) + 2),
        (req(50, num_steps=0), 2),
        # K + 1 tokens each, from no tail
        *((req(50, mode=mode), 4 * (1 + 3) + 4) for mode in ("exact", "auto")),
    ):
        assert arena.arena_of(server, asked) == expected


def req(max_new_tokens: int = 500, num_emitted: int = 0, **chosen: Any) -> Any:
    params = SimpleNamespace(
        max_new_tokens=max_new_tokens,
        top_k=-1,
        sampling_seed=None,
        custom_params={"smc": chosen},
    )
    return SimpleNamespace(sampling_params=params, output_ids=[0] * num_emitted, grammar=None)


def test_a_pool_of_just_the_size_that_is_asked_for_is_taken() -> None:
    config = SMCConfig(num_particles=7, num_steps=5, max_lag=33)
    with pytest.raises(ValueError, match=r"holds 10 tokens.*at least (\d+)") as raised:
        arena.check_pool(config, 10)
    message = str(raised.value)
    needed = int(message.split("at least ")[1].split()[0])
    assert needed > arena.max_arena(config)
    few = SMCConfig(num_particles=1, num_steps=1)
    with pytest.raises(ValueError, match=f"at least {arena.max_arena(few) + 8}"):
        arena.check_pool(few, arena.max_arena(few) + 7)
    arena.check_pool(config, needed)
    with pytest.raises(ValueError, match=f"holds {needed - 1} tokens"):
        arena.check_pool(config, needed - 1)
    flags = "smc-num-particles 7", "smc-max-lag 33", "num-steps 5"
    for part in (*(f"--speculative-{flag}" for flag in flags), "--max-total-tokens", "--mem-fr"):
        assert part in message


def test_the_translator_reads_the_workers_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, attention reads it in a prefill; from the former it would get others' KV unseen."""
    if not upstream.IS_NEWER:
        return pytest.skip("this SGLang has no translator of indices")
    place = SimpleNamespace(attn_dcp_size=1, dcp_enabled=False)
    monkeypatch.setattr("sglang.srt.mem_cache.kv_index_translator.get_parallel", lambda: place)
    former = torch.zeros(5, 40, dtype=torch.int32)
    pool = SimpleNamespace(req_to_token=former)
    allocator = SimpleNamespace(size=2000)
    # A target's runner as SGLang leaves it, before the worker is told of the pools.
    runner: Any = SimpleNamespace(
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=object(),
        page_size=1,
        device="cpu",
        is_draft_worker=False,
        model_config=SimpleNamespace(vocab_size=16),
    )
    runner.init_kv_index_translator = partial(ModelRunner.init_kv_index_translator, runner)
    runner.init_kv_index_translator()
    worker: Any = object.__new__(SMCWorker)
    worker.config = SMCConfig(num_particles=2)
    worker.device = "cpu"
    worker._ops = TORCH
    worker._target_worker = SimpleNamespace(model_runner=runner)
    worker._draft_worker = SimpleNamespace(alloc_memory_pool=lambda **_: None)
    worker.alloc_memory_pool(None, pool, allocator)
    assert pool.req_to_token is not former
    assert runner.kv_index_translator.req_to_token is pool.req_to_token


# --- What a server tells

# Llama 3.1 8B and 3.2 1B on a card of 24 GB.
SMALL = MemorySizes(
    num_slots=6600,
    slot_bytes=160 << 10,
    target_slot_bytes=128 << 10,
    draft_weight_bytes=2_470_000_000,
    most_running=48,
    context_length=131_072,
)
LARGE = replace(SMALL, num_slots=307_000)


def test_a_small_pool_is_told_with_the_flags_that_mend_it() -> None:
    table = Table.of(SMCConfig(max_lag=256), SMALL)
    assert {name: (m.slots, m.fits) for name, m in table.modes.items()} == {
        "smc": (2121, 1),
        "exact, auto": (81, 4),
    }
    assert table.plain == 17
    assert table.advice is not None
    assert "holds 1 at a time, and without SMC would hold 17" in table.advice
    assert "--speculative-smc-max-lag 4 makes that 105 slots, and 4 requests" in table.advice
    assert "--speculative-smc-mode auto makes that 81 slots, and 4 requests" in table.advice


def test_only_what_a_server_may_change_is_advised() -> None:
    """No other mode serves a power, and no lag as short as that of *p*."""
    advice = Table.of(SMCConfig(power=2.0), SMALL).advice
    assert advice is not None
    assert advice.count(" makes that ") == 1
    assert "--speculative-smc-max-lag 32" in advice


def test_nothing_is_advised_where_nothing_helps() -> None:
    assert Table.of(SMCConfig(), LARGE).advice is None
    for config in (SMCConfig(mode="auto"), SMCConfig(max_lag=1)):
        assert Table.of(config, SMALL).advice is None


def test_the_table_says_slots_megabytes_and_the_longest_request() -> None:
    table = Table.of(SMCConfig(), replace(SMALL, beside={"rows of particles": 2_500_000}))
    words = [" ".join(line.split()) for line in table.lines()]
    assert words[0] == "KV pool 6,600 slots 1,081.3 MB"
    assert words[1].startswith("kept by smc 105 slots 17.2 MB a request beside its text; 4")
    assert words[-2:] == [
        "longest request 4,478 tokens",
        "rows of particles 2.5 MB beside the pool",
    ]
    assert table.is_shortened
    assert table.as_dict()["modes"]["smc"]["slots"] == arena.arena(SMCConfig(), 512)


def test_requests_are_counted_by_what_fits_into_a_short_context() -> None:
    table = Table.of(SMCConfig(), replace(SMALL, context_length=256))
    assert (table.prompt, table.answer, table.longest) == (170, 85, 255)
    assert not table.is_shortened


def test_what_stands_in_tensors_is_counted_through_tuples_and_objects() -> None:
    one = torch.zeros(3, dtype=torch.int64)
    assert tensor_bytes(SimpleNamespace(a=one, b=(one, {"c": one}), d="text", e=None)) == 72


def test_latents_are_keys_and_values_at_once() -> None:
    keys, values = (torch.zeros(7, 2, 8, dtype=torch.bfloat16) for _ in range(2))
    parts = {"get_key_buffer": lambda _: keys, "get_value_buffer": lambda _: values}
    assert slot_bytes(SimpleNamespace(start_layer=0, layer_num=3, **parts)) == 2 * 3 * 2 * 8 * 2
    parts["get_value_buffer"] = lambda _: keys[..., :4]
    assert slot_bytes(SimpleNamespace(start_layer=0, layer_num=3, **parts)) == 3 * 2 * 8 * 2


class Adder:
    """What admission touches of SGLang's, of every release."""

    def __init__(self) -> None:
        self.can_run_list: list[Any] = []
        self.memory_budget = SimpleNamespace(total_offset=0, current_offset=0)
        self.rem_total_token_offset = self.cur_rem_token_offset = 0

    @property
    def charged(self) -> int:
        budget = self.memory_budget
        assert budget.total_offset == budget.current_offset
        assert self.rem_total_token_offset == self.cur_rem_token_offset
        return budget.total_offset + self.rem_total_token_offset


@pytest.mark.parametrize(("mode", "slots"), [("smc", 105), ("exact", 81), ("auto", 81)])
def test_admission_asks_for_a_requests_own_arena(
    mode: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the server's mode, one that reserves 105 would be admitted where 81 are free."""
    monkeypatch.setattr(admission, "active_config", lambda: SMCConfig(mode="auto"))
    adder = Adder()
    asked = []

    def add(_: Any, request: Any, fits: bool) -> str:
        asked.append(adder.charged)
        adder.can_run_list += [request] * fits
        return "said"

    assert admission.add_one_req(add, adder, req(mode=mode), False) == "said"
    assert (asked, adder.charged) == ([slots], 0)
    assert admission.add_one_req(add, adder, req(mode=mode), True) == "said"
    assert (asked[1:], adder.charged) == ([slots], slots)


def test_a_prompt_in_parts_is_charged_and_no_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "active_config", SMCConfig)
    adder = Adder()
    seen = []
    admission.preempt_to_schedule(lambda *_: seen.append(adder.charged), adder, req(mode="exact"))
    assert (seen, adder.charged) == ([81], 0)
    admission.add_chunked_req(lambda *_: seen.append(adder.charged), adder, req(mode="exact"))
    assert (seen[1:], adder.charged) == ([0], 81)


@pytest.mark.parametrize(("slots", "names_it"), [(6600, True), (307_000, False)])
def test_a_long_request_is_told_what_the_pool_keeps(
    slots: int, names_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table.of(SMCConfig(), replace(SMALL, num_slots=slots))
    monkeypatch.setattr(admission, "active_config", SMCConfig)
    monkeypatch.setattr(process.active, "memory", table)
    said = "Input length (9 tokens) exceeds the maximum allowed length (5 tokens)."
    found = admission.validate_input_length(lambda *_: said, req(), 5, False)
    assert found is not None and found.startswith(said)
    assert ("holds 6600 tokens, of which 2121 are kept for the particles" in found) == names_it
    assert ("--speculative-smc-max-lag" in found) == names_it
    assert admission.validate_input_length(lambda *_: None, req(), 5, False) is None
