"""The form of every rule by which the host looks at a request's text.

Custom processors, structured output and stop texts are such rules, each in a file of its own.
`rules` lists them and joins them; nothing else in this package names one. What numbers alone
decide of a text, penalties, biases and filters, the device does (`state.edits`, `state.settings`).
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class BatchTexts(NamedTuple):
    """The texts that a round starts from, or a prefill."""

    reqs: "list[Req]"
    population: Population | None  # their particles; None: what the requests have emitted
    vocab_size: int  # V, of the logits
    device: torch.device | str  # of the logits


class Verdict(NamedTuple):
    """What a rule says of the texts of one request that a round starts from, by particle."""

    log_values: list[float | None]  # log phi; None: as it was
    complete: list[bool]  # all that is to be said of a text that has ended
    answers: list[int] | None = None  # numbers of the answers that these give, -1 for none

    @classmethod
    def none(cls, num_particles: int) -> "Verdict":
        """Nothing yet."""
        return cls([None] * num_particles, [False] * num_particles)


class TextRule(ABC):
    """One rule over the texts of a batch, made for one round or for one prefill.

    Each particle has a text of its own, so every row of logits is treated by the text that it
    follows. A rule overrides what it does; the methods here do nothing. What a rule has to
    remember of a request from round to round it keeps in `RequestState.kept`, under its class.

    Shapes: G requests, N particles (1 in a prefill), C rows of logits each, J drafted tokens.
    """

    needs_host: ClassVar[bool] = False
    """Whether it reads texts on the host, so that its rounds wait for the round before."""

    judges: ClassVar[bool] = False
    """Whether it has `verdicts`, which particles that have ended wait for."""

    @classmethod
    @abstractmethod
    def applies(cls, req: "Req") -> bool:
        """Whether a request has this rule."""

    @classmethod
    def begin(cls, req: "Req") -> None:
        """Note what rounds will need of a request that has this rule, as it is prefilled."""

    @classmethod
    @abstractmethod
    def of(cls, texts: BatchTexts) -> "TextRule":
        """The rule for one round or prefill; at least one of its requests has it."""

    def edit(self, logits: torch.Tensor, chains: torch.Tensor, first: int) -> torch.Tensor:
        """Change logits of either model, before temperature and filters.

        Args:
            logits: ``[G, N, C, V]``. Row c of a particle follows its text at the start of the round
                and ``chains[:, :, : first + c]``.
            chains: ``[G, N, J]`` what the particles have drafted in this round, J >= first + C - 1.
            first: drafted tokens that row 0 follows.

        Returns:
            ``[G, N, C, V]``; the argument may have been changed in place.
        """
        return logits

    def allowed(self, chains: torch.Tensor, first: int) -> torch.Tensor | None:
        """What may follow the first ``first``, ..., J tokens of ``chains`` ``[G, N, J]``.

        Returns:
            ``[G, N, J - first + 1, V]`` bool; None: anything.
        """
        return None

    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population | None
    ) -> torch.Tensor:
        """Add to ``ends`` ``[G, N, C]`` where candidate ``tokens`` ``[G, N, C]`` end a text.

        The tokens stand behind the texts of ``population``, or behind the emitted ones for None.
        """
        return ends

    def verdicts(self) -> "dict[int, Verdict]":
        """What is said of the texts that a round starts from, by group; it may have to be waited
        for. A group that a rule which judges applies to, and is not in here, waits for a round in
        which it is."""
        return {}

    def note_first(self, tokens: torch.Tensor, log_sums: torch.Tensor) -> None:
        """Note the tokens ``[G]`` that prefill drew, from rows whose masks left logs ``[G]``."""

    @classmethod
    def judge_first(cls, req: "Req") -> None:
        """End a request at the token that prefill drew, where it was noted so."""

    @classmethod
    def judge(cls, req: "Req") -> None:
        """End a request in whose settled text the rule finds an end, after SGLang has looked."""

    @classmethod
    def leave(cls, req: "Req") -> None:
        """Have SGLang, too, look for nothing in a request that generates nothing."""

    @classmethod
    def reread(cls, req: "Req", num_dropped: int, tokens: list[int]) -> None:
        """Take back the last ``num_dropped`` output tokens that were read, and read ``tokens``."""

    @classmethod
    def forget(cls, req: "Req") -> None:
        """Read no more of a request, which is about to end."""

    @classmethod
    def end_stuck(cls, req: "Req") -> bool:
        """End a request none of whose particles has any weight, if this rule can be the cause."""
        return False
