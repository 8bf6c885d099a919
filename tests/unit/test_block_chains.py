"""What a block drafts after each token of a chain is what the classes say that define its head."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_cuda import Account
from sglang.srt.models.dspark import build_markov_head
from torch import nn

from sglang_smc.drafts.heads import lilicorr
from sglang_smc.proposers.base import DraftSlots
from sglang_smc.proposers.dflash2 import DFlash2Head
from sglang_smc.proposers.domino import DominoHead
from sglang_smc.proposers.dspark import DSparkHead
from sglang_smc.proposers.lilicorr import LiLiCorrHead, lattice_scores
from sglang_smc.upstream import IS_NEWER, IS_NEWEST

if IS_NEWER:
    from sglang.srt.speculative.domino_utils import domino_greedy_rollout
if IS_NEWEST:
    from sglang.srt.models.lilicorr import LiLiCorrHead as Lattice
    from sglang.srt.speculative.lilicorr_utils import LiLiCorrConfig

STEPS = 4
REQUESTS = 2
PARTICLES = 3
WIDTH = 12
VOCAB = 20
NONE = torch.zeros(STEPS + 2, REQUESTS, PARTICLES, dtype=torch.int64)
SLOTS = DraftSlots(NONE, NONE, *cast("Any", (None, None)))


class Block(SimpleNamespace):
    """A block's pass with random outputs, new ones each time."""

    def __init__(self) -> None:
        tables = {name: torch.randn(VOCAB, WIDTH) for name in ("table", "lm_head")}
        super().__init__(attn_backend=None, **tables)

    def block_logits(self, blocks: Any, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        shape = *blocks.tokens.shape[:2], blocks.tokens.shape[2], WIDTH
        self.rows = torch.randn(shape)
        self.states = self.rows[:, :, rows].permute(2, 0, 1, 3)
        self.logits = self.states @ self.lm_head.T
        return self.logits, self.states

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


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


@torch.no_grad()
@pytest.mark.skipif(not IS_NEWER, reason="older releases have no Domino heads")
@pytest.mark.parametrize("shifts", [True, False])
def test_a_domino_chain_of_likeliest_tokens_is_sglangs(shifts: bool) -> None:
    """In two rounds, of blocks of K + 1 rows, whichever of them draft."""
    torch.manual_seed(0)
    block: Any = Block()
    gru: Any = nn.GRU(WIDTH, 5, bias=False, batch_first=True)
    layers = nn.Linear(WIDTH + 5, 8, False), nn.SiLU(), nn.Linear(8, VOCAB, False)
    correct = nn.Sequential(*layers)
    for weight in (*gru.parameters(), *correct.parameters()):
        nn.init.normal_(weight)
    given = {"prefix_gru": gru, "embed_proj": correct, "shift_label": shifts}
    given |= {"vocab_size": VOCAB, "candidate_pool_size": 0, "in_cuda_graph": False}
    head = DominoHead(block, 3, first=1 - shifts, gru=gru, correct=correct)
    plain = []
    for _ in range(20):
        last = torch.randint(VOCAB, (REQUESTS, PARTICLES))
        logits = head.first_logits(torch.stack([last, last], 2), SLOTS)
        chain = [logits.argmax(2)]
        for step in range(1, STEPS):
            chain.append(head.next_logits(step, chain[-1], SLOTS).argmax(2))
        expected = domino_greedy_rollout(
            draft_hidden=block.rows.flatten(0, 1),
            bonus_tokens=last.flatten(),
            target_embedding=block.embed,
            lm_head_weight=block.lm_head,
            **given,
        )
        assert torch.equal(by_block(torch.stack(chain)), expected)
        plain.append(torch.equal(by_block(block.logits.argmax(3)), expected))
    assert not any(plain), "no correction changed a token"


LATTICE: dict[str, Any] = {"candidate_topk": 4, "num_layers": 2, "num_heads": 2}
LATTICE |= {"mlp_ratio": 1.5, "factor_dim": 5, "vector_eps": 1e-6, "logit_scale": 7.0}


def make_lattice(width: int) -> Any:
    """SGLang's, with random weights; ``width`` 0 is that of the block."""
    sizes = {"model_hidden_size": WIDTH, "block_size": STEPS + 1, "rms_norm_eps": 1e-6}
    lattice: Any = Lattice(**sizes, config=LiLiCorrConfig(**LATTICE, hidden_size=width))
    for weight in lattice.parameters():
        nn.init.normal_(weight, std=0.5)
    lattice.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    return lattice


@torch.no_grad()
@pytest.mark.skipif(not IS_NEWEST, reason="older releases have no LiLiCorr heads")
def test_a_lattice_is_walked_as_sglang_walks_it() -> None:
    """By the likeliest candidates. Launches, of calls that are more than views, are counted."""
    torch.manual_seed(0)
    lattice = make_lattice(8)
    block = cast("Any", Block())
    before = torch.randn(REQUESTS, PARTICLES, WIDTH)
    table: Any = SimpleNamespace(before=lambda *_: before)
    given = {"lattice": lattice, "table": table, "ledger": cast("Any", None)}
    head = LiLiCorrHead(block, 3, **given, num_particles=PARTICLES)
    at = SLOTS._replace(locations=cast("Any", SimpleNamespace(particle_rows=None)))
    last = torch.randint(VOCAB, (REQUESTS, PARTICLES))
    chain = [last]
    launches = []
    for step in range(STEPS):
        pairs = torch.stack([last, last], 2)
        with Account() as account:
            logits = head.next_logits(step, chain[-1], at) if step else head.first_logits(pairs, at)
        launches.append(len(account.calls))
        assert torch.equal(logits.isfinite().sum(2), torch.full_like(last, 4))
        chain.append(logits.argmax(2))
    likeliest = by_block(block.logits).log_softmax(2).topk(4)
    size = REQUESTS * PARTICLES
    tokens, _ = lattice.select_with_proposal(
        token_embeddings=block.embed(likeliest.indices),
        candidate_tokens=likeliest.indices,
        candidate_log_probs=likeliest.values,
        pass_hidden=by_block(block.states),
        anchor_hidden=before.flatten(0, 1),
        anchor_valid=torch.ones(size, dtype=torch.bool),
        uniforms=torch.zeros(size, STEPS),
        temperatures=torch.ones(size),
        greedy_mask=torch.ones(size, dtype=torch.bool),
    )
    found = by_block(torch.stack(chain[1:]))
    assert torch.equal(found, tokens) and not torch.equal(found, likeliest.indices[:, :, 0])
    assert launches[0] <= 120 and max(launches[1:]) <= 10


@torch.no_grad()
@pytest.mark.skipif(not IS_NEWEST, reason="older releases have no LiLiCorr heads")
@pytest.mark.parametrize("width", [0, 8], ids=["as wide as the block", "narrower"])
@pytest.mark.parametrize("steps", [STEPS, 2], ids=["the whole block", "two rows of it"])
def test_a_lattice_scores_candidates_as_sglang_does(width: int, steps: int) -> None:
    """By the weights themselves, which new ones replace in place; its tensors are on the list."""
    torch.manual_seed(0)
    lattice = make_lattice(width)
    lattice.set_active_block_size(steps + 1)
    blocks = 6
    embedded = torch.randn(blocks, steps, 4, WIDTH)
    log_probs = torch.randn(blocks, steps, 4).log_softmax(2).sort(2, descending=True).values
    outputs = torch.randn(blocks, steps, WIDTH)
    before = torch.randn(blocks, WIDTH)
    found = lattice_scores(lattice, embedded, log_probs, outputs, before)
    scored = lattice.score(
        token_embeddings=embedded.unsqueeze(1),
        candidate_log_probs=log_probs.unsqueeze(1),
        pass_hidden=outputs.unsqueeze(1),
        anchor_hidden=before.unsqueeze(1),
        anchor_valid=torch.ones(blocks, 1, dtype=torch.bool),
    )
    for ours, theirs in zip(found, lattice.log_factors(*scored), strict=True):
        assert torch.allclose(ours, theirs[:, 0], atol=1e-4) and theirs.std() > 0.5
    block = {
        f"{lilicorr.LATTICE}{name}": value
        for name, value in (LATTICE | {"hidden_size": width}).items()
    }
    whole = {"hidden_size": WIDTH, "block_size": STEPS + 1, **block}
    own = {f"lilicorr.{name}": tuple(one.shape) for name, one in lattice.named_parameters()}
    assert lilicorr._lattice(whole) == own
