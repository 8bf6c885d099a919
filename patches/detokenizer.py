"""Send each character of a stream once, from the process that turns tokens into text."""

from collections.abc import Callable

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import BatchTokenIDOutput
from sglang.srt.runtime_context import get_server_args

from sglang_smc import upstream
from sglang_smc.options.server import is_smc
from sglang_smc.server.hooks import Hooks

PATCHES = Hooks()


@PATCHES.on(
    "sglang.srt.managers.detokenizer_manager.DetokenizerManager._decode_batch_token_id_output",
    "srt/managers/detokenizer_manager.py:412 (sets sent_offset to what is printable now)",
    "sglang/utils.py:345 (find_printable_text, whose answer shrinks as bytes of a character come)",
    why="What is printable shrinks while the bytes of a character come, `sent_offset` with it, and "
    "text is sent again. Streams of one token a chunk do not meet it.",
    retire_when="SGLang's sent_offset never decreases.",
    family=upstream.NEWER,  # this process of 0.5.17 loads no plugins
)
def decode_batch(
    original: Callable, manager: DetokenizerManager, recv_obj: BatchTokenIDOutput
) -> list[str]:
    """Keep the offset up to which a request's text is sent from decreasing."""
    if manager.decode_status and is_smc(get_server_args()):  # else nothing has been sent
        return keep_sent(original, manager, recv_obj)
    return original(manager, recv_obj)


def keep_sent(
    original: Callable, manager: DetokenizerManager, recv_obj: BatchTokenIDOutput
) -> list[str]:
    """Decode a batch's new tokens, and return the texts that its requests have not sent yet."""
    status = manager.decode_status
    sent = {rid: status[rid].sent_offset for rid in recv_obj.rids or () if rid in status}
    texts = original(manager, recv_obj)
    for rid in sent.keys() & status.keys():  # others have finished
        status[rid].sent_offset = max(status[rid].sent_offset, sent[rid])
    return texts
