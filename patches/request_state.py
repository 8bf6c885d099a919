"""Update a request's state after rounds that emit nothing, and publish its totals at the end."""

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.session.session_controller import Session

from sglang_smc.guard import grammar_cache
from sglang_smc.process import active, active_config
from sglang_smc.round.result import count_emitted
from sglang_smc.rules import registry
from sglang_smc.rules.grammar import Grammar
from sglang_smc.rules.stopping import StopTexts
from sglang_smc.server.hooks import Hooks
from sglang_smc.state.failures import take_mark
from sglang_smc.state.metrics import Monitor
from sglang_smc.state.request import RequestState, find_state
from sglang_smc.state.stream import drop_sampled_logprobs, publish, rewind_stream
from sglang_smc.state.texts import has_open_token
from sglang_smc.state.thoughts import recount
from sglang_smc.upstream import NEWER

PATCHES = Hooks()


@PATCHES.on(
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    "srt/managers/schedule_batch.py:1568",
    "srt/managers/scheduler_components/output_streamer.py:592 (customized_info)",
    "srt/managers/scheduler_components/output_streamer.py:506 (counts one at least)",
    why="`output_ids[-0:]` is the whole output: an old token would be taken for a new end. "
    "SGLang's search for stop patterns goes back, and can take for ever. "
    "No other place sees every request's end, in prefill and decode, before it is streamed.",
    retire_when="update_finish_state(0) is a no-op upstream, and so is a stream of no token.",
)
def update_finish_state(original: Callable, req: Req, new_accepted_len: int = 1) -> None:
    """Update a request's state: check new tokens only for an end, and publish its totals.

    The look for an end is skipped where a round emitted no token, or one that may still change.
    The log-probability that SGLang counts as sent with no token is taken back. A request ends
    whose prefill found logits that mean nothing, or whose text a stop pattern matches, which SGLang
    is not shown. Thoughts are counted anew at the end. What rounds have emitted is counted, and
    time between chunks of streams. A finished request's totals reach the streamer as
    customized_info.
    """
    state = find_state(req)
    num_closed = 0
    if state is None:
        num_new = new_accepted_len
        StopTexts.remove_patterns(req)  # one that generates nothing
    else:
        _end_after_prefill(req, state)
        num_closed = state.open_token.take()
        num_new = new_accepted_len + num_closed
        if state.open_token.is_open:
            num_new = 0
    if num_new > 0 or req.to_finish:
        original(req, num_new)
        StopTexts.end_at_match(req)
        if state is not None and state.count_thoughts and (req.finished() or num_closed):
            recount(req, state.count_thoughts)
    if state is not None and active.worker is not None:
        monitor = active.worker.monitor
        count_emitted(req, monitor)
        if req.stream:
            _time_chunk(req, state, monitor, num_new)
        if req.finished() and not state.has_ended:
            state.has_ended = True
            monitor.end_answer(state.answer())
    publish(req)


def _time_chunk(req: Req, state: RequestState, monitor: Monitor, num_new: int) -> None:
    """Measure the new tokens that a stream sends; those after its end are not sent."""
    kept = num_new - (len(req.output_ids) - len(req.output_ids_through_stop))
    if kept > 0:
        state.last_chunk = monitor.time_chunk(state.last_chunk, kept)


def _end_after_prefill(req: Req, state: RequestState) -> None:
    """End a request if its prefill has found that it cannot go on."""
    code = take_mark(req)
    if not code:
        Grammar.end_at_first_token(req)
        rewind_stream(req)
        return
    Grammar.release(req)
    if not registry.end_failed(req, code):
        return
    state.count_nan()
    if active.worker is not None:
        active.worker.monitor.count_failed_prefill()


@PATCHES.on(
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    ".stream_output",
    "srt/managers/scheduler_components/output_streamer.py:475 (any request, every 50 tokens)",
    "srt/managers/schedule_batch.py:1506 (with speculation, scoring samples a token)",
    "srt/managers/scheduler_components/logprob_result_processor.py:329 (after the request's end)",
    "srt/managers/scheduler_components/output_streamer.py:471 (holds back what begins a stop "
    "string, of streams alone, and by a tail that ends with whole characters)",
    "srt/managers/detokenizer_manager.py:194 (cuts a stop, and 520 only behind what is sent)",
    why="The newest token of a request may stand in for those of its particles, and change. "
    "Scoring (`max_new_tokens: 0`) returns no token, but SGLang sends what one has. A text that "
    "has left is not cut: a whole answer, of which a part leaves every 50 tokens, keeps the "
    "beginning of a stop string.",
    retire_when="A prefill can put out no token, and SGLang holds back whatever a stop may cut.",
)
def stream_output(
    original: Callable,
    streamer: SchedulerOutputStreamer,
    reqs: list[Req],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Send what requests have put out, but for what may still change or be cut.

    Of the token that scoring samples, and does not return, the log-probability is not sent. The
    likeliest and listed ones in its place are what scoring asks for.
    """
    for req in reqs:
        if req.return_logprob and req.sampling_params.max_new_tokens == 0:
            drop_sampled_logprobs(req)
    sent = [r for r in reqs if r.finished() or not (has_open_token(r) or StopTexts.holds_back(r))]
    original(streamer, sent, *args, **kwargs)


@PATCHES.on(
    "sglang.srt.managers.schedule_batch.Req.next_output_finishes_by_length",
    "srt/managers/scheduler.py:4456 (asks under the overlap schedule)",
    why="SGLang leaves a request out of the next batch if the result under way must finish it, "
    "by its length. A round that holds the last token back, until potentials have scored the "
    "text, does not: the request would never be looked at again.",
    retire_when="SGLang asks the algorithm whether a result finishes a request.",
    family=NEWER,
)
def next_output_finishes_by_length(original: Callable, req: Req) -> bool:
    """Return False with potentials, since a round may hold the last token back."""
    return not registry.has_scorers(req) and original(req)


@PATCHES.on(
    "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
    "srt/managers/schedule_batch.py:1603",
    why="Prefill must put out one token, but the particles of such a request differ in it.",
    retire_when="A prefill can put out no token.",
)
def reset_for_retract(original: Callable, req: Req) -> None:
    """Drop the open token, which stands in for the first of each particle, before a prefill."""
    if find_state(req) is not None:
        registry.withdraw_token(req)
    original(req)


@PATCHES.on(
    "sglang.srt.constrained.base_grammar_backend.create_grammar_backend",
    "srt/constrained/base_grammar_backend.py:172 (cache)",
    "srt/constrained/xgrammar_backend.py:246 (GrammarCompiler without cache_limit_bytes)",
    why="`BaseGrammarBackend.cache` and xgrammar's GrammarCompiler keep every grammar that "
    "came: the scheduler grows with them. A backend of our own (register_grammar_backend) "
    "would lose the reasoning parser's wrapper.",
    retire_when="SGLang bounds what it keeps of compiled grammars.",
)
def create_grammar_backend(
    original: Callable, *args: Any, **kwargs: Any
) -> BaseGrammarBackend | None:
    """Create a grammar backend with a cache bounded in number and size.

    It drops the grammars used least recently; its compiler keeps none itself.
    """
    backend = original(*args, **kwargs)
    return backend if active_config() is None else grammar_cache.bound(backend)


@PATCHES.on(
    "sglang.srt.session.session_controller.Session.create_req",
    "srt/session/session_controller.py:236 (drops them by `SessionReqNode.clear`)",
    why="SGLang's recursion, shared rids or changing dictionary would end the scheduler.",
    retire_when="A session can drop whatever turns it has.",
)
def create_turn(
    original: Callable, session: Session, req: TokenizedGenerateReqInput, *args: Any, **kwargs: Any
) -> Req:
    """Drop the turns after the one that a new turn replaces; all, if it names none."""
    turn = req.session_params
    nodes = session.req_nodes
    if turn and turn.replace and not session.streaming:
        later = nodes[turn.rid].children if turn.rid in nodes else []
        dropped = list(nodes.values()) if turn.rid is None else later
        for node in dropped:  # and its children, as the list grows
            dropped += node.children
            node.children = []
            node.abort()
            if nodes.get(node.req.rid) is node:
                del nodes[node.req.rid]
        later.clear()
    return original(session, req, *args, **kwargs)


@PATCHES.on(
    "sglang.srt.sampling.custom_logit_processor._cache_from_str",
    "srt/sampling/custom_logit_processor.py:44 (calls what it returns)",
    "srt/sampling/sampling_batch_info.py:259 (for each batch of prompts, outside any `try`)",
    why="SGLang loads clients' processors: one that it cannot load ends the scheduler.",
    retire_when="A processor that cannot be loaded ends its own request.",
)
def load_processor(original: Callable, text: str) -> Callable:
    """Return a processor's class; one that cannot be loaded raises its error when it is called."""

    def make() -> Any:
        try:
            return original(text)()
        except Exception as error:
            return partial(_raise, error)

    return make


def _raise(error: Exception, *_: Any) -> None:
    raise error
