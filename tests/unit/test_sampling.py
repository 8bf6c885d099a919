"""What requests asked for, as tables: their own rules, their own ends."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sorted_law import sorted_law
from table_entries import entry

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.options.request import RequestConfig
from sglang_smc.state.edits import EditTable
from sglang_smc.state.settings import (
    RequestTable,
    Settings,
    TableEntry,
    filter_kinds,
    stop_tokens,
)
from sglang_smc.tokens.distribution import FilterKinds, SamplingRules, TokenDistribution
from sglang_smc.tokens.edits import edit_logits

VOCAB = 6


def spec(row: int = 1, **changes: Any) -> TableEntry:
    return entry(row, **{"stop_tokens": frozenset({2}), **changes})


def log_probs_of(
    settings: Settings,
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    filtered: bool,
    draft: bool = False,
) -> torch.Tensor:
    """The next token's law by the rules of each request, ``[G, M, V]``."""
    edited = legal(settings, logits, positions)
    kinds = FilterKinds(filtered, greedy=filtered)
    law = TokenDistribution.of(TORCH, edited, settings.sampling_rules(draft=draft), kinds)
    return law.log_probs(TORCH).view_as(logits)


def legal(settings: Settings, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits ``[G, M, V]`` without ends that come too early at ``positions`` ``[G, M]``, a run."""
    table, rows = EditTable(5, VOCAB, "cpu"), torch.arange(len(logits))
    edits = table.of_prefill([], rows, settings, positions[:, 0])._replace(groups=range(len(rows)))
    edited, drafts = logits.clone(), torch.zeros_like(positions)[:, None, 1:]
    edit_logits(edited.unsqueeze(1), edits, drafts, 0)
    return edited


def settings_of(*specs: TableEntry) -> Settings:
    table = RequestTable(5, VOCAB, "cpu")
    table.write(list(specs))
    return table.gather(torch.tensor([one.row for one in specs]))


def ends_of(settings: Settings, tokens: torch.Tensor, positions: torch.Tensor) -> list[list[bool]]:
    """Which tokens ``[G, M]`` at these positions end their texts."""
    return settings.ends(tokens.unsqueeze(1), positions.unsqueeze(1)).squeeze(1).tolist()


def test_stop_tokens_have_no_mass_before_min_new_tokens_and_all_of_it_after() -> None:
    settings = settings_of(spec(min_new_tokens=3, stop_tokens=frozenset({2, 4})))
    positions = torch.arange(6).view(1, 6)
    log_p = log_probs_of(settings, torch.zeros(1, 6, VOCAB), positions, filtered=False)[0]
    assert (log_p[:3, [2, 4]] == -torch.inf).all(), "tokens 0, 1 and 2 may not end the text"
    assert torch.allclose(log_p[:3, [0, 1, 3, 5]].exp(), torch.tensor(1 / 4))
    assert torch.allclose(log_p[3:].exp(), torch.tensor(1 / 6))


@pytest.mark.parametrize("filtered", [False, True])
def test_min_new_tokens_acts_before_the_filters(filtered: bool) -> None:
    """The likeliest token is a stop token: top-k must choose among the others."""
    logits = torch.tensor([[[0.0, 1.0, 9.0, 0.5, 0.0, 0.0]]])
    settings = settings_of(spec(min_new_tokens=1, top_k=1 if filtered else 1 << 30))
    log_p = log_probs_of(settings, logits, torch.tensor([[0]]), filtered=filtered)
    assert log_p.argmax(-1) == 1
    assert log_p[0, 0, 2] == -torch.inf


def test_every_request_keeps_its_own_rules_in_a_batch() -> None:
    specs = [
        spec(1, temperature=0.5, top_k=2),
        spec(3, temperature=2.0, top_p=0.6),
        spec(2, min_p=0.5, min_new_tokens=9),
    ]
    logits = torch.randn(3, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(4).expand(3, 4)
    together = log_probs_of(settings_of(*specs), logits, positions, filtered=True)
    for group, one in enumerate(specs):
        alone = log_probs_of(settings_of(one), logits[[group]], positions[[group]], filtered=True)
        assert torch.equal(together[[group]], alone)
    assert (together[0] > -torch.inf).sum(-1).tolist() == [2] * 4


def test_log_probs_leaves_the_logits_as_they_are() -> None:
    """The draft's logits may be a buffer that is used again."""
    logits = torch.zeros(1, 1, VOCAB)
    rules = settings_of(spec(top_k=1)).sampling_rules()
    law = TokenDistribution.of(TORCH, logits, rules, FilterKinds(filtered=True, greedy=True))
    assert law.log_probs(TORCH)[0].tolist() == [0.0, *[-torch.inf] * (VOCAB - 1)]
    assert not logits.any()


def test_a_text_ends_at_a_stop_token_or_at_its_limit() -> None:
    settings = settings_of(spec(max_new_tokens=4))
    tokens = torch.tensor([[2, 1, 1, 1, 2, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 3, 4]])
    assert ends_of(settings, tokens, positions) == [[True, False, False, True, True, True]]


def test_ignore_eos_leaves_the_limit_only() -> None:
    settings = settings_of(spec(ignore_eos=True, max_new_tokens=3))
    tokens, positions = torch.tensor([[2, 2, 2]]), torch.tensor([[0, 1, 2]])
    assert ends_of(settings, tokens, positions) == [[False, False, True]]


def test_stop_tokens_of_one_request_do_not_stop_another() -> None:
    settings = settings_of(spec(1, stop_tokens=frozenset({3})), spec(2, stop_tokens=frozenset()))
    tokens, positions = torch.tensor([[3, 2], [3, 2]]), torch.zeros(2, 2, dtype=torch.int64)
    assert ends_of(settings, tokens, positions) == [[True, False], [False, False]]


def test_a_row_that_is_used_again_forgets_its_former_request() -> None:
    table = RequestTable(3, VOCAB, "cpu")
    table.write([spec(1, stop_tokens=frozenset({0, 3, 5}), ignore_eos=True, top_k=1)])
    table.write([spec(1, stop_tokens=frozenset({4})), spec(2, seed=77)])
    found = table.gather(torch.tensor([1, 2]))
    assert found.stop_mask[0].nonzero().flatten().tolist() == [4]
    assert found.may_stop.tolist() == [True, True]
    assert found.top_k.tolist() == [1 << 30] * 2
    assert found.seeds.tolist() == [101, 77]


def test_large_seeds_and_small_fractions_survive_the_tables() -> None:
    found = settings_of(spec(seed=2**63 - 1, top_p=1e-6, min_p=0.25, temperature=1e-3))
    assert found.seeds.tolist() == [2**63 - 1]
    assert found.top_p.item() == pytest.approx(1e-6)
    assert found.min_p.item() == 0.25
    assert found.temperature.item() == pytest.approx(1e-3)


def test_a_draft_temperature_shapes_the_drafts_law_alone() -> None:
    own, shared = RequestConfig(draft_temperature=0.5), RequestConfig()
    settings = settings_of(
        spec(1, temperature=2.0, config=own), spec(2, temperature=2.0, config=shared)
    )
    logits = torch.randn(2, 1, VOCAB, generator=torch.Generator().manual_seed(1))
    positions = torch.zeros(2, 1, dtype=torch.int64)
    target = log_probs_of(settings, logits, positions, filtered=False)
    draft = log_probs_of(settings, logits, positions, filtered=False, draft=True)
    assert torch.equal(target, torch.log_softmax(logits / 2.0, -1))
    assert torch.equal(draft[0], torch.log_softmax(logits[0] / 0.5, -1))
    assert torch.equal(draft[1], target[1])


def test_the_tables_carry_what_each_request_chose() -> None:
    first = RequestConfig(
        num_particles=3,
        num_steps=2,
        ess_threshold=0.25,
        resample_at="token",
        selection="argmax",
        power=2.0,
        draft_temperature=0.5,
    )
    found = settings_of(spec(1, config=first), spec(3, config=RequestConfig(mode="exact")))
    assert found.num_particles.tolist() == [3, 8]
    assert found.num_steps.tolist() == [2, 8]
    assert found.weighs.tolist() == [True, False]
    assert found.ess_threshold.tolist() == [0.25, 0.5]
    assert found.at_token.tolist() == [True, False]
    assert found.heaviest.tolist() == [True, False]
    assert found.power.tolist() == [2.0, 1.0]
    assert found.evidence_threshold.tolist() == [0.0, float("inf")]


def tokenizer(eos: int | None, more: set[int] | None) -> SimpleNamespace:
    return SimpleNamespace(eos_token_id=eos, additional_stop_token_ids=more)


@pytest.mark.parametrize(
    ("request_tokens", "model_tokens", "tokenizer_tokens", "expected"),
    [
        (None, None, None, set()),
        ([5], None, None, {5}),
        (None, {1, 2}, None, {1, 2}),
        (None, None, tokenizer(3, None), {3}),
        (None, None, tokenizer(3, {4}), {3, 4}),
        (None, None, tokenizer(None, {4}), {4}),
        ([5], {1}, tokenizer(3, {4}), {1, 3, 4, 5}),
        ([-1, 6, 5], {99}, tokenizer(6, {-7}), {5}),  # ids outside the vocabulary
        ([0], None, None, {0}),  # 0 is a token like any other
    ],
)
def test_stop_tokens_come_from_request_model_and_tokenizer(
    request_tokens: list[int] | None,
    model_tokens: set[int] | None,
    tokenizer_tokens: SimpleNamespace | None,
    expected: set[int],
) -> None:
    found = stop_tokens(request_tokens, model_tokens, tokenizer_tokens, VOCAB)
    assert found == frozenset(expected)


KINDS = {
    "plain": ([spec(1, temperature=0.5), spec(2)], FilterKinds(False, False)),
    "greedy beside plain": ([spec(1, top_k=1), spec(2)], FilterKinds(False, True)),
    "filtered, greedy, plain": (
        [spec(1, top_p=0.7), spec(2, top_k=1), spec(3)],
        FilterKinds(True, True),
    ),
    "greedy, no early end": ([spec(1, top_k=1, min_new_tokens=9)], FilterKinds(False, True)),
    "no early end": ([spec(1, min_new_tokens=2), spec(2)], FilterKinds(False, False)),
}


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("draft", [False, True])
def test_a_law_is_what_the_rules_say_however_it_is_worked_out(name: str, draft: bool) -> None:
    specs, kinds = KINDS[name]
    logits = torch.randn(len(specs), 3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, :, 1] = logits[:, :, 4] = 9.0  # among equals the first is the likeliest
    positions = torch.arange(3).expand(len(specs), 3)
    settings = settings_of(*specs)
    rules = settings.sampling_rules(draft=draft)
    edited = legal(settings, logits, positions)
    expected = sorted_law(edited, SamplingRules(*(rule.unsqueeze(1) for rule in rules)))
    found = TokenDistribution.of(TORCH, edited, rules, kinds).log_probs(TORCH)
    assert torch.allclose(found, expected.flatten(0, 1), atol=1e-6)


def test_kinds_are_those_of_the_requests() -> None:
    def req(**params: object) -> SimpleNamespace:
        default = {"top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}
        sampling_params = SimpleNamespace(**(default | params))
        return SimpleNamespace(sampling_params=sampling_params, vocab_size=VOCAB)

    assert filter_kinds([req()]) == FilterKinds(filtered=False, greedy=False)
    assert filter_kinds([req(top_k=1, top_p=0.5)]) == FilterKinds(filtered=False, greedy=True)
    for filters in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert filter_kinds([req(), req(**filters)]) == FilterKinds(filtered=True, greedy=False)
