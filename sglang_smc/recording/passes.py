"""A model's passes over particles, replayed where they have been recorded.

Rounds that the host looks into cannot be recorded as a whole. Their models can, and are what has
most launches.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from sglang_smc.models.attention import KVLocations
from sglang_smc.recording.recorder import Record, Replay, hold

if TYPE_CHECKING:
    from sglang_smc.models.attention import ParticleAttention


class Forward(Protocol):
    """A model over particles: `models.forward.ParticleForward`."""

    @property
    def attn_backend(self) -> "ParticleAttention": ...

    def next_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor: ...

    def chain_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor: ...


class _Inputs(NamedTuple):
    """What a recorded pass reads, all int64."""

    tokens: torch.Tensor  # [G, N, C]
    starts: torch.Tensor  # [G, N]
    slots: torch.Tensor  # [G, N, C]
    rows: torch.Tensor  # [G]
    committed: torch.Tensor  # [G]
    particle_rows: torch.Tensor  # [G, N]

    @classmethod
    def of_padding(cls, shape: tuple[int, int, int], device: torch.device | str) -> "_Inputs":
        """Particles on SGLang's padding row, which read and write its slot 0."""
        chains = torch.zeros(shape, dtype=torch.int64, device=device)  # [G, N, C]
        particles, groups = chains[:, :, 0].clone(), chains[:, 0, 0].clone()
        return cls(chains, particles + 1, chains.clone(), groups, groups + 1, particles)


class _Recorded(NamedTuple):
    inputs: _Inputs
    padding: _Inputs
    logits: torch.Tensor  # [G, N, V] or [G, N, C, V]
    replay: Replay


class RecordedPasses:
    """A model over particles, with the interface of one.

    Args:
        forward: the model; what no recording holds it runs itself.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._recorded: dict[str, dict[int, _Recorded]] = {}

    @property
    def attn_backend(self) -> "ParticleAttention":
        """The model's, over particles."""
        return self._forward.attn_backend

    def record(
        self,
        record: Record,
        name: str,
        shape: tuple[int, int],
        sizes: Sequence[int],
        max_tail: int,
        device: str,
    ) -> None:
        """Record one kind of pass.

        Args:
            record: how to.
            name: the method, `next_logits` or `chain_logits`.
            shape: particles of a request and tokens of a chain, (N, C).
            sizes: of how many requests.
            max_tail: of `KVLocations`.
        """
        kind = self._recorded[_kind(name, shape[1])] = {}
        for size in sorted(sizes, reverse=True):
            inputs, padding = (_Inputs.of_padding((size, *shape), device) for _ in range(2))
            locations = KVLocations(inputs.rows, inputs.committed, inputs.particle_rows, max_tail)

            def run(inputs: _Inputs = inputs, locations: KVLocations = locations) -> torch.Tensor:
                return getattr(self._forward, name)(*inputs[:3], locations)

            run()  # takes less than the launched rounds that these passes are for
            kind[size] = _Recorded(inputs, padding, *record(run))

    def next_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        """See `models.forward.ParticleForward.next_logits`; safe from later passes."""
        return self._run("next_logits", tokens, starts, slots, locations)

    def chain_logits(
        self,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        """See `models.forward.ParticleForward.chain_logits`; good until the next such pass."""
        return self._run("chain_logits", tokens, starts, slots, locations)

    def _run(
        self,
        name: str,
        tokens: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        locations: KVLocations,
    ) -> torch.Tensor:
        found = self._find(_kind(name, tokens.shape[2]), tokens.shape)
        if found is None:
            return getattr(self._forward, name)(tokens, starts, slots, locations)
        given = _Inputs(tokens, starts, slots, *locations[:3])
        hold(found.inputs, found.padding, given)
        found.replay()
        size, num_particles, num_columns = tokens.shape
        logits = found.logits[:size, :num_particles]
        return logits.clone() if name == "next_logits" else logits[:, :, :num_columns]

    def _find(self, kind: str, shape: torch.Size) -> _Recorded | None:
        """The smallest recording that holds chains ``[G, N, C]``."""
        sizes = self._recorded.get(kind, {})
        for size in sorted(sizes):
            room = sizes[size].inputs.tokens.shape
            if all(mine <= its for mine, its in zip(shape, room, strict=True)):
                return sizes[size]
        return None


class PassRecording(NamedTuple):
    """How a server records the passes of its models."""

    record: Record
    num_particles: int  # of a request
    sizes: Sequence[int]  # of batches, in requests
    max_tail: int  # of `KVLocations`
    device: str

    def of(self, forward: Forward, name: str, columns: Sequence[int]) -> RecordedPasses:
        """A model with its passes ``name`` recorded, over so many tokens of a particle each."""
        passes = RecordedPasses(forward)
        for num_columns in columns:
            shape = self.num_particles, num_columns
            passes.record(self.record, name, shape, self.sizes, self.max_tail, self.device)
        return passes


def _kind(name: str, num_columns: int) -> str:
    """What follows a chain's last token stands in another place of a longer one."""
    return f"{name} {num_columns}" if name == "next_logits" else name
