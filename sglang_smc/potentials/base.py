"""What a potential is: a function of texts, in logarithms.

With potentials phi a request samples whole texts from p(x) phi(x) over its sum. Along the way a
particle's weight holds phi of a beginning of its text, and of the whole text once that has ended:
between two looks it gains log phi_t - log phi_{t-1}. So `complete` alone decides the law, and
`prefix` how early particles that lead nowhere are dropped; any values there are proper, but that a
beginning that is forbidden must have no text that is not (Naesseth, Lindsten and Schoen, Elements
of Sequential Monte Carlo, 2019, section 3.1).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec


class NoArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a potential that takes none."""


class Text:
    """A particle's text, of which a potential gives a value.

    Token ids are tuples: a potential cannot write into what the scheduler goes on with.

    Args:
        prompt_ids: tokens of the request's prompt.
        output_ids: tokens behind it, of a beginning of the particle's text or of all of it; the
            token that ended it, such as EOS, is there.
        args: what the request gives the potential, of its `Args`.
        decode: tokens to text, special tokens left out.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        args: Any,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)  # of a tuple no copy is made
        self.output_ids = tuple(output_ids)
        self.args = args
        self._decode = decode

    @cached_property
    def prompt(self) -> str:
        """The prompt, decoded."""
        return self._decode(self.prompt_ids)

    @cached_property
    def output(self) -> str:
        """What has been generated, decoded."""
        return self._decode(self.output_ids)

    def beginning(self, length: int) -> "Text":
        """Its first ``length`` tokens of output."""
        return Text(self.prompt_ids, self.output_ids[:length], self.args, self._decode)


class Potential(ABC):
    """A potential phi. One object serves all requests of a server.

    Its constructor is also called where requests are checked: keep it light, and load models in
    `open`. Values are natural logarithms: 0 is phi = 1, ``-inf`` forbids, ``+inf`` and NaN are
    errors. What a method raises, SystemExit too, ends the request that it is about with HTTP 500,
    and no other.
    Methods are called in a thread of their own, one call at a time.
    """

    Args: ClassVar[type[msgspec.Struct]] = NoArgs
    """The schema of ``args`` in a request; what does not fit is HTTP 400."""

    when: ClassVar[str | dict[str, Any]] = "round"
    """When it is asked where a request does not say: ``"round"``, ``"end"``, ``{"tokens": n}`` or
    ``{"delimiter": text or token id}``."""

    prefix_is_complete: ClassVar[bool] = False
    """Whether it claims that `prefix` of a whole text is `complete` of it;
    `sglang_smc.testing.check_potential` holds it to that."""

    def open(self) -> None:
        """Get ready, once, in the process that runs rounds: load models, connect."""

    @abstractmethod
    def complete(self, texts: Sequence[Text]) -> Sequence[float]:
        """log phi of whole texts, one value each."""

    def prefix(self, texts: Sequence[Text]) -> Sequence[float]:
        """log phi of beginnings of texts, one value each; 0 where a potential does not say."""
        return [0.0] * len(texts)
