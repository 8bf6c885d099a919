"""Target and draft have the same tokens; their logits may have different padding."""

from typing import Any, cast

import pytest
import torch

from sglang_smc.models import vocabulary
from sglang_smc.models.chains import Chains
from sglang_smc.models.vocabulary import Vocabulary

TOKENS = {"a": 0, "b": 1, "c": 2, "d": 3}


def of(width: int, **other: int) -> Vocabulary:
    return Vocabulary({**TOKENS, **other}, width)


class Draft:
    """Stands for a draft over particles, with an embedding of each of its ids alone."""

    attn_backend: Any = "its own"

    def __init__(self, width: int) -> None:
        self._table = torch.arange(width * width).float().view(width, width)

    def next_logits(self, chains: Chains) -> torch.Tensor:
        return self.chain_logits(chains)[:, :, -1]

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        return self._table[chains.tokens]


MARKED = {**TOKENS, "<image>": 4}


@pytest.mark.parametrize(
    "pair",
    [
        *(tuple(map(of, widths)) for widths in ((4, 4), (4, 6), (6, 4), (8, 6))),
        # Gemma 3's tokenizer has a marker for images behind all that its text models have.
        tuple(Vocabulary(MARKED, width, frozenset({"<image>"})) for width in (6, 4)),
        # Without tokenizers widths are all there is; and where they agree, ids beyond them are the
        # tokenizer's own affair.
        (Vocabulary(None, 4), Vocabulary(None, 4)),
        (of(3), of(3)),
    ],
)
def test_padding_and_markers_are_no_difference(pair: tuple[Vocabulary, Vocabulary]) -> None:
    vocabulary.check(*pair)


@pytest.mark.parametrize(
    ("target", "draft", "says"),
    [
        (of(4), of(4, a=1, b=0), "2 tokens differ: 'a' is 0 in the target and 1 in the draft"),
        (of(5), of(5, e=4), "1 tokens differ: 'e' is None in the target and 4 in the draft"),
        (of(4), of(3), "4 in the target and 3 in the draft, and text has ids up to 3"),
        (of(3), of(4), "3 in the target and 4 in the draft, and text has ids up to 3"),
        (Vocabulary(None, 4), of(5), "leave out --skip-tokenizer-init"),
        (of(4), Vocabulary(None, 5), "leave out --skip-tokenizer-init"),
    ],
)
def test_other_tokens_are_refused(target: Vocabulary, draft: Vocabulary, says: str) -> None:
    with pytest.raises(ValueError, match=r"^--speculative-draft-model-path: ") as error:
        vocabulary.check(target, draft)
    assert says in str(error.value)
    assert str(error.value).endswith("Choose a draft of the target's family.")


def test_markers_that_differ_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """R1-Distill-Llama has Llama's text, and markers of its own in the places of Llama's."""
    sides = [Vocabulary({**TOKENS, name: 4}, 5, frozenset({name})) for name in ("<a>", "<b>")]
    caplog.set_level("WARNING")  # engines of other tests have set another
    vocabulary.check(sides[0], sides[0])
    assert not caplog.messages
    vocabulary.check(*sides)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("2 markers differ")


def chains(*tokens: list[int]) -> Chains:
    rest: Any = [None] * 3
    return Chains(torch.tensor([tokens]), *rest)


def test_one_width_needs_no_launch() -> None:
    draft: Any = Draft(4)
    assert vocabulary.with_width(draft, of(4), of(4)) is draft
    tokens = torch.tensor([1, 3])
    assert vocabulary.readable(tokens, vocabulary.last_read(of(4), of(4))) is tokens


def test_what_the_draft_lacks_it_never_proposes_and_reads_as_its_last_id() -> None:
    forward: Any = vocabulary.with_width(cast(Any, Draft(4)), of(6), of(4))
    read, nothing = chains([0, 1], [2, 5]), [-torch.inf] * 2
    logits = forward.next_logits(read)
    assert logits.tolist() == [[[4, 5, 6, 7, *nothing], [12, 13, 14, 15, *nothing]]]
    chain = forward.chain_logits(read)
    assert chain.shape == (1, 2, 2, 6)
    assert chain[0, 1, 1, :4].tolist() == [12, 13, 14, 15]
    assert forward.attn_backend == "its own"


def test_what_the_target_lacks_is_cut_off() -> None:
    forward: Any = vocabulary.with_width(cast(Any, Draft(6)), of(4), of(6))
    logits = forward.next_logits(chains([1], [3]))
    assert logits.tolist() == [[[6, 7, 8, 9], [18, 19, 20, 21]]]
    assert logits.is_contiguous()
