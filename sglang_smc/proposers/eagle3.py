"""Draft with EAGLE heads and MTP layers, over particles on SGLang's classes.

A head reads pairs: a token x_i, and the target's hidden state at the token before it, that of some
layers (EAGLE-3, arXiv 2503.01840) or of the last one (EAGLE, arXiv 2401.15077, and multi-token
prediction, arXiv 2412.19437, section 2.2). A pair gives the distribution of x_{i+1}. Within a round
a head takes its own output in place of the hidden state, until the target has scored the draft
tokens. So each draft token is run twice: on the head's own state while the round drafts, and on the
target's hidden state right after the target's pass. The second run overwrites the keys of the
first, and later rounds attend to it.

SGLang stores the key of a pair at the position of its hidden state, one before its token. Here it
is stored in the slot of its token: two particles with the same prefix and different last tokens
have different slots there, and a cached prefix is valid for any continuation. The first token of a
sequence has no hidden state before it and therefore no key, and attention skips its position.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_smc.drafts.heads.eagle import EAGLE
from sglang_smc.drafts.heads.eagle3 import EAGLE3_LAYERS, EAGLE3_STATES, EXTRAS, LATENT_EAGLE3
from sglang_smc.kv.transfer import on_device
from sglang_smc.models.attention import KeysWritten
from sglang_smc.models.chains import Chains, MergedRows
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.head_kinds import architecture_of, is_tied, num_mtp
from sglang_smc.models.head_parts import is_set, require_set
from sglang_smc.proposers.base import DraftContext, DraftProposer, DraftSlots, to_full_vocabulary
from sglang_smc.proposers.hidden_states import ReadTarget, StateTable
from sglang_smc.proposers.prompt_attention import PromptAttention
from sglang_smc.smc.ledger import KVLocations, Ledger

logger = logging.getLogger(__name__)

_EMBEDDING = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class EagleForward(ParticleForward):
    """An EAGLE head over particles; arguments as in `ParticleForward`."""

    _first_key = 1
    _captured = CaptureHiddenMode.FULL
    _states: torch.Tensor  # [rows, F] of the target, or [rows, H] of the head itself, of a pass

    def pair_logits(
        self, chains: Chains, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pair for each particle.

        Args:
            chains: of one token each.
            states: ``[G, N, F]`` or ``[G, N, H]`` hidden states before them.

        Returns:
            Logits ``[G, N, draft vocabulary]``, and the head's own states ``[G, N, H]``.
        """
        self._states = states.flatten(0, 1)
        output = self._run(ForwardMode.DECODE, chains)
        shape = chains.starts.shape
        own = output.hidden_states.unflatten(0, shape)
        return output.next_token_logits.unflatten(0, shape), own

    def read(self, chains: Chains, states: torch.Tensor) -> None:
        """Run C pairs for each particle, to write their keys alone.

        Args:
            chains: of C tokens each.
            states: ``[G, N, C, F]`` hidden states before them.
        """
        self._states = states.flatten(0, 2)
        self.write_keys(chains)

    def read_batch(self, batch: ForwardBatch) -> None:
        """Run the layers over a batch of pairs, to write their keys alone."""
        self._runner.model.forward(batch.input_ids, batch.positions, batch)

    def prompt_batch(self, target: ForwardBatch, states: torch.Tensor) -> ForwardBatch:
        """Return the pairs of new tokens of prompts and the states ``[T, F]`` before them."""
        pairs = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(target.seq_lens),
            input_ids=target.input_ids,
            req_pool_indices=target.req_pool_indices,
            seq_lens=target.seq_lens,
            out_cache_loc=target.out_cache_loc,
            seq_lens_sum=0,
            positions=target.positions,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        return self._with_states(pairs, states)

    def _batch(
        self, mode: ForwardMode, chains: Chains, merged: MergedRows | None = None
    ) -> ForwardBatch:
        states = self._states if merged is None else self._states[merged.kept]
        return self._with_states(super()._batch(mode, chains, merged), states)

    def _with_states(self, batch: ForwardBatch, states: torch.Tensor) -> ForwardBatch:
        batch.positions = (batch.positions - 1).clamp_min(0)  # where heads are trained on pairs
        if self._is_mrope:
            batch.mrope_positions = batch.positions.expand(3, -1)
        # What SGLang's heads read.
        batch.spec_info = SimpleNamespace(hidden_states=states)  # pyright: ignore[reportAttributeAccessIssue] -- as above
        return batch

    @cached_property
    def prompt_attention(self) -> PromptAttention:
        return PromptAttention(self._runner, first_key=self._first_key, keys_alone=True)


class EagleHead(DraftProposer):
    """A draft by an EAGLE head, with chains that are sampled token by token.

    ``hot`` and ``vocab_size`` are as in `to_full_vocabulary`.
    """

    runs_model = wants_states = True
    least_temperature = 0.8
    needs = ("get_embed_and_head",)

    may_embed = True
    """Whether an embedding of its checkpoint stays that is not the target's."""

    def __init__(
        self,
        forward: EagleForward,
        table: StateTable,
        hot: torch.Tensor | None,
        vocab_size: int,
        *,
        target: ReadTarget,
        ledger: Ledger,
        num_particles: int,
    ) -> None:
        self._forward = forward
        self._table = table
        self._target = target
        self._hot = hot
        self._vocab_size = vocab_size
        self._ledger = ledger
        self._num_particles = num_particles
        self.attn_backend = forward.attn_backend
        self._own: torch.Tensor  # [G, N, H] states of the running round

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
        """Yield settings that SGLang's class would read otherwise."""
        told = config.hf_config.to_dict()
        if architecture_of(config) == EAGLE[0] and told.get("bias"):
            yield (
                "has bias in its config.json, of which SGLang makes biases of attention. Remove it."
            )
        elif is_tied(config) and not is_tied(target):
            yield "ties its LM head to its embedding (tie_word_embeddings), and the target has two"

    @classmethod
    def connect(cls, target: TpModelWorker, draft: TpModelWorker) -> torch.nn.Module | None:
        """Share the target's embedding, if it fits, and the LM head that the head lacks."""
        head: Any = draft.model_runner.model
        config = draft.model_runner.model_config
        cls._share(target, head, config)
        if cls._unset_bias(config):
            torch.nn.init.zeros_(head.model.fc.bias)
        require_set(head)
        has_own = not cls._lacks_lm_head(head) and head.lm_head is not head.model.embed_tokens
        return head.lm_head if has_own else None

    @classmethod
    def _share(cls, target: TpModelWorker, head: Any, config: ModelConfig) -> None:
        model: Any = target.model_runner.model
        of_target = dict(zip((_EMBEDDING, _LM_HEAD), model.get_embed_and_head(), strict=True))
        known = of_target[_EMBEDDING]
        own = head.model.embed_tokens.weight
        fits = config.hidden_size == target.model_runner.model_config.hidden_size
        shares = {_EMBEDDING: fits, _LM_HEAD: cls._lacks_lm_head(head)}
        if cls.may_embed and fits and is_set(own):
            shares[_EMBEDDING] = torch.equal(own, known)
            if not shares[_EMBEDDING]:
                logger.info("The head keeps its own embedding, which is not the target's.")
        # The classes' own `set_embed_and_head` wait for a CUDA device.
        if shares[_EMBEDDING]:
            head.model.embed_tokens.weight = known
        if shares[_LM_HEAD]:
            head.lm_head.weight = of_target[_LM_HEAD]
        kept = cls._replaced_tensors(head, known.device)
        shared = tuple(name for name, is_shared in shares.items() if is_shared)
        head.load_weights = partial(load_own, head.load_weights, shared, kept)

    @classmethod
    def _lacks_lm_head(cls, head: Any) -> bool:
        """Return whether a head's LM head is the target's."""
        return True

    @classmethod
    def _unset_bias(cls, config: ModelConfig) -> bool:
        """Return whether the bias of fc is random in SGLang's class, where none is loaded."""
        return config.hf_config.to_dict().get("bias") is False

    @classmethod
    def _replaced_tensors(cls, head: Any, device: torch.device) -> list[tuple[Any, str]]:
        """Return owners and names of tensors that the class replaces as it loads new weights."""
        if not hasattr(head.model, "midlayer"):
            return []
        # Over latents: parts of a projection, split as it loads.
        return [(head.model.midlayer.self_attn, name) for name in ("w_kc", "w_vc")]

    @classmethod
    def num_states(cls, config: ModelConfig) -> int:
        """Return of how many of the target's layers it reads states."""
        return 1

    @classmethod
    def hot_tokens(cls, head: Any) -> torch.Tensor | None:
        """Return the ids ``[H]`` of the only tokens that a head drafts; None for all."""
        return None

    @classmethod
    def build(cls, context: DraftContext) -> "EagleHead":
        runner = context.runner
        of_target = context.target.model_runner
        tails = context.ledger.tails
        passes: Any = context.passes
        forward = EagleForward(runner, tails, context.kernels, context.num_columns + 2)
        context.fuse(forward)
        width = cls.num_states(runner.model_config) * of_target.model_config.hidden_size
        sizes = {"num_columns": context.num_columns, "width": width}
        return cls(
            forward,
            StateTable.of(context.ledger, dtype=of_target.dtype, **sizes),
            cls.hot_tokens(runner.model),
            context.vocab_size,
            target=passes,
            ledger=context.ledger,
            num_particles=context.num_particles,
        )

    @property
    def state_bytes(self) -> int:
        return self._table.num_bytes

    @property
    def late_tokens(self) -> int:
        """Return K + 1: it keeps as many of the target's hidden states."""
        return self._table.num_columns

    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Run the last token with the target's state; see `DraftProposer.first_logits`."""
        states = self._table.before(at.positions[1], at.locations.particle_rows)
        return self._logits(at.chains(last_two[:, :, 1:], 1), states)

    def next_logits(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Run draft tokens with the head's own states; see `DraftProposer.next_logits`."""
        return self._logits(at.chains(tokens.unsqueeze(2), step + 1), self._own)

    def read_without_logits(self, last_two: torch.Tensor, at: DraftSlots) -> None:
        """Write the last token's key; see `DraftProposer.read_without_logits`."""
        states = self._table.before(at.positions[1], at.locations.particle_rows)
        self._forward.read(at.chains(last_two[:, :, 1:], 1), states.unsqueeze(2))

    def read_deferred(self, rows: Sequence[int | None]) -> bool:
        """Write the keys of rounds without drafts; see `DraftProposer.read_deferred`."""
        on = on_device(self._ledger.device, rows)
        self._forward.read(*self._table.take_unread(on, self._ledger))
        return True

    def _logits(self, chains: Chains, states: torch.Tensor) -> torch.Tensor:
        logits, self._own = self._forward.pair_logits(chains, states)
        return to_full_vocabulary(logits, self._hot, self._vocab_size)

    def read_chains(self, chains: Chains, states: torch.Tensor) -> None:
        """Run the head over chains but their first pair; see `StatesReader.read_chains`."""
        tokens = chains.tokens
        if tokens[0].numel() == 1:  # read later
            self._table.keep_single(chains, states.flatten(0, 2))
            return
        if tokens.shape[2] > 1:
            later = Chains(
                tokens[:, :, 1:], chains.starts + 1, chains.slots[:, :, 1:], chains.locations
            )
            self._forward.read(later, states[:, :, :-1])
        self._table.keep(chains.slots, chains.locations.particle_rows, states)

    def read_prompts(
        self, batch: ScheduleBatch, target: ForwardBatch, states: torch.Tensor | None
    ) -> None:
        """Run over pairs of each new token and the state before; see `DraftProposer.read_prompts`.

        Where the prefix of a prompt is cached, or was processed in an earlier chunk, the target
        runs its last token again to recover that hidden state. One with linear attention cannot,
        and has no cache beside it: the earlier chunk has left the state in the table.
        """
        assert states is not None and batch.extend_lens is not None
        ends = on_device(states.device, batch.extend_lens).cumsum(0)  # [G]
        pairs = self._forward.prompt_batch(target, self._states_before(batch, states, ends))
        # Tokens of an image have ids of its content, beyond any vocabulary.
        pairs.input_ids = pairs.input_ids.clamp_max(self._vocab_size - 1)
        attention = self._forward.prompt_attention
        attention.plan(batch)
        context = forward_context(ForwardContext(attn_backend=attention))
        with suppress(KeysWritten), context, torch.no_grad():
            self._forward.read_batch(pairs)
        rows = batch.req_pool_indices
        last = ends - 1
        self._table.unread.index_fill_(0, rows, 0)
        self._table.keep_prompts(
            target.out_cache_loc[last].long(),
            target.seq_lens.long(),
            self._ledger.particle_rows(rows, self._num_particles),
            states[last],
        )

    def _states_before(
        self, batch: ScheduleBatch, states: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden state before each new token, ``[T, F]``.

        It is arbitrary before the first token of a sequence.
        """
        before = states.roll(1, 0)
        known = batch.prefix_lens
        assert known is not None
        going_on = [i for i, length in enumerate(known) if length]
        if not going_on:
            return before
        device = states.device
        lengths = on_device(device, [known[i] for i in going_on])  # [R]
        reqs = [batch.reqs[i] for i in going_on]
        last = [_token_of(req, known[i] - 1) for i, req in zip(going_on, reqs, strict=True)]
        tokens = on_device(device, last).clamp_max(self._vocab_size - 1)
        which = on_device(device, going_on)
        rows = batch.req_pool_indices[which]
        particles = self._ledger.particle_rows(rows, 1)
        if self._target.runs_again:
            locations = KVLocations(rows, lengths, particles, max_tail=1)
            found = self._target.states_at(tokens, lengths - 1, locations, reqs)
        else:
            found = self._table.before(lengths.unsqueeze(1), particles).squeeze(1)
        first = torch.nn.functional.pad(ends, (1, 0))[which]
        return before.index_copy(0, first, found)


class Eagle3Head(EagleHead):
    """An EAGLE-3 head, which reads states of several layers, and may draft some tokens alone."""

    captures_by = "set_eagle3_layers_to_capture"

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
        """Yield what SGLang's class has no part for."""
        told = config.hf_config.to_dict() | _eagle_config(config)
        extras = {name: told.get(name) for name in EXTRAS}
        extras["parallel_draft_step"] = (told.get("parallel_draft_step") or 1) > 1
        extras["next_layer_regular"] = extras["next_layer_regular"] and config.num_hidden_layers > 1
        latent = architecture_of(config) == LATENT_EAGLE3
        extras["norm_before_fc"] = latent and told.get("norm_before_fc")
        extras["norm_before_residual"] = latent and told.get("norm_before_residual")
        for name in (name for name, value in extras.items() if value):
            yield f"is an EAGLE-3 head with {EXTRAS[name]} ({name})"
        yield from _window_problems(told, latent)
        reads = cls.num_states(config)
        width = config.hidden_size
        if told.get("use_aux_hidden_state") is False:
            what = "reads the last layer alone (use_aux_hidden_state is False)"
            yield f"is an EAGLE-3 head that {what}"
        elif EAGLE3_LAYERS in told and EAGLE3_LAYERS not in _eagle_config(config):
            yield f"has {EAGLE3_LAYERS} outside of eagle_config, where SGLang does not look for it"
        elif told.get("num_aux_hidden_states") not in (None, reads):
            count = told["num_aux_hidden_states"]
            yield f"has num_aux_hidden_states {count} and reads the states of {reads} layers"
        elif reads * target.hidden_size == width:
            yield f"reads states of its own width, {width}, to which SGLang's class applies no fc"
        if "draft_vocab_size" not in told and not latent:
            yield "has no draft_vocab_size in its config.json, which SGLang's class asks for"
        elif told.get("draft_vocab_size") is None and width != target.hidden_size:
            yield f"has width {width} without an LM head, and the target's has {target.hidden_size}"

    @classmethod
    def captured_layers(cls, config: ModelConfig, num_layers: int) -> list[int] | None:
        return _eagle_config(config).get(EAGLE3_LAYERS)

    @classmethod
    def num_states(cls, config: ModelConfig) -> int:
        return len(cls.captured_layers(config, 0) or ()) or EAGLE3_STATES

    @classmethod
    def hot_tokens(cls, head: Any) -> torch.Tensor | None:
        return head.hot_token_id

    @classmethod
    def _lacks_lm_head(cls, head: Any) -> bool:
        return head.load_lm_head_from_target

    @classmethod
    def _unset_bias(cls, config: ModelConfig) -> bool:
        return False

    @classmethod
    def _replaced_tensors(cls, head: Any, device: torch.device) -> list[tuple[Any, str]]:
        found = super()._replaced_tensors(head, device)
        if head.hot_token_id is None:
            return found
        head.hot_token_id = head.hot_token_id.to(device)
        return [(head, "hot_token_id"), *found]


class MTPHead(EagleHead):
    """An MTP layer, whose embedding and LM head are the target's."""

    may_embed = False

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
        """Yield numbers of layers other than one."""
        if 1 not in (counts := num_mtp(config.hf_config)):
            count = next((count for count in counts if count is not None), "no number of")
            yield f"has {count} MTP layers (num_nextn_predict_layers), and one alone drafts"

    @classmethod
    def _unset_bias(cls, config: ModelConfig) -> bool:
        return False


def _window_problems(told: dict[str, Any], latent: bool) -> Iterator[str]:
    """Yield what of a head's `layer_types` is neither full attention nor a window that it can have.

    Args:
        told: its configuration.
        latent: whether it attends to latents (MLA).
    """
    types = {*(told.get("layer_types") or ())} - {"full_attention"}
    window = told.get("sliding_window")
    if others := types - {"sliding_attention"}:
        yield f"is an EAGLE-3 head with {', '.join(sorted(others))} (layer_types)"
    elif types and latent:
        yield "is an EAGLE-3 head with windows over latents (layer_types)"
    elif types and not (isinstance(window, int) and window > 0):
        yield (
            f"has sliding_window {window!r}, and layer_types with sliding_attention, which takes a "
            "whole number above 0"
        )


def _eagle_config(config: ModelConfig) -> dict[str, Any]:
    return config.hf_config.to_dict().get("eagle_config") or {}


def load_own(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], None],
    shared: tuple[str, ...],
    kept: Iterable[tuple[Any, str]],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Load new weights into a running head in place, except those that it shares with the target.

    Args:
        load: the class's own method.
        shared: suffixes of the names of shared weights.
        kept: objects and names of tensors that the class replaces, and captured rounds read.
    """
    before = [getattr(owner, name) for owner, name in kept]
    load((name, weight) for name, weight in weights if not name.endswith(shared))
    for (owner, name), tensor in zip(kept, before, strict=True):
        tensor.copy_(getattr(owner, name))
        setattr(owner, name, tensor)


def _token_of(req: Req, position: int) -> int:
    """Return the token at a position of a request's sequence."""
    prompt = req.origin_input_ids
    return prompt[position] if position < len(prompt) else req.output_ids[position - len(prompt)]
