"""What a block drafts after each token of a chain is what the classes say that define its head."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.models.dspark import build_markov_head

from sglang_smc.proposers.base import DraftSlots
from sglang_smc.proposers.dflash2 import DFlash2Head
from sglang_smc.proposers.dspark import DSparkHead

STEPS, REQUESTS, PARTICLES, WIDTH, VOCAB = 4, 2, 3, 12, 20
NONE = torch.zeros(STEPS + 2, REQUESTS, PARTICLES, dtype=torch.int64)
SLOTS = DraftSlots(NONE, NONE, *cast("Any", (None, None)))


class Block(SimpleNamespace):
    """A block's pass with random outputs, new ones each time."""

    def __init__(self) -> None:
        super().__init__(attn_backend=None)

    def block_logits(self, blocks: Any, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = blocks.tokens.shape[2] - first, *blocks.tokens.shape[:2]
        self.logits = torch.randn(*shape, VOCAB)
        self.states = torch.randn(*shape, WIDTH)
        return self.logits, self.states


def drafted(head: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[K, G, N, V]`` of a round after the tokens ``[K, G, N]``, the first the last one."""
    pairs = torch.stack([tokens[0], tokens[0]], 2)
    found = [head.first_logits(pairs, SLOTS)]
    found += [head.next_logits(step, tokens[step], SLOTS) for step in range(1, len(tokens))]
    return torch.stack(found)


def by_block(rows: torch.Tensor) -> torch.Tensor:
    """Of ``[K, G, N, ...]`` the rows of each particle, ``[G * N, K, ...]``."""
    return rows.flatten(1, 2).transpose(0, 1)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_add_what_speculators_adds(kind: str) -> None:
    """In two rounds: a state begins anew. SGLang's class has the weights, ours reads them."""
    theirs = pytest.importorskip("speculators.models.dspark.model_definitions")
    torch.manual_seed(0)
    sizes = {"markov_rank": 6, "hidden_size": WIDTH}
    config = SimpleNamespace(**sizes, markov_head_type=kind, vocab_size=VOCAB)
    markov: Any = build_markov_head(config)
    other = theirs.MarkovHead(
        verifier_vocab_size=VOCAB, draft_vocab_size=VOCAB, head_type=kind, **sizes
    )
    other.load_state_dict(markov.state_dict())
    block: Any = Block()
    head = DSparkHead(block, 3, first=0, markov=markov)
    for _ in range(2):
        tokens = torch.randint(VOCAB, (STEPS, REQUESTS, PARTICLES))
        found = by_block(drafted(head, tokens) - block.logits)
        given = {"prev_token_ids": by_block(tokens), "hidden_states": by_block(block.states)}
        expected = other.block_bias(**given)
        assert expected.abs().max() > 0.3
        assert torch.allclose(found, expected, atol=1e-4)


@torch.no_grad()
def test_a_selector_scores_the_candidates_that_speculators_scores() -> None:
    """After any token, a candidate of the row before or not; all others have no mass."""
    theirs = pytest.importorskip("speculators.models.dflash2.model_definitions")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "top_k": 7, "initializer_range": 0.5}
    selector = theirs.CandidateSelector(rank=6, **sizes)
    block: Any = Block()
    head = DFlash2Head(block, 3, selector=selector, transform=lambda logits: 2 * logits)
    tokens = torch.randint(VOCAB, (STEPS, REQUESTS, PARTICLES))
    found = drafted(head, tokens)
    ids, scores = selector.select(2 * block.logits, block.states, tokens)
    assert torch.allclose(found.gather(-1, ids), scores, atol=1e-4)
    assert torch.equal(found.isfinite().sum(-1), torch.full_like(tokens, 7))
    assert (scores - 2 * block.logits.gather(-1, ids)).abs().max() > 0.3
