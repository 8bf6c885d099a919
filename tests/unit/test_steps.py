"""The weight of a text counts its tokens up to its end, and none behind it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edit_cases import NEUTRAL
from table_entries import entry

from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.options.request import config_of, request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.requests.rules import TextRules
from sglang_smc.requests.state import RequestState
from sglang_smc.round.batch import RoundBatch, shape_of
from sglang_smc.round.decision import Drafts
from sglang_smc.round.steps import Steps, still_open
from sglang_smc.state.population import Population
from sglang_smc.state.settings import RequestTable
from sglang_smc.tokens.distribution import TokenDistribution

EOS, VOCAB, LIMIT = 2, 4, 100
SERVER = SMCConfig(num_particles=3, num_steps=3, evidence_threshold=0.0)
STEPS = Steps(None, None, None, TORCH)  # type: ignore[arg-type]


def groups(*chosen: dict[str, Any]) -> RoundBatch:
    params = {"top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}
    params |= {"min_new_tokens": 0, **NEUTRAL}
    reqs: Any = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(
                custom_params={"smc": mine}, max_new_tokens=LIMIT, **params
            ),
            custom_logit_processor=None,
            output_ids=[0],
            vocab_size=VOCAB,
            grammar=None,
            return_logprob=False,
            smc_state=RequestState.of(0, request_config(SERVER, {"smc": mine})),
        )
        for mine in chosen
    ]
    table = RequestTable(1 + len(reqs), VOCAB, "cpu")
    table.write(
        [
            entry(
                row,
                config_of(SERVER, req),
                top_k=VOCAB,
                max_new_tokens=LIMIT,
                stop_tokens=frozenset({EOS}),
            )
            for row, req in enumerate(reqs, start=1)
        ]
    )
    rows = torch.arange(1, 1 + len(reqs))
    nothing, settings = torch.zeros(len(reqs), dtype=torch.int64), table.gather(rows)
    starts = torch.zeros(len(reqs), 3, dtype=torch.int64)
    shape = shape_of(reqs)
    return RoundBatch(
        reqs=reqs,
        shape=shape,
        rows=rows,
        committed=nothing,
        allocated=nothing,
        starts=starts,
        column=torch.arange(shape.num_steps),
        furthest=starts,
        last_two=starts.unsqueeze(2).expand(-1, -1, 2),
        may_stratify=starts == 0,
        settings=settings,
        p_rules=settings.sampling_rules(),
        q_rules=settings.sampling_rules(draft=True),
        rules=TextRules(),
    )


def population(ended: list[list[bool]], sizes: list[int]) -> Population:
    size = len(ended)
    present = torch.arange(3) < torch.tensor(sizes).unsqueeze(1)
    return Population(
        texts=torch.zeros(size, 3, 2 + 10, dtype=torch.int64),
        lengths=present.long(),
        ended=torch.tensor(ended) | ~present,
        log_weights=torch.where(present, 0.0, -torch.inf).double(),
        num_emitted=torch.ones(size, dtype=torch.int64),
        log_evidence=torch.zeros(size, dtype=torch.float64),
        present=present,
        roots=torch.arange(3).expand(size, 3),
        unread=torch.zeros(size, dtype=torch.bool),
        fidelity=torch.zeros(size, 3, 4).double(),
    )


def drafts(of: RoundBatch, before: Population, tokens: torch.Tensor) -> Drafts:
    ends = tokens == EOS
    within = torch.arange(tokens.shape[2]) < of.settings.num_steps.view(-1, 1, 1)
    before_end = still_open(ends) & within & ~before.ended.unsqueeze(2)
    return Drafts(tokens, torch.full(tokens.shape, -2.0), ends, before_end, None)


def law_of(values: list[float]) -> torch.Tensor:
    """One column a value, the log-probability of tokens 0, 1 and 2 there: ``[1, 3, 4, V]``."""
    three = torch.tensor(values).view(-1, 1).expand(-1, 3)
    rest = torch.log1p(-three.exp().sum(1, keepdim=True))
    return torch.cat([three, rest], dim=1).expand(1, 3, -1, -1)


def flat(log_p: torch.Tensor) -> TokenDistribution:
    return TokenDistribution.of_log_probs(log_p.flatten(0, 2))


LOG_P = law_of([-1.9, -1.99, -1.999, -3.0])
TOKENS = torch.tensor([[[0, 1, 0], [0, EOS, 1], [1, 1, 0]]])


def test_weights_count_the_end_but_nothing_behind_it() -> None:
    """Ended before, ended by the second draft, never ended: 0, 2 and 3 columns of weight."""
    before = population([[True, False, False]], [3])
    of = groups({})
    decision = STEPS.decide(of, before, drafts(of, before, TOKENS), flat(LOG_P))
    expected = torch.tensor([[0.0, 0.1 + 0.01, 0.1 + 0.01 + 0.001]], dtype=torch.float64)
    assert torch.allclose(decision.cut.log_weights, expected, atol=1e-6)
    assert torch.equal(decision.resampled.log_weights, decision.cut.log_weights)
    assert decision.num_kept.tolist() == [[0, 2, 3]]


def test_extending_ends_the_texts_whose_end_is_kept() -> None:
    ledger = SimpleNamespace(descend=lambda *_, **__: None)
    steps = Steps(None, None, ledger, TORCH)  # type: ignore[arg-type]
    of, before = groups({}), population([[True, False, False]], [3])
    proposed = drafts(of, before, TOKENS)
    decision = steps.decide(of, before, proposed, flat(LOG_P))
    after = steps.extend(of, before, proposed, decision)
    assert torch.equal(after.log_weights, decision.cut.log_weights)
    assert after.lengths.tolist() == [[1, 3, 4]]
    assert after.ended.tolist() == [[True, True, False]]
    cut = decision._replace(num_kept=torch.tensor([[0, 1, 1]]))
    after = steps.extend(of, before, proposed, cut)
    assert after.ended.tolist() == [[True, False, False]], "that end is not part of the text"


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_a_power_weighs_p_and_leaves_q(power: float) -> None:
    before = population([[False] * 3], [3])
    tokens = torch.zeros(1, 3, 3, dtype=torch.int64)
    log_p = LOG_P.clone()
    log_p[:, 0] = law_of([-2.0] * 4)[:, 0]
    of = groups({"power": power})
    decision = STEPS.decide(of, before, drafts(of, before, tokens), flat(log_p))
    shared = power * (-1.9 - 1.99 - 1.999) + 6
    expected = torch.tensor([[6 - 6 * power, shared, shared]], dtype=torch.float64)
    assert torch.allclose(decision.cut.log_weights, expected, atol=1e-6)


def test_a_group_weighs_its_own_columns_and_particles() -> None:
    """Beside one of three particles and columns: two columns of two particles, and no more."""
    of = groups({}, {"num_particles": 2, "num_steps": 2})
    tokens = torch.zeros(2, 3, 3, dtype=torch.int64)
    before = population([[False] * 3] * 2, [3, 2])
    log_p = LOG_P.expand(2, 3, 4, VOCAB)
    decision = STEPS.decide(of, before, drafts(of, before, tokens), flat(log_p))
    assert decision.cut.num_columns.tolist() == [3, 2]
    assert decision.num_kept.tolist() == [[3, 3, 3], [2, 2, 0]]
    expected = torch.tensor([[0.111] * 3, [0.11, 0.11, -torch.inf]], dtype=torch.float64)
    assert torch.allclose(decision.cut.log_weights, expected, atol=1e-6)
    next_log_p = decision.next_tokens.law.log_probs(TORCH).view(2, 3, VOCAB)
    assert torch.allclose(next_log_p[1, :2], LOG_P[0, 0, 2]), "behind its own last"


def test_who_grows_gets_the_slot_before_its_tail_too() -> None:
    """The draft may have yet to read it, through the particle's own row."""
    called: list[dict[str, Any]] = []
    ledger = SimpleNamespace(descend=lambda _, **arguments: called.append(arguments))
    steps = Steps(None, None, ledger, TORCH)  # type: ignore[arg-type]
    of_three = groups({})
    committed = torch.tensor([7])
    of_three = of_three._replace(committed=committed)
    before = population([[False] * 3], [2])
    after, _ = steps.resize(of_three, before._replace(log_weights=before.log_weights + 0.5))
    assert [arguments["committed"].tolist() for arguments in called] == [[6]]
    assert after.lengths.tolist() == [[1, 1, 1]]
    assert after.present.all() and not after.ended.any()
    assert after.log_weights.tolist() == [[0.0] * 3]
    assert after.log_evidence.item() == pytest.approx(0.5)
