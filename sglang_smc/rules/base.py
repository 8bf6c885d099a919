"""Define `TextRule`, the interface of every rule that reads a request's text on the host.

Custom processors, structured output and stop strings are such rules, each in a file of its own.
`rules.registry` lists and combines them; nothing else in this package names one. Penalties, biases
and filters depend on numbers alone and run on the device (`state.edits`, `state.settings`).
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class BatchTexts(NamedTuple):
    """The sequences from which a round, or a prefill, starts."""

    reqs: "list[Req]"
    population: Population | None  # their particles; None: the requests' emitted output
    vocab_size: int  # V, of the logits
    device: torch.device | str  # of the logits


class Verdict(NamedTuple):
    """The result of a rule for one request's particles, by particle, at the start of a round."""

    log_values: list[float | None]  # log phi; None: unchanged
    complete: list[bool]  # whether the result for an ended sequence is final
    answers: list[int] | None = None  # for the majority vote, numbers of answers; -1 for none

    @classmethod
    def none(cls, num_particles: int) -> "Verdict":
        """Return an empty result."""
        return cls([None] * num_particles, [False] * num_particles)


class TextRule(ABC):
    """One rule over the sequences of a batch, made for one round or one prefill.

    Each particle has its own sequence, so each row of logits is edited by the sequence that it
    follows. A rule overrides the methods that it needs; the methods here do nothing. State of a
    request that a rule keeps from round to round is in `RequestState.kept`, under the rule's class.

    Shapes: G requests, N particles (1 in a prefill), C rows of logits each, J draft tokens.
    """

    needs_host: ClassVar[bool] = False
    """Whether it reads sequences on the host, so that its rounds wait for the round before."""

    judges: ClassVar[bool] = False
    """Whether it has `verdicts`, for which particles that have ended wait."""

    @classmethod
    @abstractmethod
    def applies(cls, req: "Req") -> bool:
        """Return whether a request has this rule."""

    @classmethod
    def begin(cls, req: "Req") -> None:
        """Store in the request's state, at prefill, what rounds will need."""

    @classmethod
    @abstractmethod
    def of(cls, texts: BatchTexts) -> "TextRule":
        """Return the rule for one round or prefill; at least one of its requests has it."""

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

        Args:
            chains: ``[G, N, J]`` draft tokens of this round.
            first: number of draft tokens before the first row.

        Returns:
            ``[G, N, J - first + 1, V]`` bool; None: anything.
        """
        return None

    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population | None
    ) -> torch.Tensor:
        """Add to ``ends`` ``[G, N, C]`` where candidates ``tokens`` ``[G, N, C]`` end a sequence.

        The candidates follow the sequences of ``population``, or the emitted output for None.
        """
        return ends

    def verdicts(self) -> "dict[int, Verdict]":
        """Return the results for the sequences that a round starts from, by group.

        This may wait. A group with a rule that has `judges`, and without a result, waits for a
        later round.
        """
        return {}

    def note_first(self, tokens: torch.Tensor, log_sums: torch.Tensor) -> None:
        """Note the tokens ``[G]`` sampled at prefill, and masked rows' log sums ``[G]``."""

    @classmethod
    def judge_first(cls, req: "Req") -> None:
        """End a request at the token sampled at prefill, if `note_first` found an end there."""

    @classmethod
    def judge(cls, req: "Req") -> None:
        """End a request if the rule finds an end in its settled output.

        SGLang has checked the output before.
        """

    @classmethod
    def leave(cls, req: "Req") -> None:
        """Disable SGLang's own check in a request that generates nothing."""

    @classmethod
    def reread(cls, req: "Req", num_dropped: int, tokens: list[int]) -> None:
        """Drop the last ``num_dropped`` output tokens from the state, and append ``tokens``."""

    @classmethod
    def forget(cls, req: "Req") -> None:
        """Release the rule's state of a request that is about to end."""

    @classmethod
    def end_stuck(cls, req: "Req") -> bool:
        """End a request without any particle of positive weight, if this rule can be the cause."""
        return False
