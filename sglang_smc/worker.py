"""SMC speculative decoding as a worker of SGLang's scheduler.

`_play` is the algorithm: draft, score, reweight, resample, bonus, commit, for
all particles of all running requests at once. Its state lives on the device, in
tables keyed by `req_pool_idx`. docs/algorithm.md explains the steps.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_smc.memory import arena
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.supported import check_layers, check_same_vocabulary
from sglang_smc.models.weight_update import WeightUpdates
from sglang_smc.ops.select import kind_of, ops_of
from sglang_smc.options.budget import Budget, budgets
from sglang_smc.options.policy import Policy
from sglang_smc.options.server import SMCConfig
from sglang_smc.process import active_budget, active_policy, set_monitor, set_policy
from sglang_smc.requests import logit_edits
from sglang_smc.requests.failures import failure_of_first, mark_first
from sglang_smc.requests.first_tokens import first_tokens
from sglang_smc.requests.grammar import masks_of, note_prefill
from sglang_smc.requests.state import RequestStates, has_open_token, state_of
from sglang_smc.round.batch import RoundBatch, RoundInputs, RoundShape, shape_of, shape_of_server
from sglang_smc.round.costs import costs_of, costs_of_graphs, costs_of_passes, rehearse
from sglang_smc.round.draft_input import SMCDraftInput
from sglang_smc.round.graph import Record, RoundGraphs, cuda_recorder, graph_sizes, measured
from sglang_smc.round.result import Outcome, Particles, SMCBatchResult
from sglang_smc.round.steps import Decision, Steps
from sglang_smc.smc.proposal import sample
from sglang_smc.smc.randomness import Purpose, derive_seed, uniforms
from sglang_smc.smc.weights import log_mean_exp
from sglang_smc.state.counters import CounterTable, zero_counters
from sglang_smc.state.logprobs import logprob_distribution
from sglang_smc.state.monitor import Monitor
from sglang_smc.state.population import ParticleTable, Population
from sglang_smc.state.settings import FilterKinds, RequestTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs


class SMCWorker(WeightUpdates):
    """Drives a target and an independent draft model; built by SGLang's scheduler."""

    def __init__(
        self,
        server_args: "ServerArgs",
        gpu_id: int,
        ps: "ParallelState",
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        super().__init__()
        self.config = SMCConfig.from_server_args(server_args)
        self.device = server_args.device
        self._kind = kind_of(self.config.kernels, self.device)
        self._ops = ops_of(self._kind)
        self._target_worker = target_worker
        self._draft_worker = TpModelWorker(
            server_args=server_args,
            gpu_id=gpu_id,
            ps=replace(ps, pp_rank=0),
            nccl_port=nccl_port,
            is_draft_worker=True,
        )
        # SGLang looks for the draft's runner under this name.
        self._draft_worker.draft_runner = self._draft_worker.model_runner
        self._draft_worker.draft_runners = [self._draft_worker.model_runner]
        check_same_vocabulary(target_worker, self._draft_worker)
        self._graph_sizes = graph_sizes(server_args)
        self.monitor = Monitor(server_args.decode_log_interval)
        set_monitor(self.monitor)
        self._graphs: dict[Budget | None, RoundGraphs] = {}
        self._runs = RequestStates(
            self.config, _replica_seed(target_worker.random_seed, ps.dp_rank)
        )

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        """Make room for the particles' rows, then give the draft its KV for the same slots."""
        config, pool = self.config, req_to_token_pool
        num_slots = token_to_kv_pool_allocator.size
        arena.check_pool(config, num_slots)
        num_rows, width = pool.req_to_token.shape
        # Attention backends take the tensor as they are built, which is after this.
        pool.req_to_token = torch.zeros(
            num_rows * (1 + config.num_particles),
            width + arena.max_arena(config),
            dtype=torch.int32,
            device=self.device,
        )
        super().alloc_memory_pool(memory_pool_config, pool, token_to_kv_pool_allocator)
        vocab_size = self._target_worker.model_runner.model_config.vocab_size
        max_tail = arena.max_tail(config)
        self._requests = RequestTable(num_rows, vocab_size, self.device)
        self._particles = ParticleTable(num_rows, config.num_particles, max_tail, self.device)
        self._counters = CounterTable(num_rows, self.device)
        self._ledger = self._ops.ledger(
            pool.req_to_token,
            num_rows=num_rows,
            num_particles=config.num_particles,
            max_tail=max_tail,
            num_slots=num_slots + 1,
        )

    def init_attention_backends(self) -> None:
        """Build the stock backends for prefill, and our own for the particles."""
        super().init_attention_backends()
        self._steps = Steps(
            target=ParticleForward(self._target_worker.model_runner, self._kind),
            draft=ParticleForward(self._draft_worker.model_runner, self._kind),
            ledger=self._ledger,
            ops=self._ops,
            max_lag=self.config.max_lag,
        )
        for worker in (self._target_worker, self._draft_worker):
            check_layers(worker.model_runner)
        rehearse(self._steps, self._ledger, self._ops)

    def init_cuda_graphs(self) -> None:
        """Let the stock runners capture prefill, then capture whole rounds."""
        super().init_cuda_graphs()
        if self.config.round_graph != "off":
            self._begin_padding()
            with measured(self.device) as usage:
                self._capture(cuda_recorder())
            self._additional_graph_memory_usage["smc_round"] = usage[0].gigabytes
            self._additional_graph_time_usage["smc_round"] = usage[0].seconds
        if self.config.adaptive:
            self._adapt()

    def _capture(self, record: Record) -> None:
        """Capture rounds, and where N and K adapt those of all budgets, the largest first."""
        for budget in budgets(self._top) if self.config.adaptive else (None,):
            shape = shape_of_server(self.config, budget)
            graphs = RoundGraphs(self._play, shape, self._graph_sizes, self.device, record)
            graphs.capture()
            self._graphs[budget] = graphs

    @property
    def _top(self) -> Budget:
        return Budget(self.config.num_particles, self.config.num_steps)

    def _adapt(self) -> None:
        """Let N and K follow the load from now on."""
        most = self.req_to_token_pool.size * self._top.num_particles * (self._top.num_steps + 1)
        if self._graphs:
            measure = partial(costs_of_graphs, self._graphs, self.device)
        else:
            measure = partial(costs_of_passes, self._steps, self._ledger, self._ops, most)
        costs = costs_of(measure, self._target_worker.model_runner.tp_group)
        set_policy(Policy(self._top, costs))

    def _begin_padding(self) -> None:
        """Give SGLang's padding row particles that have ended: they play what a batch leaves."""
        self._requests.write([self._runs.padding()])
        row = self._tensor([0])
        self._counters.begin(row, self._tensor([zero_counters(1)], torch.float64))
        self._particles.begin(
            row,
            first_tokens=row,
            num_emitted=row,
            log_evidence=torch.zeros_like(row, dtype=torch.float64),
            num_particles=self._tensor([self.config.num_particles]),
            ended=torch.ones(1, self.config.num_particles, dtype=torch.bool, device=self.device),
        )

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Every attention backend that a round touches."""
        return self._steps.target.attn_backend, self._steps.draft.attn_backend

    def forward_batch_generation(
        self, batch: "ScheduleBatch", on_publish: "Callable | None" = None, **_: Any
    ) -> "GenerationBatchResult":
        """Prefill a batch of prompts, or run one round for all running requests."""
        run = self._prefill if batch.forward_mode.is_extend() else self._round
        result = run(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def prepare_for_kv_cache_release(self, req: "Req") -> None:
        """Keep the last slot of a finished text out of the radix cache.

        The draft reads the last token of a round in the next one, which this text has not. What
        the cache owns both models have read, in a prefill: all, if no round has emitted since.
        """
        if len(req.output_ids) > 1:
            req.kv_committed_len = max(req.kv_committed_len - 1, req.cache_protected_len)

    def _prefill(self, batch: "ScheduleBatch") -> "GenerationBatchResult":
        """Both models read the prompt; the target's first token is an exact sample."""
        draft_logits = self._prefill_draft(batch)
        result = self._prefill_target(batch, draft_logits)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = SMCDraftInput(result.next_token_ids)
        return result

    def _prefill_target(
        self, batch: "ScheduleBatch", draft_logits: torch.Tensor
    ) -> "GenerationBatchResult":
        worker = self._target_worker
        if batch.is_prefill_only:
            return worker.forward_batch_generation(batch)
        worker.set_hicache_consumer(batch.hicache_consumer_index)
        forward_batch = ForwardBatch.init_new(
            batch, worker.model_runner, return_hidden_states_before_norm=False
        )
        result = worker.forward_batch_generation(None, forward_batch, is_verify=True)
        tokens, failure = self._begin(batch, result.logits_output, draft_logits)
        result.next_token_ids = mark_first(tokens, failure)
        return result

    def _prefill_draft(self, batch: "ScheduleBatch") -> torch.Tensor:
        runner = self._draft_worker.model_runner
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        forward_batch.return_logprob = False
        return runner.forward(forward_batch).logits_output.next_token_logits  # [G, V]

    def _begin(
        self, batch: "ScheduleBatch", output: "LogitsProcessorOutput", draft_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw first tokens ``[G]`` from logits ``[G, V]`` and start the particles there.

        Where either model's logits mean nothing there is a `Failure`, ``[G]``.
        """
        rows, logits = batch.req_pool_indices, output.next_token_logits
        assert logits is not None
        budget = active_budget()
        starts = self._runs.begin(batch.reqs, budget)
        self._requests.write([start.spec for start in starts])
        num_emitted = self._tensor([start.num_emitted for start in starts])  # [G]
        carried = self._tensor([start.counters for start in starts], torch.float64)
        settings = self._requests.gather(rows).within(budget)
        masks = masks_of(batch.reqs, None, self._requests.vocab_size, self.device)
        allowed = masks.first() if masks else None
        logits = logit_edits.begin(batch.reqs, logits).unsqueeze(1)  # [G, 1, V]
        of_last = logits, num_emitted.unsqueeze(1), FilterKinds.of(batch.reqs)
        raised, log_sum = settings.law(*of_last, allowed=allowed).to_power(settings.power)
        law = raised.log_probs()
        first = torch.zeros_like(num_emitted)  # they belong to all particles; drawn as particle 0's
        tokens = sample(law, uniforms(settings.seeds, num_emitted, first, Purpose.BONUS))
        failure = failure_of_first(law, draft_logits)
        tokens, ended = tokens.unsqueeze(1), (failure > 0).unsqueeze(1)  # [G, 1], for all particles
        if any(has_open_token(req) for req in batch.reqs):
            own = self.config.num_particles, batch.reqs, settings, law, num_emitted
            tokens, ends = first_tokens(*own, shared=tokens)
            ended = ended | ends
        if masks:
            note_prefill(batch.reqs, tokens[:, 0], log_sum)
        log_sum = log_sum.masked_fill(~settings.weighs, 0.0)
        carried[:, -1] += log_sum
        self._counters.begin(rows, carried)
        self._particles.begin(
            rows,
            first_tokens=tokens,
            num_emitted=num_emitted + 1,
            log_evidence=carried[:, -1],
            num_particles=settings.num_particles,
            ended=ended,
        )
        self._runs.note_first(batch.reqs, log_sum)
        if batch.return_logprob:
            shown = logprob_distribution(settings, *of_last, allowed=allowed)
            self._particles.logprobs.begin(batch, shown.log_probs(), tokens, output)
        return tokens[:, 0], failure

    def _round(self, batch: "ScheduleBatch") -> SMCBatchResult:
        """Launch a round; the host hears of it when the device has come so far."""
        shape = shape_of(self.config, batch.reqs)
        inputs = RoundInputs(
            rows=batch.req_pool_indices,
            committed=batch.seq_lens.long(),
            allocated=self._tensor([state_of(req).arena[1] for req in batch.reqs]),
        )
        if shape.resizes:
            self._resize(inputs, shape, batch.reqs)
        graphs = self._graphs.get(shape.budget)
        if graphs is not None and graphs.fits(shape, len(batch.reqs)):
            outcome = graphs.replay(inputs)
        else:
            outcome = self._play(inputs, shape, batch.reqs)
        result = SMCBatchResult.of(outcome, self.monitor)
        result.policy, result.budgets = (
            active_policy(),
            [state_of(req).budget for req in batch.reqs],
        )
        return result

    def _resize(self, inputs: RoundInputs, shape: RoundShape, reqs: "Sequence[Req]") -> None:
        """Bring populations to the sizes that they have in this round."""
        as_held = shape._replace(num_particles=shape.num_held, edited=False, constrained=False)
        batch, held = self._open(inputs, as_held, reqs)
        self._particles.scatter(inputs.rows, self._steps.resize(batch, held))

    def _play(self, inputs: RoundInputs, shape: RoundShape, reqs: "Sequence[Req]" = ()) -> Outcome:
        """One round, from the last token of every particle to what all of them agree on."""
        steps = self._steps
        batch, before = self._open(inputs, shape, reqs)
        reserved = steps.reserve(batch, before)

        drafts = steps.propose(batch, before, reserved)
        law, shown = steps.score(batch, before, drafts, reserved)
        decision = steps.decide(batch, before, drafts, law)  # reweight and resample, or verify
        extended = steps.extend(batch, before, drafts, decision)
        continued = steps.add_bonus(batch, extended, decision.next_tokens)
        if shown is not None:
            continued = self._particles.logprobs.note(
                batch.rows, before, continued, decision.resampled.ancestors, shown, self._ops
            )
        continued = continued.stop(decision.failure > 0)
        settled, forced = steps.collapse(batch, continued)
        return self._commit(batch, continued, settled, decision, forced)

    def _open(
        self, inputs: RoundInputs, shape: RoundShape, reqs: "Sequence[Req]"
    ) -> tuple[RoundBatch, Population]:
        before = self._particles.gather(
            inputs.rows, shape.num_particles, shape.max_tail, shape.logprobs
        )
        settings = self._requests.gather(inputs.rows).within(shape.budget)
        seeds = self._ops.round_seeds(settings.seeds, before.output_lengths.amax(1))
        settings = settings._replace(seeds=seeds)
        of_round = logit_edits.edits_of(list(reqs), before) if shape.edited else ()
        grammars = reqs if shape.constrained else ()
        masks = masks_of(grammars, before, self._requests.vocab_size, self.device)
        return RoundBatch(list(reqs), inputs, settings, shape, of_round, masks), before

    def _commit(
        self,
        batch: RoundBatch,
        continued: Population,
        settled: Population,
        decision: Decision,
        forced: torch.Tensor,
    ) -> Outcome:
        """Emit what all particles agree on, and store the rest for the next round."""
        counts = settled.num_common()
        self._ledger.commit(
            batch.rows,
            committed=batch.committed,
            allocated=batch.allocated,
            lengths=settled.lengths,
            counts=counts,
            max_tail=batch.shape.max_tail,
            max_arena=batch.shape.max_arena,
        )
        if batch.edits:
            logit_edits.commit(batch.reqs, settled, counts)
        after = settled.emit(counts)
        self._particles.scatter(batch.rows, after)
        counters = self._counters.add_round(
            batch.rows,
            cut=decision.cut,
            failed=decision.failure > 0,
            verified=decision.verified,
            killed=decision.num_killed(continued.present),
            collapsed=forced,
            ancestors=continued.num_roots(),
            num_particles=batch.settings.num_particles,
            num_steps=batch.settings.num_steps,
            # What is banked, and what the weights have gained since: a retraction keeps both.
            log_evidence=after.log_evidence
            + log_mean_exp(after.log_weights, batch.settings.num_particles),
        )
        return Outcome(
            tokens=settled.tokens[:, 0],
            counts=counts,
            new_seq_lens=batch.committed + counts,
            last_emitted=after.last_emitted[:, 0],
            num_kept_columns=decision.cut.num_columns,
            counters=counters,
            failure=decision.failure,
            first_tokens=settled.first_token() if batch.shape.opens else None,
            particles=Particles.of(continued) if batch.shape.shows_particles else None,
            logprobs=self._particles.logprobs.emitted(batch.rows, settled),
        )

    def _tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def _replica_seed(random_seed: int, dp_rank: int | None) -> int:
    """Replicas number their requests alike, and must not draw alike."""
    return derive_seed(random_seed, dp_rank) if dp_rank else random_seed
