"""Hold what a batch of requests asks of a round, as its steps read it.

Temperature, top-k, top-p and min-p apply to p and q alike.
"""

from enum import Enum
from typing import Annotated, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

_Int = Annotated[Tensor, torch.int64]
_Bool = Annotated[Tensor, torch.bool]
_Single = Annotated[Tensor, torch.float32]
_Double = Annotated[Tensor, torch.float64]


class Need(str, Enum):
    """Name what some request of a batch needs of a round beside sizes, in words."""

    WEIGHS = "mode smc"
    VERIFIES = "a mode that verifies"
    TREES = "trees at temperature 0"
    EXTENDS = "verified proposals"
    FILTERS = "top-k, top-p or min-p"  # and is not greedy
    GREEDY = "temperature 0"
    EDITS = "penalties, biases or min_new_tokens"
    POWER = "a power of p"
    OPEN_TOKEN = "particles that differ in the first token"
    RULES = "structured output, stop texts or a custom logit processor"  # read on the host
    POTENTIALS = "potentials"  # on the host
    MATCHES = "n-gram matches"


#: What a round without drafts, of single particles, meets or ignores.
OF_PLAIN = frozenset(
    {
        Need.WEIGHS,
        Need.VERIFIES,
        Need.TREES,
        Need.EXTENDS,
        Need.FILTERS,
        Need.GREEDY,
        Need.MATCHES,
    }
)


class BatchSettings(NamedTuple):
    """Settings of the G requests in a batch, each ``[G]`` but the last."""

    seeds: _Int
    temperature: _Single
    top_k: _Int
    top_p: _Single
    min_p: _Single
    last_position: _Int  # of the output
    min_new_tokens: _Int
    greedy: _Bool
    may_stop: _Bool  # stop tokens end the sequence, besides the length
    num_particles: _Int
    num_steps: _Int
    # Rounds weigh and resample, else they verify; those that extend weigh verified chains.
    weighs: _Bool
    extends: _Bool
    ess_threshold: _Double
    scheme: _Int  # index of the resampling method
    resample_each_token: _Bool
    heaviest: _Bool
    lag: _Int
    power: _Double
    measured: _Bool  # fidelity is, where p is normalised and not greedy
    evidence_threshold: _Double  # infinite in mode exact
    draft_temperature: _Single
    # Of a single chain; and of many chains of one multi-draft, at least.
    own_temperature: _Single
    least_temperature: _Single
    rows: Tensor  # int64, in the tables
    stop_table: Tensor  # [R, V] bool: stop tokens of all requests

    @classmethod
    def alike(cls, seeds: Tensor, **values: float) -> "BatchSettings":
        """Return the same settings for all ``seeds`` ``[G]``, without stop tokens.

        Raises TypeError if a setting has no value.
        """
        columns = {
            name: torch.full_like(seeds, value, dtype=DTYPES[name])
            for name, value in values.items()
        }
        none = torch.zeros_like(seeds)
        return cls(seeds=seeds, **columns, rows=none, stop_table=none.bool())

    @property
    def stop_mask(self) -> Tensor:
        """Return the stop tokens, ``[G, V]`` bool; to test a few tokens, index `stop_table`."""
        return self.stop_table[self.rows]

    def bounded(
        self, num_particles: Tensor, num_steps: Tensor, is_exact: Tensor
    ) -> "BatchSettings":
        """Return the settings with N and K of `options.request.apply_budget`, each ``[G]`` int64.

        Args:
            is_exact: nonzero where a single particle is left, which is verified.
        """
        alone = is_exact > 0
        least = self.least_temperature
        return self._replace(
            draft_temperature=self.own_temperature.maximum(least - least / num_particles),
            num_particles=num_particles,
            num_steps=num_steps,
            weighs=self.weighs & ~alone,
            extends=self.extends & ~alone,
            evidence_threshold=self.evidence_threshold.masked_fill(
                alone & ~(self.greedy & (num_particles > 1)), torch.inf
            ),
        )

    def without_steps(self, where: Tensor) -> "BatchSettings":
        """Return the settings with K = 0 and no resampling in the groups ``where`` ``[G]`` bool.

        They have drafted nothing, since they only wait for values of potentials.
        """
        return self._replace(
            num_steps=self.num_steps.masked_fill(where, 0),
            ess_threshold=self.ess_threshold.masked_fill(where, 0.0),
        )

    @property
    def branches(self) -> Tensor:
        """Return the groups whose chains are a tree, where they draft any, ``[G]`` bool."""
        return self.greedy & (self.num_particles > 1)

    @property
    def filters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return top-k, top-p and min-p, ``[G]`` each."""
        return self.top_k, self.top_p, self.min_p

    def drafts(self, column: Tensor, ended: Tensor) -> Tensor:
        """Return which columns each particle drafts, ``[G, N, K]`` bool.

        Args:
            column: ``[K]`` int64, from 0 on.
            ended: ``[G, N]`` bool: particles that draft none.
        """
        num_columns = torch.where(ended, 0, self.num_steps.unsqueeze(1))  # [G, N]
        return column < num_columns.unsqueeze(2)

    def ends(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return whether the sequence ends with each token, ``[G, N, C]`` bool.

        Args:
            tokens: ``[G, N, C]``.
            positions: ``[G, N, C]`` each token's index in the output.
        """
        stops = self.stop_table[self.rows.view(-1, 1, 1), tokens] & self.may_stop.view(-1, 1, 1)
        return stops | (positions >= self.last_position.view(-1, 1, 1))


DTYPES: dict[str, torch.dtype] = {
    name: hint[1]
    for name, one in get_type_hints(BatchSettings, include_extras=True).items()
    if (hint := get_args(one))
}
"""The type of each setting that is ``[G]``, but of rows."""
