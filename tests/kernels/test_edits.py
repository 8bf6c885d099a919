"""Penalties, biases and no early ends, kernel against reference."""

from unittest import mock

import pytest
import torch
from drawn import Case, copied, drawn
from hypothesis import strategies as st

from sglang_smc.kernels import edits as kernel
from sglang_smc.smc import edits
from sglang_smc.smc.edits import EditColumns, Edits

NUM_ROWS = 7
EDITED = {
    "nothing": (False, False, 0),
    "penalties": (True, False, 0),
    "biases": (False, True, 0),
    "a least length": (False, False, 9),
    "all": (True, True, 9),
}


def edits_of(names: list[str], num_particles: int, max_tail: int, vocab: int, seed: int) -> Edits:
    """Requests in arbitrary rows, each with the edits of a name; few tokens, so that they recur.

    Positions lie around the least length. Wide rows of the tables say something of requests that
    asked for nothing, too.
    """
    c = Case(seed=seed)
    size = len(names)
    rows = torch.randperm(NUM_ROWS - 1, generator=c.generator)[:size] + 1
    flags = torch.tensor([EDITED[name] for name in names])
    counts = c.whole(0, 4, NUM_ROWS, vocab).int()
    columns = EditColumns(
        penalizes=torch.zeros(NUM_ROWS).bool().index_fill(0, rows[flags[:, 0] > 0], True),
        biases=torch.zeros(NUM_ROWS).bool().index_fill(0, rows[flags[:, 1] > 0], True),
        rates=c.uniforms(NUM_ROWS, 3).float() + torch.tensor([-0.5, -0.5, 0.5]),
        counts=counts * (counts > 1),
        bias=c.normal(NUM_ROWS, vocab),
    )
    shape = size, num_particles, 1 + max_tail
    recurring = torch.tensor([0, vocab // 2, vocab - 1])[c.whole(0, 3, *shape)]
    texts = torch.where(c.flags(0.5, *shape), c.whole(0, vocab, *shape), recurring)
    return Edits(
        columns,
        range(size),
        rows,
        min_new_tokens=flags[:, 2],
        stop_mask=c.flags(0.2, size, vocab),
        starts=c.whole(4, 12, *shape[:2]),
        # A round hands on a part of what a population holds.
        texts=torch.cat([texts[:, :, :1], texts], dim=2)[:, :, 1:],
        lengths=c.whole(0, max_tail + 2, *shape[:2]),
    )


def drafts_of(of: Edits, num_drafted: int) -> torch.Tensor:
    """``[G, N, J]``: tokens of the texts again, or their neighbours."""
    place = torch.arange(num_drafted) % of.texts.shape[2]
    near = of.texts[:, :, place] + torch.arange(num_drafted) % 2
    return near % of.stop_mask.shape[1]


def check(
    logits: torch.Tensor, of: Edits, drafts: torch.Tensor, first: int, device: str
) -> torch.Tensor:
    """The kernel's logits, which are the reference's, and untouched where nothing is asked."""
    expected, found, there = logits.clone(), *copied((logits, of), device)
    edits.edit_logits(expected, of, drafts, first)
    kernel.edit_logits(found, there, drafts.to(device), first)
    found = found.cpu()
    if device == "cpu" and logits.dtype == torch.float32:  # the interpreter rounds to bf16 its way
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected)
    asks = of.columns.penalizes[of.rows] | of.columns.biases[of.rows] | (of.min_new_tokens > 0)
    assert torch.equal(found[~asks], logits[~asks])
    return found


@drawn(
    14,
    names=st.lists(st.sampled_from(list(EDITED)), min_size=1, max_size=3),
    num_particles=[1, 2],
    num_drafted=[0, 1, 2],
    is_step=st.booleans(),
    max_tail=[0, 1, 13],
    vocab_size=[1, 5, 16, 33],
    dtype=[torch.float32, torch.bfloat16],
)
def test_small_rows(c: Case, device: str) -> None:
    """A step of drafting or all columns of a verification; several tiles, texts of many blocks."""
    of = edits_of(c.names, c.num_particles, c.max_tail, c.vocab_size, c.seed)
    num_columns = 1 if c.is_step else c.num_drafted + 1
    shape = len(c.names), c.num_particles, num_columns, c.vocab_size
    logits = (c.normal(*shape) * 3).to(c.dtype)
    first = c.num_drafted if c.is_step else 0
    with mock.patch.multiple(kernel, _TILE=16, _BLOCK=4):
        check(logits, of, drafts_of(of, c.num_drafted), first, device)


@pytest.mark.parametrize("vocab_size", [4096, 5000])
def test_rows_of_a_real_vocabulary_behind_the_longest_texts(vocab_size: int, device: str) -> None:
    of = edits_of(["all", "nothing"], 1, 256, vocab_size, seed=3)
    of = of._replace(lengths=torch.full_like(of.lengths, 257))
    check(Case(seed=4).normal(2, 1, 3, vocab_size) * 3, of, drafts_of(of, 2), 0, device)


def test_logits_in_strides_of_their_own(device: str) -> None:
    """As where a step of drafting has read two tokens, or columns come first."""
    of = edits_of(["all", "penalties"], 3, 5, 33, seed=8)
    wide = Case(seed=1).normal(4, 2, 3, 40).to(device)
    around = wide.clone()
    logits = wide.permute(1, 2, 0, 3)[:, :, 1:3, :33]  # [G, N, 2, V]
    expected = check(logits.cpu(), of, drafts_of(of, 1), 0, device)
    kernel.edit_logits(logits, *copied((of, drafts_of(of, 1)), device), 0)
    torch.testing.assert_close(logits.cpu(), expected)
    with pytest.raises(ValueError, match="must be 1"):
        kernel.edit_logits(wide[:, :, :2].mT, *copied((of, drafts_of(of, 1)), device), 0)
    logits.copy_(around.permute(1, 2, 0, 3)[:, :, 1:3, :33])
    assert torch.equal(wide, around)


NAMES = st.lists(st.sampled_from(["penalties", "biases"]), min_size=1, max_size=4)


@drawn(8, names=NAMES, max_tail=[0, 3, 40])
def test_settled_tokens_are_counted(c: Case, device: str) -> None:
    """Some of a text, or none; the same token many times; nothing of a request that only biases."""
    of = edits_of(c.names, 2, c.max_tail, 9, c.seed)
    tokens = of.texts[:, 0]
    counts = of.lengths[:, 0] - 1  # -1 is as good as 0
    there = copied(of, device)
    kernel.count_tokens(there.columns, there.rows, tokens.to(device), counts.to(device))
    before = of.columns.counts.clone()
    edits.count_tokens(of.columns, of.rows, tokens, counts)
    assert torch.equal(there.columns.counts.cpu(), of.columns.counts)
    added = (of.columns.counts - before)[of.rows].sum(1)
    expected = torch.where(of.columns.penalizes[of.rows], counts.clamp_min(0), 0)
    assert torch.equal(added, expected)
