"""Break the KV cache of a server's target and drafts, SGLang's own on a CPU or that of SMC.

Rounds alone are broken, and prefills of retracted requests, so that the server scores texts as it
should. Slots are those of a pool with pages of one; a page of 16 is what a fault takes it for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch

#: As tests import it, and as servers load it.
ATTENTION = ("baselines." if __package__ else "") + "cpu_speculation.attention"
Writes = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Maps the slots of a round's tokens, and the tokens of each row, to rows and where they go."""

_width = 0  # tokens of each row of the running round; 0 in a prefill
_retracted: set[str] = set()  # requests that are to be prefilled again
_again = torch.zeros(0, dtype=torch.bool)  # which tokens of a prefill are of such requests


def shared(slots: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give two tokens one slot: one in 997 is written over its neighbour, too."""
    twice = (slots % 997 == 0).nonzero().flatten()
    return torch.cat((torch.arange(len(slots)), twice)), torch.cat((slots, slots[twice] - 1))


def page(slots: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a page's last token behind it."""
    return torch.arange(len(slots)), slots + (slots % 16 == 15)


def stale(slots: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave the KV of a rejected token where the first of a next round belongs, of one in 8."""
    rows = torch.arange(len(slots))
    rows = rows[(rows % width > 0) | (slots % 8 > 0)]
    return rows, slots[rows]


def retracted(slots: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave what others have written to the slots that a retracted request gets anew."""
    rows = (~_again).nonzero().flatten()
    return rows, slots[rows]


def swapped(ids: torch.Tensor, width: int) -> torch.Tensor:
    """Let the target read the first two requests' drafts in each other's rows."""
    rows = ids.view(-1, width).clone()
    rows[:2] = rows[:2].flip(0)
    return rows.flatten()


def position(positions: torch.Tensor) -> torch.Tensor:
    """Count positions from 1 beyond a window of 256."""
    return positions + (positions >= 256)


def sibling(sees: torch.Tensor) -> torch.Tensor:
    """Let each node of a tree see the node before it: ``[rows, width, width]`` bool."""
    nodes = torch.arange(1, sees.shape[1])
    sees = sees.clone()
    sees[:, nodes, nodes - 1] = True
    return sees


def freed(alloc: Callable[..., Any]) -> Callable[..., Any]:
    """Return an allocation of which one in 8 gets a slot that is in use, as if freed early."""
    calls = 0
    last = None

    def allocate(allocator: Any, need_size: int) -> torch.Tensor | None:
        nonlocal calls, last
        slots = alloc(allocator, need_size)
        if slots is None or not len(slots):
            return slots
        calls += 1
        slots = slots.clone()
        if last is not None and calls % 8 == 0:
            slots[0] = last
        last = slots[-1].clone()
        return slots

    return allocate


WRITES: dict[str, Writes] = {each.__name__: each for each in (shared, page, stale, retracted)}
NAMES = (*WRITES, "position", "freed")  # and of trees, `sibling`; of stock chains, `swapped`


def install(name: str) -> None:
    """Break this process's classes of SGLang, and the baselines' attention."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.models.llama import LlamaForCausalLM

    if name == "sibling":
        attention = import_module(ATTENTION)
        tree_of = attention.tree_of
        attention.tree_of = lambda batch: None if (x := tree_of(batch)) is None else sibling(x)
    elif name == "freed":
        TokenToKVPoolAllocator.alloc = freed(TokenToKVPoolAllocator.alloc)
    else:
        if name == "retracted":
            Req.reset_for_retract = _noted(Req.reset_for_retract)
        LlamaForCausalLM.forward = _forward(LlamaForCausalLM.forward, name)
        if name in WRITES:
            written = _written(MHATokenToKVPool.set_kv_buffer, WRITES[name])
            MHATokenToKVPool.set_kv_buffer = written


def _forward(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(forward)
    def broken(model: Any, ids: Any, positions: Any, batch: Any, *more: Any, **named: Any) -> Any:
        global _width, _again
        mode = batch.forward_mode
        if mode.is_target_verify() or mode.is_decode():
            _width = len(ids) // max(1, len(batch.req_pool_indices)) * (name != "retracted")
            positions = position(positions) if name == "position" else positions
            ids = swapped(ids, _width) if name == "swapped" and mode.is_target_verify() else ids
        elif _retracted and batch.rids:
            again = torch.tensor([rid in _retracted for rid in batch.rids])
            _again = again.repeat_interleave(batch.extend_seq_lens)
            _width = int(_again.any())
            _retracted.difference_update(batch.rids)
        try:
            return forward(model, ids, positions, batch, *more, **named)
        finally:
            _width = 0

    return broken


def _noted(reset: Callable[..., None]) -> Callable[..., None]:
    @wraps(reset)
    def broken(request: Any) -> None:
        _retracted.add(request.rid)
        reset(request)

    return broken


def _written(write: Callable[..., Any], fault: Writes) -> Callable[..., Any]:
    @wraps(write)
    def broken(pool: Any, layer: Any, slots: Any, k: Any, v: Any, *more: Any, **named: Any) -> None:
        if _width and isinstance(slots, torch.Tensor):
            rows, slots = fault(slots, _width)
            k = k[rows]
            v = v[rows]
        write(pool, layer, slots, k, v, *more, **named)

    return broken
