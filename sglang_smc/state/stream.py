"""Hand over what a request has put out to SGLang's streamer: its totals and log-probabilities."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req

from sglang_smc.state.metrics import META_PREFIX
from sglang_smc.state.request import find_state
from sglang_smc.state.texts import shared_ids, with_output

DETOKENIZATION = META_PREFIX + "detokenization"
"""Key of what the tokenizer manager takes out of `meta_info`, to decode particles."""


def set_logprob(req: Req, place: int, token: int, logprob: float) -> None:
    """Replace the placeholder by the token that all particles share, with its log-probability.

    The likeliest tokens at that position do not depend on it.
    """
    tokens = req.logprob.output_token_logprobs_idx
    values = req.logprob.output_token_logprobs_val
    assert tokens is not None and values is not None, "there where a request asks for any"
    tokens[place] = token
    values[place] = logprob


def drop_sampled_logprobs(req: Req) -> None:
    """Clear the log-probabilities of sampled tokens; the likeliest and listed ones stay.

    SGLang streams all of these lists from one offset, which therefore cannot leave one out.
    """
    tokens = req.logprob.output_token_logprobs_idx
    values = req.logprob.output_token_logprobs_val
    assert tokens is not None and values is not None, "there where a request asks for any"
    tokens.clear()
    values.clear()


def rewind_stream(req: Req) -> None:
    """Reset the stream's offset of log-probabilities to that of its tokens, at most.

    Under the overlap schedule a request may be retracted before the token of its prefill is taken.
    SGLang still streams it, without a token, but counts one log-probability as sent.
    """
    if req.return_logprob:
        sent = req.send_output_token_logprobs_offset
        req.send_output_token_logprobs_offset = min(sent, req.send_token_offset)


def publish(req: Req) -> None:
    """Pass a finished request's totals to SGLang's streamer, which adds them to `meta_info`."""
    state = find_state(req)
    if state is not None and req.finished():
        reason = req.finished_reason
        fields = state.meta_info(list(req.output_ids), reason and reason.to_json())
        if state.config.return_particles:
            fields[DETOKENIZATION] = detokenization(req)
        if state.config.trace:
            fields[META_PREFIX + "trace"] = state.trace(len(req.origin_input_ids), shared_ids(req))
        req.customized_info = {name: _Whole([value]) for name, value in fields.items()}


def detokenization(req: Req) -> dict[str, Any]:
    """Return what SGLang's detokenizer is told of a request beside the tokens of its output."""
    before, _ = with_output(req, ()).init_incremental_detokenize()
    params = req.sampling_params
    return {
        "before": list(before),  # the end of the prompt, on which the text of a token may depend
        "no_stop_trim": params.no_stop_trim,
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
    }


class _Whole(list):
    """List of one element that every slice returns whole.

    The streamer slices such lists by output token, one element each, but a total belongs
    to the whole output.
    """

    def __getitem__(self, index: Any) -> Any:
        return list(self) if isinstance(index, slice) else super().__getitem__(index)
