"""Compare the tokens that tensor-parallel ranks emit, which must be equal.

Each rank computes the tokens of a round by itself, from logits and random numbers that are bitwise
equal. Where one rank differs, its batches differ soon after, and the ranks deadlock. So they
compare digests of their tokens every `INTERVAL` rounds.
"""

import zlib
from typing import Any

import torch
from sglang.srt.distributed import parallel_state

INTERVAL = 32
"""Rounds between two comparisons: one message of 256 bytes in 32 rounds, while SGLang sends several
over the same group in each round."""

_PARTED = (
    "The tensor-parallel ranks of this server have parted: in round {num_rounds} since its start "
    "they emitted different tokens. What they would answer from there on is wrong, and they would "
    "wait for one another for ever, so the server ends. Please report this, with the command line "
    "and the log. One of these may avoid it, and tells what the cause is: "
    "--speculative-smc-round-graph off, --speculative-smc-kernels torch, "
    "--disable-overlap-schedule, --disable-custom-all-reduce, --tp-size 1."
)


class RankCheck:
    """Digests of one rank's rounds since the last comparison."""

    def __init__(self) -> None:
        self._num_compared = 0  # rounds
        self._digests: list[int] = []

    def add(self, tokens: list[list[int]]) -> None:
        """Record the tokens that a round has emitted, and compare every `INTERVAL` rounds.

        With a single rank nothing is done.

        Raises RuntimeError on all ranks, if the digests of some round differ.
        """
        group = tp_group()
        if group is None:
            return
        self._digests.append(zlib.crc32(repr(tokens).encode()))
        if len(self._digests) < INTERVAL:
            return
        own = torch.tensor(self._digests)  # [INTERVAL]
        each = [torch.empty_like(own) for _ in range(group.world_size)]
        torch.distributed.all_gather(each, own, group=group.cpu_group)
        differs = (torch.stack(each) != each[0]).any(0)  # [INTERVAL]
        if differs.any():
            first = int(differs.int().argmax())
            raise RuntimeError(_PARTED.format(num_rounds=self._num_compared + first + 1))
        self._num_compared += len(self._digests)
        self._digests.clear()


def tp_group() -> Any:
    """Return SGLang's tensor-parallel group; None with a single rank."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_tp_group()
    return group if group.world_size > 1 else None
