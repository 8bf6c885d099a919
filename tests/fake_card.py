"""Memory of a GPU that is not there, as recording rounds takes it, with torch.cuda mocked.

Rounds and passes are played by name alone: each takes the bytes that the arithmetic says, in the
graphs' pool while a graph is captured, and beside it otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang_smc.memory.rounds import LOGIT_BYTES, PRODUCT_BYTES, round_bytes
from sglang_smc.round.batch import RoundInputs, RoundShape


class Card:
    """Counts bytes and rounds.

    Args:
        free: bytes, before anything is recorded.
        vocab_size: V.
        short_of: bytes that are taken by another process, which nobody was told of.
    """

    def __init__(self, free: float, vocab_size: int, short_of: float = 0) -> None:
        self.total, self.vocab_size, self.short_of = int(free), vocab_size, short_of
        self.pool = self.peak = self.num_played = self.num_captured = 0
        self.streams: set[Any] = set()
        self.attn_backend: Any = None
        self._captures, self._kept = False, 0  # bytes of the pool that passes keep

    def bytes_of(self, shape: RoundShape) -> int:
        """Of a request's round of such a shape."""
        sizes = shape.num_particles, shape.num_steps, self.vocab_size
        return round_bytes(*sizes, verifies=shape.verifies, mixes=shape.logprobs.own)

    def play(self, inputs: RoundInputs, shape: RoundShape, *_: Any) -> SimpleNamespace:
        """Play a round."""
        self.num_played += 1
        self.take(len(inputs.rows) * self.bytes_of(shape))
        return SimpleNamespace(size=len(inputs.rows), shape=shape)

    def chain_logits(self, tokens: torch.Tensor, *_: Any) -> torch.Tensor:
        """Run a model: its logits, and the product that they are made of."""
        size = tokens.numel() * self.vocab_size
        self.take(self._kept * self._captures + size * (LOGIT_BYTES + PRODUCT_BYTES))
        self._kept += self._captures * size * LOGIT_BYTES
        return tokens

    next_logits = chain_logits

    def take(self, size: int) -> None:
        """Take bytes, and give them back."""
        if self._captures:
            self.pool = max(self.pool, size)
        in_use = self.pool + (0 if self._captures else size)
        if in_use > self.total - self.short_of:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.peak = max(self.peak, in_use)

    def begin(self) -> str:
        """Stand in for `torch.cuda.graph_pool_handle`: what was recorded before is let go."""
        self.pool = self._kept = self.num_captured = 0
        return "pool"

    @contextmanager
    def capture(self, graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        """Stand in for `torch.cuda.graph`."""
        assert pool == "pool"
        self.streams.add(stream)
        self.num_captured, self._captures = self.num_captured + 1, True
        try:
            yield
        finally:
            self._captures = False

    @contextmanager
    def in_place(self) -> Iterator["Card"]:
        """Let torch and SGLang's session find this card."""
        context = "sglang.srt.runtime_context.get_server_args"
        capture = "sglang.srt.distributed.parallel_state.graph_capture"
        graphs = mock.patch.multiple(
            torch.cuda,
            graph_pool_handle=self.begin,
            synchronize=lambda *_: None,
            empty_cache=lambda: None,
            CUDAGraph=mock.MagicMock,
            graph=self.capture,
            mem_get_info=lambda *_: (self.total - self.pool, self.total),
        )
        with (
            mock.patch(context, lambda: SimpleNamespace(enable_cudagraph_gc=False)),
            mock.patch("sglang.srt.model_executor.runner.freeze_gc", nullcontext),
            mock.patch("sglang_smc.upstream.resolved", lambda args: args),
            mock.patch(capture, lambda: nullcontext(SimpleNamespace(stream="stream"))),
            graphs,
        ):
            yield self
