"""Run SGLang's scheduler in the test's own process, one pass of its event loop at a time.

No socket, no other process, no clock: requests arrive at the step where a test sends them, and are
retracted where it says so. SGLang's strict memory checks run at every step. Of the rest of an
engine nothing runs: a request is not validated as it comes, and its answer is tokens.

    with in_process.running(**smc_arguments(target, draft), overlap=True) as server:
        reply = server.send(input_ids=[3, 4], sampling_params={"max_new_tokens": 20})
        server.step(3)
        server.retract(reply)
        server.finish()
        assert reply.num_retractions == 1
"""

import gc
import pickle
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import zmq
from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import AbortReq, SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from tiny_models import ENGINE_DEFAULTS, STRICT_CHECKS

from sglang_smc import process, upstream
from sglang_smc.options.server import CPU_OVERLAP_ENV

if upstream.IS_NEWER:  # the schedulers here run on no older one
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context

MOST_STEPS = 20_000
#: Settings that requests of a test choose in turn.
SMC: list[dict[str, Any]] = [
    {},
    {"mode": "exact"},
    {"mode": "auto", "num_particles": 2},
    {"proposal": "verified", "power": 2.0},
]


class Pipe:
    """An in-memory end of a socket, which hands on copies."""

    def __init__(self) -> None:
        self._sent: deque[bytes] = deque()

    def send_pyobj(self, value: Any, flags: int = 0, protocol: int | None = None) -> None:
        self._sent.append(pickle.dumps(value, protocol))

    def recv_pyobj(self, flags: int = 0) -> Any:
        if not self._sent:
            raise zmq.Again
        return pickle.loads(self._sent.popleft())

    def drain(self) -> Iterator[Any]:
        while self._sent:
            yield self.recv_pyobj()


class SteppedScheduler(Scheduler):
    """SGLang's scheduler, of which `run_event_loop` returns after one pass."""

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        pipes: Any = [Pipe() for _ in range(4)]
        self.inbox, self.outbox, self.control, rpc = pipes
        self.recv_from_tokenizer = self.inbox
        self.load_snapshot_writer = None
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=self.inbox,
            recv_from_rpc=rpc,
            send_to_tokenizer=SenderWrapper(self.control),
            send_to_detokenizer=SenderWrapper(self.outbox),
            send_metrics_from_scheduler=None,
        )
        self.leaving: set[str] = set()  # requests to retract in the next round

    @property
    def result_queue(self) -> deque | None:
        """The result that the overlap loop has yet to process; each pass enters that loop anew."""
        return self.__dict__.get("_result_queue")

    @result_queue.setter
    def result_queue(self, fresh: deque) -> None:
        self.__dict__.setdefault("_result_queue", fresh)

    def ingest_requests(self, stop_at_pause: bool = False) -> list:
        self.gracefully_exit = True  # read as the loop comes round
        return super().ingest_requests(stop_at_pause)

    def on_idle(self) -> None:
        super().on_idle()
        time.sleep(0.001)  # for the threads that a pass without a batch waits for

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        """Retract whom a test names, by SGLang's own switch."""
        named = self.leaving & {req.rid for req in batch.reqs}
        with _retracting(named) if named else nullcontext():
            planned = super().update_running_batch(batch)
        self.leaving -= {req.rid for req in self.waiting_queue}
        return planned


@contextmanager
def _retracting(named: Container[str]) -> Iterator[None]:
    """Have these requests of a batch be the first to lose their KV."""
    order = ScheduleBatch._get_decode_retraction_order
    fits = ScheduleBatch.check_decode_mem

    def named_last(reqs: list[Req]) -> list[int]:
        return sorted(order(reqs), key=lambda i: reqs[i].rid in named)

    def fits_without(batch: ScheduleBatch, selected_indices: list[int] | None = None) -> bool:
        chosen = selected_indices or []
        remain = len(chosen) > 1 and any(batch.reqs[i].rid in named for i in chosen)
        return not remain and fits(batch, selected_indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_scheduler, "TEST_RETRACT", True)
        patch.setattr(sglang_scheduler, "TEST_RETRACT_INTERVAL", 1)
        patch.setattr(ScheduleBatch, "_get_decode_retraction_order", staticmethod(named_last))
        patch.setattr(ScheduleBatch, "check_decode_mem", fits_without)
        yield


class Reply:
    """What a client has heard of one request; `chunks` are pairs of step and tokens."""

    def __init__(self, rid: str, tokenizer: Any) -> None:
        self.rid = rid
        self._tokenizer = tokenizer
        self.chunks: list[tuple[int, list[int]]] = []
        self.meta: dict[str, Any] = {"num_retractions": 0}
        self.logprobs: list[float] = []  # of the output, where they are asked for
        self.kept: list[list[int]] = []  # by each retraction, of the output
        self.end: dict[str, Any] | None = None  # the finish reason

    @property
    def output_ids(self) -> list[int]:
        return [token for _, tokens in self.chunks for token in tokens]

    @property
    def text(self) -> str:
        return self._tokenizer.decode(self.output_ids)

    @property
    def num_retractions(self) -> int:
        return self.meta["num_retractions"]

    @property
    def why(self) -> str | None:
        return None if self.end is None else self.end["type"]

    def hear(self, step: int, output: Any, place: int) -> None:
        """Take one request's part of a batch's output."""
        assert self.end is None, "an answer ends once"
        self.meta["num_retractions"] = output.retraction_counts[place]
        self.meta["cached_tokens"] = output.cached_tokens[place]
        self.meta["reasoning_tokens"] = output.reasoning_tokens[place]
        if output.cached_tokens_details:
            self.meta["cached_tokens_details"] = output.cached_tokens_details[place]
        if output.spec_verify_ct:
            self.meta["spec_verify_ct"] = output.spec_verify_ct[place]
            self.meta["spec_num_correct_drafts"] = output.spec_num_correct_drafts[place]
        for name, values in (output.customized_info or {}).items():
            if values[place] and values[place] != [None] * len(values[place]):
                self.meta[name] = values[place][-1]
        if output.routed_experts and output.routed_experts[place] is not None:
            self.meta["routed_experts"] = output.routed_experts[place]
        if output.output_token_logprobs_val:
            self.logprobs += output.output_token_logprobs_val[place]
        self.chunks.append((step, list(output.output_ids[place])))
        self.end = output.finished_reasons[place]


class Server:
    """One scheduler, its clients, and the number of passes that it has made."""

    def __init__(self, scheduler: SteppedScheduler) -> None:
        self.scheduler = scheduler
        self.steps = 0
        self.replies: dict[str, Reply] = {}

    def send(self, *, input_ids: Sequence[int], rid: str | None = None, **given: Any) -> Reply:
        """Hand a request to the scheduler, which takes it in its next pass.

        Args:
            input_ids: the prompt.
            rid: its name; SGLang aborts by prefix.
            given: as `Engine.generate` takes them, but streamed unless told otherwise.
        """
        rid = rid or f"request-{len(self.replies):05}"
        params = SamplingParams(**given.pop("sampling_params", {}))
        params.normalize(self.scheduler.tokenizer)
        params.verify(self.scheduler.model_config.vocab_size)
        session = given.pop("session_params", None)
        nothing = ("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
        defaults = {
            **dict.fromkeys(nothing),
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": True,
        }
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_ids=array("q", input_ids),
            sampling_params=params,
            session_params=None if session is None else SessionParams(**session),
            **{**defaults, **given},
        )
        self.scheduler.inbox.send_pyobj(request)
        self.replies[rid] = Reply(rid, self.scheduler.tokenizer)
        return self.replies[rid]

    def abort(self, reply: Reply) -> None:
        """Have a client leave; the scheduler hears of it in its next pass."""
        self.scheduler.inbox.send_pyobj(AbortReq(rid=reply.rid))

    def retract(self, *replies: Reply) -> None:
        """Take the KV of these in the next round that they are to join, one at least staying."""
        self.scheduler.leaving |= {reply.rid for reply in replies}

    def ask(self, request: Any) -> Any:
        """Hand over a control request and return its answer, which takes a pass."""
        self.scheduler.inbox.send_pyobj(request)
        self.step()
        return self._answers.pop()

    def req(self, reply: Reply) -> Req:
        """Return SGLang's books of a request that runs, waits, or is yet to be merged."""
        everyone = (*self.scheduler.collect_inflight_reqs(), *self.scheduler.waiting_queue)
        return next(req for req in everyone if req.rid == reply.rid)

    def step(self, times: int = 1) -> None:
        """Make passes of the event loop, and hear what is sent to clients."""
        for _ in range(times):
            self.scheduler.gracefully_exit = False
            self.scheduler.run_event_loop()
            self._listen()
            for req in self.scheduler.waiting_queue:
                if req.retraction_count > len((reply := self.replies[str(req.rid)]).kept):
                    reply.kept.append(list(req.output_ids))
            self.steps += 1

    def _listen(self) -> None:
        for output in self.scheduler.outbox.drain():
            for place, rid in enumerate(output.rids):
                self.replies[rid].hear(self.steps, output, place)
        self._answers = []
        for message in self.scheduler.control.drain():
            if isinstance(message, AbortReq):
                self.replies[message.rid].end = message.finished_reason or {"type": "abort"}
            else:
                self._answers.append(message)

    def play(
        self,
        requests: Sequence[dict[str, Any]],
        *,
        every: int = 1,
        aborted: Container[int] = (),
        after: int = 1,
    ) -> list[Reply]:
        """Answer requests that arrive one after another.

        Args:
            requests: keywords of `send`.
            every: steps between two arrivals; 0 for all at once.
            aborted: indices of those that leave once they have ``after`` tokens.
        """
        replies = []
        leaving = []
        for index, given in enumerate(requests):
            replies.append(self.send(**given))
            leaving += replies[-1:] if index in aborted else []
            for _ in range(every):
                self._step_beside(leaving, after)
        self.run_until(lambda: self._step_beside(leaving, after))
        self.finish()
        return replies

    def _step_beside(self, leaving: list[Reply], after: int) -> bool:
        """Make a pass, and have those leave whose time has come; whether none is left."""
        self.step()
        gone = [one for one in leaving if one.end or len(one.output_ids) >= after]
        for reply in gone:
            leaving.remove(reply)
            if reply.end is None:
                self.abort(reply)
        return not leaving

    def run_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to be so")

    def decodes(self, reply: Reply) -> bool:
        """Whether a request's prompt has been read, and rounds are next."""
        return any(req.rid == reply.rid for req in self.scheduler.running_batch.reqs)

    def finish(self) -> None:
        """Make passes until no request is left, and one at rest, where SGLang looks for leaks."""
        self.step()
        self.run_until(self.scheduler.is_fully_idle)
        self.step()
        unanswered = [reply.rid for reply in self.replies.values() if reply.end is None]
        assert not unanswered, unanswered

    def generate(self, **given: Any) -> Reply:
        """Answer one request, alone unless others run."""
        reply = self.send(**given)
        self.finish()
        return reply

    def flush(self) -> None:
        """Empty the cache of a server at rest, and see all of its memory come back."""
        assert self.scheduler.flush_cache()
        scheduler: Any = self.scheduler
        pools = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
        assert [pool.available_size() for pool in pools] == [pool.size for pool in pools]


@contextmanager
def running(*, overlap: bool = False, **arguments: Any) -> Iterator[Server]:
    """Build a scheduler, by keywords of `sglang.Engine`; one at a time in a process.

    Args:
        overlap: have results reach the host one round late.
        arguments: over `ENGINE_DEFAULTS`.
    """
    load_plugins()
    # SGLang collects garbage thrice a scheduler: what it has imported need not be looked at again.
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in {**STRICT_CHECKS, CPU_OVERLAP_ENV: str(int(overlap))}.items():
            patch.setenv(name, value)
        # It would end this process's parent, if a debugger held a test for long.
        patch.setattr(sglang_scheduler, "create_scheduler_watchdog", lambda *_, **__: None)
        # Its pipes are no sockets that a poller could wait for.
        own = {"sleep_on_idle": False}
        server_args = ServerArgs(**{**ENGINE_DEFAULTS, **own, **arguments})
        ports = PortArgs.init_new(server_args)
        ranks = SpawnRanks(world_rank=0, gpu_id=0)
        context = create_context(server_args, role="scheduler", ranks=ranks)
        stack.enter_context(use_context(context))
        # Schedulers seed `random`, of which SGLang draws the ports of engines: all drew the same.
        stack.callback(random.setstate, random.getstate())
        stack.callback(_clean_up)
        yield Server(SteppedScheduler(server_args, ports))


def _clean_up() -> None:
    """Leave nothing of a scheduler to the next one, or to other tests."""
    cleanup_dist_env_and_memory()
    process.active.__init__()
