"""What a streaming session keeps of a turn for the next one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

from sglang_smc.process import active_config
from sglang_smc.server.hooks import Patch
from sglang_smc.upstream import allocated, holds_kv, kv_of, owner_of_slots

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.session.streaming_session import StreamingSession


def trim_overshoot(
    original: Callable, sessions: "StreamingSession", req: "Req", finished_len: int
) -> None:
    """Give the arena back first, so that the session keeps only slots that hold the text's KV."""
    if active_config() is not None:
        assert holds_kv(req), "the turn still owns its row"
        end = _end_of_read_text(req)
        sessions._free_kv_aligned(owner_of_slots(req), end, allocated(req))
        req.kv.kv_allocated_len = kv_of(req).kv_committed_len = end
    original(sessions, req, finished_len)


def _end_of_read_text(req: "Req") -> int:
    """The end of what both models have read; the draft is one token behind the target."""
    prompt, written = len(req.origin_input_ids), len(req.output_ids)
    read = min(kv_of(req).kv_committed_len, prompt + max(0, written - 2))
    return max(read, kv_of(req).cache_protected_len)  # read in a prefill, and not ours to free


PATCHES = (
    Patch(
        target="sglang.srt.session.streaming_session.StreamingSession._trim_overshoot",
        hook_type=HookType.AROUND,
        function=trim_overshoot,
        what="Frees a finished or retracted turn's arena before the session takes over its row.",
        why="A session keeps the row up to the last output token wherever a slot is allocated, "
        "taking it for that token's. In SMC it is a slot of the arena: the next turn would read "
        "another token's KV. `prepare_for_kv_cache_release` is not called on retraction.",
        relies_on=(
            "srt/session/streaming_session.py:347 (min(target, kv_allocated_len))",
            "srt/session/streaming_session.py:557 (the free that keeps pages whole)",
        ),
        retire_when="A session keeps no more than the request has committed.",
    ),
)
