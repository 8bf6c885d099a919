"""Run SMC speculative decoding as a worker of SGLang's scheduler.

The algorithm is `round.play.ServedRound.play`. Its state is on the device, in tables keyed by
`req_pool_idx`. docs/algorithm.md explains the steps.
"""

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.runtime_context import get_parallel

from sglang_smc import process, upstream
from sglang_smc.kv import arena
from sglang_smc.models.weight_update import WeightUpdates
from sglang_smc.proposers import assembly as drafts
from sglang_smc.round import costs
from sglang_smc.round.batch import BatchPart, RoundInputs, Tables, groups_of
from sglang_smc.round.capture import Captures, Server, graph_sizes
from sglang_smc.round.handover import Handover
from sglang_smc.round.parts import Table, assemble, memory_of, operations
from sglang_smc.round.result import Outcome, SMCBatchResult, SMCDraftInput
from sglang_smc.state.metrics import Monitor
from sglang_smc.state.request import RequestStates, find_state, state_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs


class SMCWorker(WeightUpdates):
    """Worker of SGLang's scheduler with a target and an independent draft model.

    SGLang calls, in this order: `__init__`, `alloc_memory_pool`, `init_attention_backends`,
    `init_cuda_graphs`, and then `forward_batch_generation` for every batch.
    """

    _captures = Captures()

    def __init__(
        self, server_args: "ServerArgs", target_worker: "TpModelWorker", **placement: Any
    ) -> None:
        super().__init__()
        resolved = upstream.resolved(server_args)
        self.config = process.config_of(server_args)
        assert resolved.device is not None, "SGLang finds one as it reads its arguments"
        self.device = resolved.device
        self._overlaps = not resolved.disable_overlap_schedule
        self._target_worker = target_worker
        self._draft_worker = drafts.build(target_worker, server_args, placement, self.config)
        self.read_shapes()
        group = get_parallel().tp_group
        self._ops = operations(
            self.config, target_worker, self._draft_worker, device=self.device, group=group
        )
        if self._ops.kind == "torch":  # attention that reads lengths on the host
            self.config = msgspec.structs.replace(self.config, round_graph="off")
        self._corpus = drafts.corpus_of(resolved, self.config)
        self._graph_sizes = graph_sizes(resolved)
        self.monitor = Monitor(resolved.decode_log_interval)
        seed = target_worker.random_seed
        assert seed is not None, "SGLang draws one where it is given none"
        replica = upstream.replica_of(placement)
        runners = process.open_runners(server_args, self.config, self.monitor)
        dial = self.monitor.dial
        self._states = RequestStates(self.config, seed, dial, runners, replica)
        self.reason_of_sizes = drafts.reason_of_sizes(server_args, target_worker, self.config)
        process.active.worker = self

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Widen requests' rows by their arenas, then allocate the draft's KV for the same slots."""
        config = self.config
        pool = req_to_token_pool
        num_slots = token_to_kv_pool_allocator.size
        arena.check_pool(config, num_slots)
        num_rows, longest = pool.req_to_token.shape
        # Attention backends take the tensor when they are built, which is after this.
        pool.req_to_token = torch.zeros(
            num_rows, arena.row_width(config, longest), dtype=torch.int32, device=self.device
        )
        upstream.refresh_tables(self._target_worker.model_runner)
        super().alloc_memory_pool(memory_pool_config, pool, token_to_kv_pool_allocator)
        self._tables = Tables.of(
            config,
            self._ops,
            pool.req_to_token,
            num_slots=num_slots + config.page_size,  # with the padding page
            vocab_size=self._target_worker.model_runner.model_config.vocab_size,
            device=self.device,
        )

    def init_attention_backends(self) -> None:
        """Build SGLang's backends for prefill, and this package's for the particles."""
        super().init_attention_backends()
        self._prefill, self._round = assemble(
            self._target_worker,
            self._draft_worker,
            config=self.config,
            states=self._states,
            tables=self._tables,
            corpus=self._corpus,
        )
        workers = filter(None, (self._target_worker, self._draft_worker))
        self._handover = Handover(
            prefill=self._prefill,
            table=self._tables.ledger.table,
            pools=[worker.model_runner.token_to_kv_pool for worker in workers],
            page_size=self.config.page_size,
            device=self.device,
        )

    def init_cuda_graphs(self) -> None:
        """Let SGLang's runners capture prefill, then capture whole rounds."""
        if self._round.draft.has_stock_passes:
            super().init_cuda_graphs()
        if torch.device(self.device).type != "cpu":
            server = Server(self._round, self._tables, self.config, self._graph_sizes, self.device)
            self._captures = server.capture(get_parallel().tp_group)
            if self._captures.recordings is not None:
                self._additional_graph_memory_usage["smc_round"] = self._captures.gigabytes
                self._additional_graph_time_usage["smc_round"] = self._captures.seconds
        if self.config.adapts:
            measured = costs.costs_of(self._measure_rounds, get_parallel().tp_group)
            # Where results come a round late, a draft that resumes is shown the last two tokens.
            repeats = not self._overlaps and self._captures.recordings is None
            process.active.adapt(self.config, measured, repeats=repeats)

    def _measure_rounds(self, allowance: costs.Allowance) -> costs.AnyCosts:
        """Measure the rounds of this server as they are played."""
        assert self.req_to_token_pool is not None, "pools are built before rounds"
        most = self.req_to_token_pool.size
        recordings = self._captures.recordings
        if recordings is not None:
            return costs.costs_of_recordings(recordings, self.config, most, self._tables)
        return costs.costs_of_launched(self._round.play, self.config, most, self._tables, allowance)

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Return every attention backend that a round uses."""
        return self._round.target.attn_backend, self._round.draft.attn_backend

    def forward_batch_generation(
        self, batch: "ScheduleBatch", on_publish: "Callable | None" = None, **_: Any
    ) -> "GenerationBatchResult":
        """Prefill a batch of prompts, or launch one round for all running requests."""
        self._handover.stream = torch.get_device_module(self.device).current_stream()
        if batch.forward_mode.is_extend():
            result = self._prefill.run(batch, process.active.budget)
        else:
            result = self.launch_round(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def begin_transferred(self, batch: "ScheduleBatch", first: torch.Tensor) -> SMCDraftInput:
        """Start particles on a decode server; see `Prefill.begin_transferred`."""
        self._prefill.begin_transferred(batch, first, process.active.budget)
        return SMCDraftInput(first)

    def order_pages(self, req: "Req", *, keeps: bool) -> None:
        """Put a row into the order of pages before it is given back; see `Handover.order_pages`."""
        if self.config.page_size > 1:
            self._handover.order_pages(req, keeps=keeps)

    def measure_memory(self, *, num_slots: int, most_running: int) -> Table:
        """Return what takes memory, once pools have their sizes; see `memory_of`."""
        return memory_of(
            self.config,
            self._target_worker,
            self._draft_worker,
            self._tables,
            {
                "states of the target": self._round.draft.state_bytes,
                "marks of unread tokens": self._prefill.unread_bytes,
                "round graphs": round(self._captures.gigabytes * 2**30),
            },
            num_slots=num_slots,
            most_running=most_running,
        )

    def draft_layers(self) -> dict[str, Any] | None:
        """Return what draft layers were chosen, for /server_info; None where there is no choice."""
        choice = self._round.draft.layer_choice
        return None if choice is None else choice.as_dict()

    @property
    def primary_draft_kv_pool(self) -> None:
        """Return None: a prefill server sends KV of the target alone."""
        return None

    def launch_round(self, batch: "ScheduleBatch") -> SMCBatchResult:
        """Launch a round; the host reads its result after the device has finished it."""
        policy = process.active.policy
        inputs = RoundInputs.of(batch, self.device)
        always = any(extra.always for extra in self._round.extras)
        groups = groups_of(batch, inputs, None if always else policy)
        played = [self._launch_group(batch, group) for group in groups]
        places = [place for group in groups for place in group.places]
        return SMCBatchResult.of(
            Outcome.joined([outcome for outcome, _ in played], places),
            self._round.extras,
            can_run_cuda_graph=all(replayed for _, replayed in played),
            monitor=self.monitor,
            budgets=[state_of(req).sizes for req in batch.reqs],
            policy=policy,
            corpus=self._corpus,
        )

    def _launch_group(self, batch: "ScheduleBatch", group: BatchPart) -> tuple[Outcome, bool]:
        """Launch the round of some requests of a batch; return whether a CUDA graph is replayed."""
        _, reqs, inputs, shape = group
        recordings = self._captures.recordings
        launched = self._captures.launched
        recorded = None if recordings is None else recordings.find(shape)
        played = shape if recorded is None else recorded.shape
        if played.skips_draft and self._round.draft.late_tokens:
            self._prefill.skip_draft(batch, reqs)
        else:
            self._prefill.catch_up(batch, reqs)
        resized = self._round.resize(inputs, shape, reqs)
        if recorded is not None:
            outcome = recorded.replay(inputs)
        elif launched is None or len(reqs) <= launched:
            outcome = self._round.play(inputs, shape, reqs, resized)
        else:
            outcome = self._round.play_in_slices(inputs, shape, reqs, resized, launched)
        return outcome, recorded is not None

    def clear_cache_pool(self) -> None:
        """Clear the corpus along with the KV cache, so that a flush leaves no data of requests."""
        if self._corpus is not None:
            self._corpus.forget()

    def prepare_for_kv_cache_release(self, req: "Req") -> None:
        """Hand over a finished request's row, see `Handover.finish`, and its text to the corpus."""
        self._handover.finish(req)
        if self._corpus is not None and find_state(req) is not None:
            self._corpus.read(req)
