"""From the tilt that is wanted to the evidence threshold that gives it. No SGLang in here.

The tilt of an answer says how far its law leans from the target to the draft: 0 is the target's
(docs/fidelity.md). In modes that verify it falls with the evidence threshold c about as

    tilt = s / (1 + c),     s the scale: of a pair of models, a temperature, N and K

so s is all that there is to learn. A server watches the tilt of each answer, and fits s to those
that have ended, by least squares, each by the information that it has: g = 1 / (1 + c) of the
tilt is s, so that s is the sum of g times what was observed over the sum of g^2 times its
information. Answers of infinite c, which say nothing of s, have no part in that.
"""

import math

from msgspec.structs import replace

from sglang_smc.options.request import RequestConfig

SCALE = 0.4
"""s until something is known: that of the shipped pair at c = 2 (bench/results/fidelity)."""

PRIOR_INFORMATION = 30.0
"""What that guess is worth. An answer of the shipped pair has about 3, times g^2."""

WINDOW_INFORMATION = 800.0
"""What is remembered at most: s within 0.035, and the pair's last 2,400 answers at c = 2."""

DIALED = ("mixed", "auto")
"""The modes of which this is so, at any c."""


class Dial:
    """Learns the scale and turns a tilt into a threshold.

    All ranks of a server must tell it of the same answers in the same order, so that they agree.
    """

    def __init__(self) -> None:
        self._information = PRIOR_INFORMATION
        self._sum = SCALE * PRIOR_INFORMATION

    @property
    def scale(self) -> float:
        """s as far as it is known; 0 where answers lean away from the draft."""
        return max(self._sum / self._information, 0.0)

    def threshold(self, tilt: float) -> float:
        """The evidence threshold c for a ``tilt`` of at least 0, which gives infinity."""
        if tilt == 0.0:
            return math.inf
        return max(self.scale / tilt - 1.0, 0.0)

    def settled(self, asked: RequestConfig) -> RequestConfig:
        """Settings with the threshold that their tilt comes to now; it stays with the request."""
        if asked.mode != "auto" or asked.tilt is None:
            return asked
        return replace(asked, settled_threshold=self.threshold(asked.tilt))

    def learn(self, threshold: float, numerator: float, information: float) -> None:
        """Note an answer that has ended.

        Args:
            threshold: c that it had.
            numerator: of its tilt: the sum of l - E l, l = log q / p.
            information: the sum of the variances of l; the tilt is the one over the other.
        """
        gain = 1.0 / (1.0 + threshold)  # 0 where c is infinite
        self._sum += gain * numerator
        self._information += gain * gain * information
        kept = min(WINDOW_INFORMATION / self._information, 1.0)
        self._sum, self._information = kept * self._sum, kept * self._information
