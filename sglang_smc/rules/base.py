"""Define the two kinds of rule that read a request's text on the host.

A `LogitsRule` changes logits, masks tokens or ends sequences: custom processors, structured output
and stop strings. A `Scorer` gives values of the sequences from which a round starts: potentials.
`rules.registry` lists and combines them. Penalties, biases and filters depend on numbers alone and
run on the device (`state.edits`, `state.settings`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from sglang.srt.managers.schedule_batch import Req
from transformers import PreTrainedTokenizerBase

from sglang_smc.smc.population import Population


class BatchTexts(NamedTuple):
    """The sequences from which a round, or a prefill, starts."""

    reqs: list[Req]
    population: Population | None  # their particles; None: the requests' emitted output
    vocab_size: int  # V, of the logits
    device: torch.device | str  # of the logits


class Rule(ABC):
    """One rule over the sequences of a batch, made for one round or one prefill.

    State of a request that a rule keeps from round to round is in `RequestState.kept`, under the
    rule's class.

    Args:
        texts: of the batch; at least one of its requests has the rule.
    """

    @abstractmethod
    def __init__(self, texts: BatchTexts) -> None: ...

    @classmethod
    @abstractmethod
    def applies(cls, req: Req) -> bool:
        """Return whether a request has this rule."""

    @classmethod
    def begin(cls, req: Req) -> None:
        """Store in the request's state, at prefill, what rounds will need."""


class LogitsRule(Rule):
    """A rule about the next token; it overrides the methods that it needs.

    Each particle has its own sequence, so each row of logits is edited by the sequence that it
    follows. Shapes: G requests, N particles (1 in a prefill), C rows of logits, J draft tokens.
    """

    def edit(self, logits: torch.Tensor, chains: torch.Tensor, first: int) -> torch.Tensor:
        """Edit logits of either model, before temperature and filters.

        Args:
            logits: ``[G, N, C, V]``. Row c of a particle follows its text at the start of the round
                and ``chains[:, :, : first + c]``.
            chains: ``[G, N, J]`` draft tokens of this round, J >= first + C - 1.
            first: number of draft tokens before row 0.

        Returns:
            ``[G, N, C, V]``; the argument may have been changed in place.
        """
        return logits

    def allowed(self, chains: torch.Tensor, first: int) -> torch.Tensor | None:
        """Return the tokens allowed after the first ``first``, ..., J tokens of ``chains``.

        The mask is ``[G, N, J - first + 1, V]`` bool, or None for anything.
        """
        return None

    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population | None
    ) -> torch.Tensor:
        """Add to ``ends`` ``[G, N, C]`` where candidates ``tokens`` ``[G, N, C]`` end a sequence.

        The candidates follow the sequences of ``population``, or the emitted output for None.
        """
        return ends

    def note_first(self, tokens: torch.Tensor, log_sums: torch.Tensor) -> None:
        """Note the tokens ``[G]`` sampled at prefill, and masked rows' log sums ``[G]``."""


class GroupScores(NamedTuple):
    """A scorer's values for one request's particles, by particle, at the start of a round."""

    log_values: list[float | None]  # log phi; None: unchanged
    complete: list[bool]  # whether the value of an ended sequence is final

    @classmethod
    def none(cls, num_particles: int) -> "GroupScores":
        return cls([None] * num_particles, [False] * num_particles)


class Scorer(Rule):
    """A rule about whole sequences; it submits its queries as it is made, before drafts."""

    @abstractmethod
    def result(self) -> dict[int, GroupScores]:
        """Return the values of the sequences that a round starts from, by group.

        This may wait. A group without a result, whose particles have ended, waits for a later
        round.
        """


def decoder_of(req: Req, *, skip_special_tokens: bool = False) -> Callable[[Sequence[int]], str]:
    # SGLang declares it as None, and refuses rules about text where it has no tokenizer.
    tokenizer = cast("PreTrainedTokenizerBase", req.tokenizer)

    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str), "it is a list for a list of texts alone"
        return text

    return decode
