"""Prefill prompts, and start particles after the target's first token."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.runtime_context import get_schedule

from sglang_smc.kv.transfer import on_device
from sglang_smc.models.chains import Chains
from sglang_smc.options.request import Budget
from sglang_smc.proposers.base import DraftProposer
from sglang_smc.round.batch import Tables
from sglang_smc.round.result import SMCDraftInput, as_eagle
from sglang_smc.rules.registry import TextRules
from sglang_smc.smc.distribution import sample
from sglang_smc.smc.edits import Edits
from sglang_smc.smc.ledger import KVLocations
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.settings import BatchSettings
from sglang_smc.state.edits import has_edits
from sglang_smc.state.failures import failure_of_first, mark_first
from sglang_smc.state.logprobs import logprob_distribution, reported_temperature
from sglang_smc.state.metrics import fidelity_of
from sglang_smc.state.request import RequestStates, state_of
from sglang_smc.state.settings import is_greedy, uses_filters
from sglang_smc.state.texts import has_open_token, skip_draft, take_unread
from sglang_smc.upstream import holds_kv, kv_of

_LONGEST_CHUNK = 8192  # tokens of transferred texts that the draft reads in one pass
_AT_ONCE = 32  # requests of a pass in `Prefill.catch_up`, which has logits for each token


def chunks(
    starts: Sequence[int], ends: Sequence[int], most: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield spans ``(request, start, end)`` of texts, in lists of at most ``most`` tokens."""
    spans: list[tuple[int, int, int]] = []
    room = most
    for which, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while start < end:
            stop = min(start + room, end)
            spans.append((which, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield spans
                spans = []
                room = most
    if spans:
        yield spans


class Backlog(NamedTuple):
    """Tokens of a request that the draft has yet to read."""

    group: int  # the request's index in the batch
    row: int | None  # in `req_to_token`
    start: int  # position of the first token
    tokens: list[int]


@dataclass(eq=False)
class Prefill:
    """Prefill of prompts with the target and the proposer."""

    _target: TpModelWorker
    _draft: DraftProposer
    _states: RequestStates  # starts requests on the host
    _tables: Tables  # state of requests on the device
    _init_from_prompt: Callable[[ScheduleBatch], None]  # the target's, see `ParticleForward`

    def run(self, batch: ScheduleBatch, budget: Budget | None) -> GenerationBatchResult:
        """Prefill a batch of prompts; the target's first token is an exact sample."""
        target = self._target
        target.set_hicache_consumer(batch.hicache_consumer_index)
        forward_batch = ForwardBatch.init_new(
            batch, target.model_runner, return_hidden_states_before_norm=False
        )
        if self._draft.wants_states:
            forward_batch.capture_hidden_mode = CaptureHiddenMode.FULL
        draws = not batch.is_prefill_only
        positions = forward_batch.positions.clone()
        result = target.forward_batch_generation(None, forward_batch, is_verify=draws)
        forward_batch.positions = positions  # Gemma 3 with images adds 1 in place
        output = result.logits_output
        assert isinstance(output, LogitsProcessorOutput), "there is one pipeline stage alone"
        # Used only here: SGLang would copy the hidden states to the host.
        states = output.hidden_states
        output.hidden_states = None
        draft_logits = self._draft.read_prompts(batch, forward_batch, states)
        if draws:
            self._init_from_prompt(batch)
            tokens, failure = self.begin(batch, output, draft_logits, budget)
            result.next_token_ids = mark_first(tokens, failure)
        assert isinstance(result.next_token_ids, torch.Tensor), "the same"
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = as_eagle(SMCDraftInput(result.next_token_ids))
        return result

    def skip_draft(self, reqs: list[Req], committed: torch.Tensor) -> None:
        """Leave a round's tokens to a later pass of the draft, over `late_tokens` of a request.

        Arguments as in `catch_up`.
        """
        if max(map(skip_draft, reqs)) >= self._draft.late_tokens:
            self.catch_up(reqs, committed)
            for req in reqs:
                skip_draft(req)

    def catch_up(self, reqs: list[Req], committed: torch.Tensor | None = None) -> None:
        """Run the draft over the tokens of rounds that it has skipped.

        Args:
            reqs: of which some may have such tokens.
            committed: ``[G]`` their KV slots of emitted tokens; None where no round follows.
        """
        # One that ended as the result before this round was read has given its row back.
        behind = [
            Backlog(group, kv_of(req).req_pool_idx, *take_unread(req))
            for group, req in enumerate(reqs)
            if holds_kv(req) and state_of(req).num_read is not None
        ]
        if behind and self._draft.read_deferred([one.row for one in behind]):
            return
        ledger = self._tables.ledger
        backlogs = [one for one in behind if one.tokens]
        for part in (backlogs[i : i + _AT_ONCE] for i in range(0, len(backlogs), _AT_ONCE)):
            places = [(one.group, one.row, one.start) for one in part]
            groups, rows, starts = on_device(ledger.device, places).unbind(1)
            self._read_committed(rows, starts, [one.tokens for one in part])
            if committed is not None:
                ledger.reenter(rows, committed[groups] - 1, torch.ones_like(rows), 1)

    def _read_committed(
        self, rows: torch.Tensor, starts: torch.Tensor, tokens: list[list[int]]
    ) -> None:
        """Run the draft over tokens from ``starts`` ``[R]`` on, `late_tokens` at a time."""
        # There are more where the host is a round behind.
        ledger = self._tables.ledger
        width = self._draft.late_tokens
        longest = max(map(len, tokens))
        device = ledger.device
        particle_rows = ledger.particle_rows(rows, 1)
        padded = on_device(device, [of + [0] * (longest - len(of)) for of in tokens])  # [R, L]
        lengths = on_device(device, [len(of) for of in tokens])
        for done, some in zip(range(0, longest, width), padded.split(width, 1), strict=True):
            first = starts + done
            slots = ledger.reenter(rows, first, lengths - done, some.shape[1])
            locations = KVLocations(rows, first, particle_rows, max_tail=some.shape[1])
            chains = Chains(some.unsqueeze(1), first.unsqueeze(1), slots.unsqueeze(1), locations)
            with torch.no_grad():
                self._draft.catch_up(chains)

    def begin(
        self,
        batch: ScheduleBatch,
        output: LogitsProcessorOutput,
        draft_logits: torch.Tensor | None,
        budget: Budget | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw first tokens ``[G]`` from logits ``[G, V]`` and start the particles there.

        Returns:
            The tokens, and a `Failure` code ``[G]`` where either model's logits are invalid.
        """
        tables = self._tables
        reqs = batch.reqs
        rows = batch.req_pool_indices
        logits = output.next_token_logits
        assert logits is not None, "there is one pipeline stage alone"
        settings, num_emitted, carried = self._start(reqs, rows, budget)
        rules = TextRules.begin(reqs, logits.shape[1], logits.device)
        edits = self._edits(reqs, settings, num_emitted)
        last, allowed = self._edited(edits, rules, logits)
        greedy = settings.greedy if any(map(is_greedy, reqs)) else None
        filters = settings.filters if any(map(uses_filters, reqs)) else None
        kind = tables.ops.distribution
        p = kind.of(last, settings.temperature, greedy, filters, allowed)
        powered, log_sum = p.to_power(settings.power)
        log_p = powered.log_probs()  # [G, V]
        failure = failure_of_first(log_p, draft_logits)
        tokens, ended = self._draw(reqs, rules, settings, log_p, num_emitted)
        rules.note_first(tokens[:, 0], log_sum)
        log_sum = log_sum.masked_fill(~settings.weighs, 0.0)
        carried[:, -1] += log_sum
        ended |= (failure > 0).unsqueeze(1)
        self._place(rows, tokens, num_emitted, carried, settings, ended)
        self._states.note_first(reqs, log_sum)
        if batch.return_logprob:
            temperature = reported_temperature(reqs, settings.temperature)
            shown = logprob_distribution(kind, last, temperature, allowed)
            tables.particles.logprobs.begin(batch, shown.log_probs(), tokens, output)
        return tokens[:, 0], failure

    def begin_transferred(
        self, batch: ScheduleBatch, first: torch.Tensor, budget: Budget | None
    ) -> None:
        """Start particles after the texts of a decode server's new requests.

        A prefill server has sent the target's KV and last tokens ``first`` ``[G]``, samples of p;
        the draft reads the texts here. Retracted requests begin with their own last token.
        """
        reqs = batch.reqs
        rows = batch.req_pool_indices
        self._read_transferred(batch)
        tokens = [req.output_ids.pop() for req in reqs]  # as in a prefill here
        settings, num_emitted, carried = self._start(reqs, rows, budget)
        TextRules.begin(reqs, self._tables.requests.vocab_size, rows.device)
        for req, token in zip(reqs, tokens, strict=True):
            req.output_ids.append(token)
        ended = torch.zeros_like(first, dtype=torch.bool)
        self._place(rows, first[:, None], num_emitted, carried, settings, ended[:, None])
        if batch.return_logprob:
            self._tables.particles.logprobs.prepare(batch)

    def _read_transferred(self, batch: ScheduleBatch) -> None:
        """Run the draft over the texts ``[0, seq_len)`` of a decode server's new requests."""
        size = get_schedule().chunked_prefill_size
        most = size if size and size > 0 else _LONGEST_CHUNK
        texts = [[*req.origin_input_ids, *req.output_ids] for req in batch.reqs]
        table = batch.req_to_token_pool.req_to_token
        device = batch.device
        part = copy(batch)
        target = cast(ForwardBatch, None)  # heads alone read the target's pass
        part.forward_mode = ForwardMode.EXTEND
        part.spec_info = None
        for spans in chunks(batch.prefix_lens, batch.seq_lens_cpu.tolist(), most):
            which, starts, ends = map(list, zip(*spans, strict=True))
            part.reqs = [batch.reqs[group] for group in which]
            rows = [req.kv.req_pool_idx for req in part.reqs]
            ids = [token for group, start, end in spans for token in texts[group][start:end]]
            slots = [table[row, s:e] for row, s, e in zip(rows, starts, ends, strict=True)]
            part.req_pool_indices_cpu = torch.tensor(rows)
            part.seq_lens_cpu = torch.tensor(ends)
            part.req_pool_indices, part.seq_lens = on_device(device, [rows, ends]).unbind(0)
            part.orig_seq_lens = part.seq_lens
            part.seq_lens_sum = sum(ends)
            part.prefix_lens = starts
            part.extend_num_tokens = len(ids)
            part.extend_lens = [len(found) for found in slots]
            part.extend_logprob_start_lens = [0] * len(which)
            part.input_ids = on_device(device, ids)
            part.out_cache_loc = torch.cat(slots).long()
            self._draft.read_prompts(part, target, None)

    def _start(
        self, reqs: list[Req], rows: torch.Tensor, budget: Budget | None
    ) -> tuple[BatchSettings, torch.Tensor, torch.Tensor]:
        """Start requests on the host and in the tables.

        Returns:
            Their settings, output tokens so far ``[G]``, and counters ``[G, len(Counters)]``.
        """
        tables = self._tables
        device = rows.device
        begun = self._states.begin(reqs, budget)
        least = self._draft.least_temperature
        starts = [start._replace(least_temperature=least) for start in begun]
        tables.requests.write(starts)
        tables.edits.begin(reqs, [start.row for start in starts])
        num_emitted = on_device(device, [start.num_emitted for start in starts])
        carried = on_device(device, [start.counters for start in starts], torch.float64)
        settings = tables.requests.gather(rows)
        if budget is not None:
            sizes = [state_of(req).config_now.round_sizes for req in reqs]
            num_particles, num_steps, is_exact = on_device(device, sizes).unbind(1)
            settings = settings.bounded(num_particles, num_steps, is_exact)
        return settings, num_emitted, carried

    def _place(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_emitted: torch.Tensor,
        carried: torch.Tensor,
        settings: BatchSettings,
        ended: torch.Tensor,
    ) -> None:
        """Write the particles after their first tokens ``[G, 1]`` or ``[G, N]``."""
        self._tables.counters.begin(rows, carried)
        self._tables.particles.begin(
            rows,
            first_tokens=tokens,
            num_emitted=num_emitted + 1,
            log_evidence=carried[:, -1],
            num_particles=settings.num_particles,
            ended=ended,
            fidelity=fidelity_of(carried),
        )

    def _draw(
        self,
        reqs: list[Req],
        rules: TextRules,
        settings: BatchSettings,
        log_p: torch.Tensor,
        num_emitted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw first tokens, and return them and which end their sequence.

        Both are ``[G, 1]`` or, if any first token is open, ``[G, N]``.

        Args:
            log_p: ``[G, V]`` normalised.
            num_emitted: ``[G]`` output tokens before this one.
        """
        num_particles = self._tables.particles.num_particles
        own = self._tables.ops
        places = num_emitted.unsqueeze(1).repeat(1, num_particles)  # [G, N]
        numbers = own.uniforms(settings.seeds, places, Purpose.BONUS)
        row = torch.arange(len(log_p), device=log_p.device)
        shared = sample(log_p, numbers[:, 0], row).unsqueeze(1)
        if not any(map(has_open_token, reqs)):
            return shared, torch.zeros_like(shared, dtype=torch.bool)
        particle = torch.arange(num_particles, device=log_p.device)
        present = particle < settings.num_particles.unsqueeze(1)
        nothing = torch.zeros_like(places)
        same_text = own.same_text(nothing.unsqueeze(2), nothing, present)
        numbers, _ = own.stratify(numbers, same_text)
        row = row.repeat_interleave(num_particles)
        drawn = sample(log_p, numbers.flatten(), row).view_as(numbers)
        is_open = on_device(log_p.device, [[has_open_token(req)] for req in reqs])
        tokens = torch.where(is_open, drawn, shared)
        cells = tokens.unsqueeze(2)  # [G, N, 1]
        positions = num_emitted.view(-1, 1, 1)
        ends = rules.ends(settings.ends(cells, positions), cells, None).squeeze(2)
        return tokens, ends & is_open  # SGLang itself checks a shared token for an end

    def _edits(
        self, reqs: list[Req], settings: BatchSettings, num_emitted: torch.Tensor
    ) -> Edits | None:
        """Return the logit edits of first tokens; None where no request has any."""
        if not any(map(has_edits, reqs)):
            return None
        starts = num_emitted.unsqueeze(1)
        none = torch.zeros_like(starts)  # [G, 1]: all tokens are in the counts
        texts = none.unsqueeze(2)[:, :, :0]
        table = self._tables.edits
        return table.of(reqs, settings.rows, settings, starts=starts, texts=texts, lengths=none)

    def _edited(
        self, edits: Edits | None, rules: TextRules, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return first tokens' edited logits, from ``[G, V]``, and the mask of the requests' rules.

        Both are ``[G, 1, V]``; the mask is None without rules.
        """
        if edits is None and rules.is_empty:
            return logits.unsqueeze(1), None
        rows = logits.clone().unsqueeze(1).unsqueeze(1)  # SGLang may read its own logits again
        nothing = torch.empty(
            len(logits), 1, 0, dtype=torch.int64, device=logits.device
        )  # [G, N, J]
        if edits is not None:
            self._tables.ops.edit_logits(rows, edits, nothing, 0)
        edited, allowed = rules.apply(rows, nothing, 0)
        return edited.squeeze(2), None if allowed is None else allowed.squeeze(2)
