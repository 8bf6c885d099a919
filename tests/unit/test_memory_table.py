"""What a server tells of its memory, and what admission makes of arenas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_smc import process
from sglang_smc.memory import arena
from sglang_smc.memory.measured import slot_bytes, tensor_bytes
from sglang_smc.memory.table import Sizes, Table
from sglang_smc.options.server import SMCConfig
from sglang_smc.patches import admission

# Llama 3.1 8B and 3.2 1B on a card of 24 GB.
SMALL = Sizes(
    num_slots=6600,
    slot_bytes=160 << 10,
    target_slot_bytes=128 << 10,
    draft_weight_bytes=2_470_000_000,
    most_running=48,
    context_length=131_072,
)
LARGE = Sizes(
    num_slots=307_000,
    slot_bytes=160 << 10,
    target_slot_bytes=128 << 10,
    draft_weight_bytes=2_470_000_000,
    most_running=48,
    context_length=131_072,
)


def test_a_small_pool_is_told_with_the_flags_that_mend_it() -> None:
    table = Table.of(SMCConfig(max_lag=256), SMALL)
    assert {name: (m.slots, m.fits) for name, m in table.modes.items()} == {
        "smc": (2121, 1),
        "exact, mixed, auto": (81, 4),
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


@pytest.mark.parametrize(
    ("config", "sizes"),
    [(SMCConfig(), LARGE), (SMCConfig(mode="auto"), SMALL), (SMCConfig(max_lag=1), SMALL)],
)
def test_nothing_is_advised_where_nothing_helps(config: SMCConfig, sizes: Sizes) -> None:
    assert Table.of(config, sizes).advice is None


def test_the_table_says_slots_megabytes_and_the_longest_request() -> None:
    sizes = {"beside": {"rows of particles": 2_500_000}}
    table = Table.of(SMCConfig(), Sizes(**{**SMALL_FIELDS, **sizes}))
    text = table.as_text()
    for line in (
        "KV pool                            6,600 slots    1,081.3 MB",
        "kept by smc                          105 slots       17.2 MB a request beside its text; 4",
        "kept by exact, mixed, auto            81 slots       13.3 MB a request beside its text; 4",
        "requests that fit are of    1,024 + 512 tokens; without SMC 17 would fit",
        "longest request                   4,478 tokens",
        "rows of particles                                     2.5 MB beside the pool",
    ):
        assert line in text
    assert table.is_shortened
    assert table.as_dict()["modes"]["smc"]["slots"] == arena.arena(SMCConfig(), 512)


SMALL_FIELDS = {name: getattr(SMALL, name) for name in SMALL.__struct_fields__}


def test_requests_are_counted_by_what_fits_into_a_short_context() -> None:
    table = Table.of(SMCConfig(), Sizes(**{**SMALL_FIELDS, "context_length": 256}))
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


class Adder(SimpleNamespace):
    """What admission touches of SGLang's, of every release."""

    def __init__(self) -> None:
        super().__init__(
            can_run_list=[],
            memory_budget=SimpleNamespace(total_offset=0, current_offset=0),
            rem_total_token_offset=0,
            cur_rem_token_offset=0,
        )

    @property
    def charged(self) -> int:
        budget = self.memory_budget
        assert budget.total_offset == budget.current_offset
        assert self.rem_total_token_offset == self.cur_rem_token_offset
        return budget.total_offset + self.rem_total_token_offset


def req(mode: str) -> Any:
    params = SimpleNamespace(max_new_tokens=500, top_k=-1, custom_params={"smc": {"mode": mode}})
    return SimpleNamespace(sampling_params=params, output_ids=[], grammar=None)


@pytest.mark.parametrize(("mode", "slots"), [("smc", 105), ("exact", 81), ("auto", 81)])
def test_a_request_is_asked_whether_its_own_arena_fits(
    mode: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the server's mode, one that reserves 105 would be admitted where 81 are free."""
    monkeypatch.setattr(admission, "active_config", lambda: SMCConfig(mode="auto"))
    adder, asked = Adder(), []

    def add(_: Any, request: Any, fits: bool) -> str:
        asked.append(adder.charged)
        adder.can_run_list += [request] * fits
        return "said"

    assert admission.add_one_req(add, adder, req(mode), False) == "said"
    assert (asked, adder.charged) == ([slots], 0)
    assert admission.add_one_req(add, adder, req(mode), True) == "said"
    assert (asked[1:], adder.charged) == ([slots], slots)


def test_a_prompt_in_parts_is_charged_and_a_preemption_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "active_config", lambda: SMCConfig())
    adder = Adder()
    seen = []
    admission.preempt_to_schedule(lambda *_: seen.append(adder.charged), adder, req("exact"))
    assert (seen, adder.charged) == ([81], 0)
    admission.add_chunked_req(lambda *_: seen.append(adder.charged), adder, req("exact"))
    assert (seen[1:], adder.charged) == ([0], 81)


@pytest.mark.parametrize(("slots", "names_it"), [(6600, True), (307_000, False)])
def test_a_request_that_is_too_long_is_told_what_the_pool_keeps(
    slots: int, names_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SMCConfig()
    sizes = Sizes(**{**SMALL_FIELDS, "num_slots": slots})
    monkeypatch.setattr(admission, "active_config", lambda: config)
    monkeypatch.setattr(process, "_memory", Table.of(config, sizes))
    said = "Input length (9 tokens) exceeds the maximum allowed length (5 tokens)."
    found = admission.validate_input_length(lambda *_: said, req("smc"), 5, False)
    assert found is not None and found.startswith(said)
    assert ("holds 6600 tokens, of which 2121 are kept for the particles" in found) == names_it
    assert ("--speculative-smc-max-lag" in found) == names_it
    assert admission.validate_input_length(lambda *_: None, req("smc"), 5, False) is None
