"""Reserve every running request's arena before each round, and predict its size.

SGLang's own speculative decoding reserves a window after the text. SMC owns an arena there, for
the tails of N particles, of a size that follows from what the request may still emit; a streaming
session does not keep it for the next turn.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_token_slots
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.session.streaming_session import StreamingSession

from sglang_smc.kv.rows import spans as entries
from sglang_smc.kv.transfer import to_device
from sglang_smc.options.request import OFF, Budget
from sglang_smc.process import active, active_config
from sglang_smc.server.hooks import Hooks
from sglang_smc.state.request import arena_end, find_state, num_new, state_of
from sglang_smc.state.texts import num_unread, shared_ids
from sglang_smc.upstream import NEWEST, allocated, holds_kv, kv_of, owner_of_slots

PATCHES = Hooks()


@PATCHES.on(
    "sglang.srt.speculative.spec_utils.spec_prepare_for_decode",
    "srt/speculative/spec_utils.py:1026 (the dispatcher)",
    "srt/managers/schedule_batch.py:2962 (imports it at each call)",
    "srt/mem_cache/allocation.py (alloc_token_slots evicts from the radix cache as needed)",
    "srt/managers/schedule_batch.py:2732 (what is free, and what can be evicted)",
    why="The dispatcher calls either EAGLE's preparation or, for DFLASH alone, the draft "
    "input's own; a registered algorithm has no say.",
    retire_when="CustomSpecAlgo has a prepare_for_decode of its own.",
)
def prepare_for_decode(original: Callable, batch: ScheduleBatch) -> None:
    """Reserve each running request's arena instead of a window of 2 (K + 1) tokens.

    Where the server adapts, choose N and K of the round after that.
    """
    config = active_config()
    if config is None:
        original(batch)
        return
    budget = active.budget
    spans = _spans(batch, budget)
    _allocate(batch, spans)
    for req, (_, end) in zip(batch.reqs, spans, strict=True):
        state_of(req).step_to(budget)
        state_of(req).arena = kv_of(req).kv_committed_len, end
        req.kv.kv_allocated_len = end
        req.decode_batch_idx += 1
    _adapt(batch)


def _spans(batch: ScheduleBatch, budget: Budget | None) -> list[tuple[int, int]]:
    """Return where each row's slots end before and in the round, whose passes are set here.

    Several passes take more slots than are predicted: where these are short, there is one.
    """
    policy = active.policy
    most = 1 if policy is None or budget != OFF else policy.num_passes
    states = list(map(state_of, batch.reqs))
    for state in states:
        state.num_passes = most if state.decodes_plainly else 1
    before = list(map(allocated, batch.reqs))
    ends = [_allocated_after(req, budget) for req in batch.reqs]
    if most > 1 and sum(ends) - sum(before) > _num_free(batch):
        for state in states:
            state.num_passes = 1
        ends = [_allocated_after(req, budget) for req in batch.reqs]
    return list(zip(before, ends, strict=True))


def _adapt(batch: ScheduleBatch) -> None:
    """Choose N and K of the next round.

    It is called here alone: until the next round's reservation, predictions must not change.
    """
    policy = active.policy
    bounded = [req for req in batch.reqs if not state_of(req).config.keeps_sizes]
    if policy is None or not bounded:
        return
    configs = [state_of(req).config for req in bounded]
    widest = Budget(max(c.num_particles for c in configs), max(c.num_steps for c in configs))
    if widest == OFF:  # none of them drafts
        return
    num_tokens = sum(kv_of(req).kv_committed_len for req in bounded)
    policy.choose(
        len(configs),
        widest,
        lambda budget: _num_new(batch.reqs, budget) <= _num_free(batch),
        num_tokens / len(configs),
        sum(map(num_unread, bounded)),
        min(state_of(req).num_passes for req in bounded),
    )


def _num_free(batch: ScheduleBatch) -> int:
    """Return the KV slots that are available without retracting a running request."""
    return batch.token_to_kv_pool_allocator.available_size() + batch.tree_cache.evictable_size()


def _num_new(reqs: list[Req], budget: Budget | None) -> int:
    """Return the KV slots that a round on ``budget`` takes beside those that are owned."""
    return sum(num_new(state_of(req).span(budget), req) for req in reqs)


def _allocate(batch: ScheduleBatch, spans: list[tuple[int, int]]) -> None:
    """Fill each request's row with new slots from ``start`` to ``end`` of its span."""
    rows = [kv_of(req).req_pool_idx for req in batch.reqs]
    each = zip(rows, spans, strict=True)
    known = [(row, start, end) for row, (start, end) in each if end > start]
    if not known:
        return
    host = torch.tensor(known, device="cpu").T  # [3, rows to fill]
    takes_one = all(end == start + 1 for _, start, end in known)  # as in most rounds
    places = host[:2] if takes_one else torch.stack(entries(*host))  # [2, total]
    total = places.shape[1]
    pool = batch.req_to_token_pool
    tree = batch.tree_cache
    page = batch.token_to_kv_pool_allocator.page_size
    if page == 1:
        slots = alloc_token_slots(tree, total)
    else:  # first the rest of a prompt's last page, whose slots are in order
        which, starts, ends = to_device(batch.device, host)
        last = pool.req_to_token[which, starts - 1]  # of a page's rest; its end is any slot there
        last = torch.where(starts % page == 0, starts - 1, last)
        slots = alloc_paged_token_slots_extend(tree, starts, host[1], ends, host[2], last, total)
    pool.write(to_device(batch.device, places).unbind(), slots.int())


@PATCHES.on(
    "sglang.srt.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
    "srt/managers/schedule_batch.py:2716",
    why="The prediction is written against EAGLE's allocation, which the hook above replaces.",
    retire_when="The algorithm that prepares a decode step also predicts its memory.",
)
def tokens_required(
    original: Callable, batch: ScheduleBatch, requests: list[Req], page_size: int
) -> Any:
    """Predict the arena that the next round needs, so that retraction starts in time."""
    config = active_config()
    if config is None:
        return original(batch, requests, page_size)
    return _num_new(requests, active.budget)


def _allocated_after(req: Req, budget: Budget | None) -> int:
    # Never less than now: an arena shrinks by commits, not by freeing slots.
    state = state_of(req)
    return max(allocated(req), arena_end(state.span(budget), req, state.num_passes))


@PATCHES.on(
    "sglang.srt.mem_cache.common.release_kv_cache",
    "srt/mem_cache/common.py (frees the row by pages, caches it, or leaves it to a session)",
    "srt/mem_cache/base_prefix_cache.py:497 (one slot names a page)",
    why="A row is freed and cached page by page, and rounds leave its slots in any order. "
    "`prepare_for_kv_cache_release` is not called on retraction.",
    retire_when="A worker is asked before any row is released.",
    family=NEWEST,
)
def release_kv_cache(
    original: Callable, req: Req, tree_cache: BasePrefixCache, *, checkpoint: bool
) -> None:
    """Put a request's KV into the order of pages before its row is given back, or its slots."""
    if active.worker is not None and holds_kv(req):
        active.worker.order_pages(req, keeps=checkpoint or req.session is not None)
    original(req, tree_cache, checkpoint=checkpoint)


@PATCHES.on(
    "sglang.srt.session.streaming_session.StreamingSession._trim_overshoot",
    "srt/session/streaming_session.py:347 (min(target, kv_allocated_len))",
    "srt/session/streaming_session.py:557 (the free that keeps pages whole)",
    why="A session keeps the row up to the last output token wherever a slot is allocated, "
    "taking it for that token's. In SMC it is a slot of the arena: the next turn would read "
    "another token's KV. `prepare_for_kv_cache_release` is not called on retraction.",
    retire_when="A session keeps no more than the request has committed.",
)
def trim_overshoot(
    original: Callable, sessions: StreamingSession, req: Req, finished_len: int
) -> None:
    """Free a finished or retracted turn's arena before its session takes over the row.

    The session keeps only slots with the text's KV.
    """
    if active_config() is not None:
        assert holds_kv(req), "the turn still owns its row"
        end = _end_of_read_text(req)
        kv = kv_of(req)
        sessions._free_kv_aligned(owner_of_slots(req), end, allocated(req))
        # The next prefill reads a token: without an open one, the last of what the tree owns.
        end = min(end, _last_place(req))
        if end < kv.cache_protected_len:  # the next turn writes no page of the tree's
            end -= end % sessions.cache.page_size
        req.kv.kv_allocated_len = kv.kv_committed_len = end
        kv.cache_protected_len = min(kv.cache_protected_len, end)
    original(sessions, req, finished_len)


def _end_of_read_text(req: Req) -> int:
    """Return the end of what both models have processed; the draft is one token behind or more."""
    prompt = len(req.origin_input_ids)
    written = len(req.output_ids)
    read = min(kv_of(req).kv_committed_len, prompt + max(0, written - 2), _last_place(req))
    if (state := find_state(req)) is not None and state.num_read is not None:
        read = min(read, state.num_read)
    return max(read, kv_of(req).cache_protected_len)  # prefilled, and owned by the radix cache


def _last_place(req: Req) -> int:
    """Return the position of the last token that a request keeps where it is retracted."""
    return len(req.origin_input_ids) + len(shared_ids(req)) - 1
