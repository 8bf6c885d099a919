"""Prefill prompts, and start particles after the target's first token."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import cast

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

from sglang_smc.kv.sizes import tensor_bytes
from sglang_smc.kv.transfer import on_device
from sglang_smc.kv.unread import UnreadSlots
from sglang_smc.options.request import OFF, Budget
from sglang_smc.proposers.base import DraftProposer
from sglang_smc.round.batch import Tables
from sglang_smc.round.result import SMCDraftInput, as_eagle
from sglang_smc.rules.registry import TextRules
from sglang_smc.smc.distribution import sample
from sglang_smc.smc.edits import Edits
from sglang_smc.smc.randomness import Purpose
from sglang_smc.smc.settings import BatchSettings
from sglang_smc.state.edits import has_edits
from sglang_smc.state.failures import failure_of_first, mark_first
from sglang_smc.state.logprobs import logprob_distribution, reported_temperature
from sglang_smc.state.metrics import fidelity_of
from sglang_smc.state.request import RequestStates, find_state, state_of
from sglang_smc.state.settings import is_greedy, uses_filters
from sglang_smc.state.texts import has_open_token, skip_draft, skip_prompt, take_unread
from sglang_smc.upstream import holds_kv, kv_of


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


@dataclass(eq=False)
class Prefill:
    """Prefill of prompts with the target and the proposer.

    Attributes:
        unread: marks of slots that the draft has skipped; None where it reads all texts that the
            radix cache gets: a head, which needs states of the target's own pass, or one whose KV
            goes to the host and to files, without marks.
    """

    _target: TpModelWorker
    _draft: DraftProposer
    _states: RequestStates  # starts requests on the host
    _tables: Tables  # state of requests on the device
    _init_from_prompt: Callable[[ScheduleBatch], None]  # the target's, see `ParticleForward`
    unread: UnreadSlots | None
    chunk_size: int = 8192  # tokens that the draft reads in one pass behind the target
    _last: ScheduleBatch | None = None  # whose tokens were skipped: `finish` reads texts by it

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
        skips = self._skips_prompts(batch, budget)
        draft_logits = None
        if not skips:
            draft_logits = self._draft.read_prompts(batch, forward_batch, states)
        if self.unread is not None:
            assert batch.out_cache_loc is not None, "SGLang allocates it for prompts"
            self.unread.mark(batch.out_cache_loc, unread=skips)
        if draws:
            self._init_from_prompt(batch)
            tokens, failure = self.begin(batch, output, draft_logits, budget)
            for req in batch.reqs if skips else ():
                skip_prompt(req)
            result.next_token_ids = mark_first(tokens, failure)
        assert isinstance(result.next_token_ids, torch.Tensor), "the same"
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = as_eagle(SMCDraftInput(result.next_token_ids))
        return result

    @property
    def unread_bytes(self) -> int:
        """Return the bytes of the marks of unread tokens."""
        return 0 if self.unread is None else tensor_bytes(self.unread.marks)

    def _skips_prompts(self, batch: ScheduleBatch, budget: Budget | None) -> bool:
        """Return whether the draft leaves prompts for later, if it is ever to draft after them."""
        if self.unread is None:
            return False
        # The draft cannot go on from a prefix with unread tokens: it reads those first.
        if self.unread.has_some and any(batch.prefix_lens or ()):
            return True
        return all(self._states.sizes_on(req, budget) == OFF for req in batch.reqs)

    def skip_draft(self, batch: ScheduleBatch, reqs: list[Req]) -> None:
        """Leave a round's tokens to a later pass of the draft, over `late_tokens` of a request."""
        self._last = batch
        num_passes = max(state_of(req).num_passes for req in reqs)
        if max(map(skip_draft, reqs)) + num_passes > self._draft.late_tokens:
            self.catch_up(batch, reqs)
            for req in reqs:
                skip_draft(req)

    def catch_up(self, batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
        """Run the draft over the tokens that it has skipped.

        Args:
            batch: any of the server, of whose requests some may be ``reqs``.
        """
        # One that ended as the result before this round was read has given its row back.
        behind = [req for req in reqs if holds_kv(req) and state_of(req).num_read is not None]
        if not behind:
            return
        spans = list(map(take_unread, behind))
        rows = [kv_of(req).req_pool_idx for req in behind]
        if self._draft.read_deferred(rows):
            return
        starts = [start for start, _ in spans]
        if self.unread is not None and min(starts) == 0:
            prompts = [len(req.origin_input_ids) for req in behind]
            found = self.unread.firsts(rows, prompts)
            starts = list(map(max, starts, found))
        self._read_texts(batch, behind, starts, [end for _, end in spans])

    def is_behind(self, req: Req) -> bool:
        """Return whether `finish` has anything to do."""
        state = find_state(req)
        if state is None:
            return False
        # Slots without a mark to be may have the mark of a text before.
        has_marks = self.unread is not None and self.unread.has_some
        return state.num_read is not None or has_marks

    def finish(self, req: Req) -> None:
        """Mark a finished sequence for the radix cache, or have the draft read the rest of it."""
        if self.unread is None:
            assert self._last is not None, "a round was played"
            self.catch_up(self._last, [req])
            return
        num_read = state_of(req).num_read
        kv = kv_of(req)
        row = kv.req_pool_idx
        assert row is not None, "it gives its row back after this"
        start = kv.cache_protected_len  # marked as the prompt was read
        end = kv.kv_committed_len
        place = end if num_read is None else min(max(num_read, start), end)
        self.unread.mark_row(row, start, place, unread=False)
        self.unread.mark_row(row, place, end, unread=True)

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
        self._read_texts(batch, reqs, batch.prefix_lens, batch.seq_lens_cpu.tolist())
        tokens = [req.output_ids.pop() for req in reqs]  # as in a prefill here
        settings, num_emitted, carried = self._start(reqs, rows, budget)
        TextRules.begin(reqs, self._tables.requests.vocab_size, rows.device)
        for req, token in zip(reqs, tokens, strict=True):
            req.output_ids.append(token)
        ended = torch.zeros_like(first, dtype=torch.bool)
        self._place(rows, first[:, None], num_emitted, carried, settings, ended[:, None])
        if batch.return_logprob:
            self._tables.particles.logprobs.prepare(batch)

    def _read_texts(
        self, batch: ScheduleBatch, reqs: Sequence[Req], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Run the draft over the tokens ``[start, end)`` of requests; their rows have the slots.

        Args:
            batch: gives what of a batch does not depend on its requests.
        """
        texts = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
        table = self._tables.ledger.table
        device = table.device
        part = copy(batch)
        target = cast(ForwardBatch, None)  # heads alone read the target's pass
        part.forward_mode = ForwardMode.EXTEND
        part.spec_info = None
        for spans in chunks(starts, ends, self.chunk_size):
            which, firsts, lasts = map(list, zip(*spans, strict=True))
            part.reqs = [reqs[group] for group in which]
            rows = [kv_of(req).req_pool_idx for req in part.reqs]
            ids = [token for group, start, end in spans for token in texts[group][start:end]]
            slots = [table[row, s:e] for row, s, e in zip(rows, firsts, lasts, strict=True)]
            part.req_pool_indices_cpu = torch.tensor(rows)
            part.seq_lens_cpu = torch.tensor(lasts)
            part.req_pool_indices, part.seq_lens = on_device(device, [rows, lasts]).unbind(0)
            part.orig_seq_lens = part.seq_lens
            part.seq_lens_sum = sum(lasts)
            part.prefix_lens = firsts
            part.extend_num_tokens = len(ids)
            part.extend_lens = [len(found) for found in slots]
            part.extend_logprob_start_lens = [0] * len(which)
            part.input_ids = on_device(device, ids)
            part.out_cache_loc = torch.cat(slots).long()
            part.multimodal_inputs = [None] * len(which)
            self._draft.read_prompts(part, target, None)
            if self.unread is not None:
                self.unread.mark(part.out_cache_loc, unread=False)

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
