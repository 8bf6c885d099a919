"""Define `Potential`: a function of texts, in logarithms.

With potentials phi a request samples whole texts from p(x) phi(x), normalized. A particle's weight
holds phi of a prefix of its text, and of the whole text once that has ended: between two queries it
gains log phi_t - log phi_{t-1}. So `complete` alone decides the distribution, and `prefix` how
early unpromising particles are dropped. Any values of prefixes are proper, but a prefix with phi =
0 must have no continuation with phi > 0 (Naesseth, Lindsten and Schoen, Elements of Sequential
Monte Carlo, 2019, section 3.1).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec


class NoArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a potential without arguments."""


class Text:
    """A particle's text, or a prefix of it, for which a potential returns a value.

    Token ids are tuples, so that a potential cannot modify the scheduler's.

    Args:
        prompt_ids: tokens of the request's prompt.
        output_ids: tokens of the output, or of a prefix of it; the token that ended it, such as
            EOS, is included.
        args: the request's arguments for the potential, of its `Args`.
        decode: tokens to text, special tokens left out.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        args: Any,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)  # does not copy a tuple
        self.output_ids = tuple(output_ids)
        self.args = args
        self._decode = decode

    @cached_property
    def prompt(self) -> str:
        """Return the decoded prompt."""
        return self._decode(self.prompt_ids)

    @cached_property
    def output(self) -> str:
        """Return the decoded output."""
        return self._decode(self.output_ids)

    def beginning(self, length: int) -> "Text":
        """Return the text with the first ``length`` tokens of output."""
        return Text(self.prompt_ids, self.output_ids[:length], self.args, self._decode)


class Potential(ABC):
    """A potential phi. One object serves all requests of a server.

    Its constructor is also called where requests are validated: keep it light, and load models in
    `open`. Values are natural logarithms: 0 is phi = 1, ``-inf`` forbids, ``+inf`` and NaN are
    errors. An exception, SystemExit included, ends the request in question with HTTP 500, and no
    other. Methods are called in a thread of their own, one call at a time.
    """

    Args: ClassVar[type[msgspec.Struct]] = NoArgs
    """The schema of ``args`` in a request; a mismatch is HTTP 400."""

    when: ClassVar[str | dict[str, Any]] = "round"
    """When it is queried unless a request sets it: ``"round"``, ``"end"``, ``{"tokens": n}`` or
    ``{"delimiter": text or token id}``."""

    prefix_is_complete: ClassVar[bool] = False
    """Whether `prefix` of a whole text equals `complete` of it;
    `sglang_smc_tools.testing.check_potential` checks that."""

    def open(self) -> None:
        """Load models and connect, once, in the process that runs rounds."""

    @abstractmethod
    def complete(self, texts: Sequence[Text]) -> Sequence[float]:
        """Return log phi of whole texts, one value each."""

    def prefix(self, texts: Sequence[Text]) -> Sequence[float]:
        """Return log phi of prefixes of texts, one value each; 0 by default."""
        return [0.0] * len(texts)
