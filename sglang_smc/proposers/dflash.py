"""Draft with block heads (DFlash, arXiv 2602.06036), run over particles on SGLang's model class.

One pass returns the distributions of all K draft tokens: the block is the last token and K masks,
which attend to the text before them and to each other, in both directions. So q is a product of
marginals, from which each particle samples its own chain, unless a subclass conditions each token
on those before it. A block's first row, that of the last token, may draft as well. For the text
before the block, the head's keys and values are computed from the target's hidden states, and
written to the slots of their tokens right after the target's pass.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc import upstream
from sglang_smc.drafts import checkpoint
from sglang_smc.drafts.heads.base import is_reduced
from sglang_smc.drafts.heads.dflash import BLOCK_SIZE, EXTRAS, OWN_LM_HEAD
from sglang_smc.models.attention import Implementation, store
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.head_parts import for_class, require_set
from sglang_smc.proposers.base import DraftContext, DraftProposer, DraftSlots, to_full_vocabulary


class BlockForward(ParticleForward):
    """A block head over particles, with the embedding of SGLang's ``target``.

    Args:
        lm_head: of the head itself; None: the target's.
        mask: ``[H]`` embedding of masks; None: the target's of the mask's token.
    """

    _blocks = True

    def __init__(
        self,
        runner: ModelRunner,
        tails: torch.Tensor,
        attention: Implementation,
        max_columns: int,
        target: Any,
        lm_head: Any = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        super().__init__(runner, tails, attention, max_columns)
        self._model: Any = runner.model
        self._target = target
        self._lm_head = lm_head
        self._mask = mask
        self._embed = upstream.without_lora(target.get_input_embeddings())
        # Some models scale embeddings outside of the embedding table.
        self._scale = getattr(target, "get_dflash_noise_embedding_scale", lambda: 1.0)()
        if runner.device == "cpu":  # SGLang's fused form, for 16 bits, is a Triton kernel
            for layer in self._model.layers:
                layer.self_attn.use_table_qk_norm_rope = False

    def block_logits(self, blocks: Chains, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Run blocks.

        Returns:
            Of K of their ``rows`` the logits ``[K, G, N, V]``, and the last layer's output ``[K, G,
            N, H]``, of which they are made.
        """
        batch = self._batch(ForwardMode.TARGET_VERIFY, blocks)
        embedded = self._embed(batch.input_ids)
        if self._mask is not None:
            embedded.unflatten(0, blocks.tokens.shape)[:, :, 1:] = self._mask
        embedded = embedded * self._scale
        with self._attending(blocks):
            output = self._model.forward(
                batch.input_ids, batch.positions, batch, input_embeds=embedded
            )
        masked = output.hidden_states.unflatten(0, blocks.tokens.shape)[:, :, rows]
        steps = masked.permute(2, 0, 1, 3)  # [K, G, N, H]: each step contiguous
        logits = self._logits(steps.flatten(0, 2), batch).unflatten(0, steps.shape[:3])
        return logits, steps

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the target's embeddings ``[..., H]`` of tokens, as they are in its table."""
        return self._embed(tokens.flatten()).unflatten(0, tokens.shape)

    def _logits(self, states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Map the last layer's output ``[R, H]`` to logits ``[R, V]``, or of the draft's tokens."""
        target = self._target
        ids = batch.input_ids
        own = self._lm_head
        lm_head = upstream.without_lora(target.lm_head) if own is None else own
        logits = target.logits_processor(ids, states, lm_head, batch).next_token_logits
        return logits if own is None else logits[:, : own.org_vocab_size]  # rows are padded

    def write(
        self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Write the keys and values computed from the target's hidden states.

        Args:
            states: ``[R, F]`` hidden states of the target.
            positions, slots: ``[R]`` positions of their tokens, and destination KV slots.

        Returns:
            The states as all layers read them, ``[R, H]``.
        """
        model = self._model
        pool = self.attn_backend.token_to_kv_pool
        context = model.project_target_hidden(states)
        positions = positions.clamp_max(self._last_position)
        for layer in model.layers:
            attention = layer.self_attn
            shown = model.prepare_context_hidden_for_kv(layer, context)
            keys, values = attention.kv_proj_only(shown)
            keys = attention.apply_k_rope(positions, attention.apply_k_norm(keys))
            heads = -1, attention.num_kv_heads, attention.head_dim
            store(pool, attention.attn, slots, keys.view(heads), values.view(heads))
        return context


class BlockHead(DraftProposer):
    """A draft by a block head with a mask token: one pass for the distributions of all K tokens.

    Args:
        first: row of a block that drafts its first token.
        hot, vocab_size: as in `to_full_vocabulary`.
    """

    runs_model = wants_states = is_block = True
    needs = ("get_input_embeddings", "logits_processor", "lm_head")
    captures_by = "set_dflash_layers_to_capture"

    from_anchor = False
    """Whether the first row drafts where the configuration does not say."""

    projector: str | None = None
    """What `projector_type` may name."""

    shown = "DFlash"
    """What heads of its kind are called."""

    releases = upstream.EVERY
    """The releases of SGLang that have a class for it."""

    num_unread = 0
    """Masks of a block behind the last row that drafts."""

    has_parts: tuple[str, ...] = ()
    """Settings that SGLang's class has parts for, where that of DFlash has none."""

    forward_class = BlockForward

    def __init__(
        self,
        forward: BlockForward,
        mask: int,
        *,
        first: int = 1,
        hot: torch.Tensor | None = None,
        vocab_size: int = 0,
    ) -> None:
        self.attn_backend = forward.attn_backend
        self._forward = forward
        self._mask = mask
        self._first = first
        self._hot = hot
        self._vocab_size = vocab_size
        self._steps: torch.Tensor  # [K, G, N, V] logits of the running round
        self._states: torch.Tensor  # [K, G, N, H] of which they are made

    @classmethod
    def first_row(cls, config: ModelConfig) -> int:
        """Return the row of a block that drafts its first token; row 0 is the last token's."""
        return 1 - bool(config.hf_config.to_dict().get("sample_from_anchor", cls.from_anchor))

    @classmethod
    def most_steps(cls, config: ModelConfig, block: int) -> int:
        """Return the most tokens that a block of so many rows drafts."""
        return block - cls.first_row(config)

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterator[str]:
        """Yield what SGLang's class has no part for, and blocks that are too short."""
        if not cls.releases.is_installed:
            yield f"is a {cls.shown} head, for which SGLang has a class in {cls.releases.name}"
            return
        try:
            parsed = _parsed(config)
        except ValueError:  # told as `captured_layers` reads it
            return
        whole = config.hf_config.to_dict()
        given = whole.get("dflash_config") or {}  # the oldest release does not parse extras
        lacking = [name for name in EXTRAS if name not in cls.has_parts]
        extras = {name: given.get(name) or vars(parsed).get(name) for name in lacking}
        if "output_multiplier" in extras:
            extras["output_multiplier"] = extras["output_multiplier"] not in (None, 1.0)
        extras["projector_type"] = extras["projector_type"] not in (None, cls.projector)
        for name in (name for name, value in extras.items() if value):
            yield f"is a block head with {EXTRAS[name]} ({name})"
        block = parsed.resolve_block_size(default=BLOCK_SIZE)
        windowed = "sliding_attention" in (whole.get("layer_types") or ())
        window = (whole.get("sliding_window") if windowed else None) or block
        if whole.get("is_causal") is False and window < block:
            yield f"has windows of {window} tokens (sliding_window), less than a block of {block}"
        yield from _mask_problems(config)
        if parsed.mask_token_id is None:
            yield "has no mask_token_id in dflash_config"
        elif parsed.mask_token_id >= target.vocab_size:
            yield (
                f"has mask_token_id {parsed.mask_token_id}, and the target has an embedding for "
                f"ids below {target.vocab_size}"
            )
        most = cls.most_steps(config, block)
        if num_steps > most:
            yield (
                f"drafts blocks of {most} tokens, and --speculative-num-steps is {num_steps}; "
                f"allowed: at most {most}. Leave it out, or pass {most} or less."
            )

    @classmethod
    def captured_layers(cls, config: ModelConfig, num_layers: int) -> list[int]:
        return _parsed(config).resolve_target_layer_ids(
            target_num_layers=num_layers, draft_num_layers=config.num_hidden_layers
        )

    @classmethod
    def connect(cls, target: TpModelWorker, draft: TpModelWorker) -> None:
        """Read the target's ids of the tokens that a head drafts, into its `hot_token_id`."""
        runner = draft.model_runner
        config = runner.model_config
        head: Any = runner.model
        head.hot_token_id = _hot_tokens(config, runner.device)
        head.trained_mask = _trained_mask(config, runner.device, runner.dtype)
        load = head.load_weights
        hot = head.hot_token_id
        head.load_weights = lambda new: load_hot(load, hot, for_class(head, new))
        require_set(head)

    @classmethod
    def build(cls, context: DraftContext) -> "BlockHead":
        runner = context.runner
        config = runner.model_config
        model: Any = runner.model
        has_own = bool(config.hf_config.to_dict().get(OWN_LM_HEAD))
        forward = cls.forward_class(
            runner,
            context.ledger.tails,
            context.kernels,
            context.num_columns,
            context.target.model_runner.model,
            model.own_lm_head if has_own else None,
            model.trained_mask,
        )
        context.fuse(forward)
        return cls(
            forward,
            mask_token(config),
            first=cls.first_row(config),
            **cls._parts(context),
            hot=model.hot_token_id,
            vocab_size=context.vocab_size,
        )

    @classmethod
    def _parts(cls, context: DraftContext) -> dict[str, Any]:
        """Return what else `__init__` takes."""
        return {}

    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Run the one pass of a round; see `DraftProposer.first_logits`."""
        last = last_two[:, :, 1:]
        num_steps = len(at.slots) - 2
        num_masks = num_steps - 1 + self._first + self.num_unread
        masks = torch.full_like(last, self._mask).expand(-1, -1, num_masks)
        blocks = at.chains(torch.cat([last, masks], dim=2), 1)
        self._steps, self._states = self._forward.block_logits(
            blocks, slice(self._first, self._first + num_steps)
        )
        self._begin()
        return self.next_logits(0, last_two[:, :, 1], at)

    def next_logits(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Return logits after a token; see `DraftProposer.next_logits`."""
        logits = self._logits_after(step, tokens)
        if self._hot is None:
            return logits
        return to_full_vocabulary(logits, self._hot, self._vocab_size)

    def _begin(self) -> None:
        """Prepare what the steps of a round need, once its block has been run."""
        return None

    def _logits_after(self, step: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return a row's logits ``[G, N, V]``, of the draft's tokens, after the tokens before."""
        return self._steps[step]

    def read_chains(self, chains: Chains, states: torch.Tensor) -> None:
        """Write keys and values of the target's states; see `StatesReader.read_chains`."""
        column = torch.arange(chains.tokens.shape[2], device=chains.tokens.device)
        positions = chains.starts.unsqueeze(2) + column
        read = self._forward.write(
            states.flatten(0, 2), positions.flatten(), chains.slots.flatten()
        )
        self._keep_chains(chains, read)

    def read_prompts(
        self, batch: ScheduleBatch, target: ForwardBatch, states: torch.Tensor | None
    ) -> None:
        """Write keys and values, without a pass; see `DraftProposer.read_prompts`."""
        assert states is not None
        read = self._forward.write(states, target.positions, target.out_cache_loc)
        self._keep_prompts(batch, target, read)

    def _keep_chains(self, chains: Chains, states: torch.Tensor) -> None:
        """Keep what the next round needs of the states ``[G * N * C, H]`` of chains."""
        return None

    def _keep_prompts(
        self, batch: ScheduleBatch, target: ForwardBatch, states: torch.Tensor
    ) -> None:
        """Keep what the first round needs of the states ``[T, H]`` of prompts."""
        return None


def among(candidates: torch.Tensor, scores: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return logits ``[G, N, V]``, as ``like``, of candidates alone; others get -inf.

    Args:
        candidates: ``[G, N, c]`` int64 ids.
        scores: ``[G, N, c]`` their logits.
    """
    nowhere = torch.full_like(like, -torch.inf)
    return nowhere.scatter_(2, candidates, scores.to(like.dtype))


def _hot_tokens(config: ModelConfig, device: str) -> torch.Tensor | None:
    """Return the target's ids ``[H]`` of the tokens that a head drafts; None for all.

    Raises ValueError for a checkpoint that lacks the ids.
    """
    folder = _folder_of(config)
    if not is_reduced(config.hf_config.to_dict()):
        return None
    shifts = None if folder is None else checkpoint.tensor_in(folder, "d2t")
    if shifts is None:
        raise ValueError(
            f"--speculative-draft-model-path {config.model_path} drafts a part of the "
            "vocabulary, and its d2t cannot be read; allowed: a folder, or a name of Hugging "
            "Face. Download the checkpoint."
        )
    return (shifts.long() + torch.arange(len(shifts))).to(device)


def _folder_of(config: ModelConfig) -> Path | None:
    with suppress(OSError, ValueError):  # it is loaded from elsewhere than a folder
        return checkpoint.folder_of(config.model_path, config.revision)
    return None


def _saved_mask(config: ModelConfig) -> Any:
    """Return what a checkpoint has of its mask beside the weights; None if it has nothing."""
    folder = _folder_of(config)
    return None if folder is None else checkpoint.mask_in(folder)


def _mask_problems(config: ModelConfig) -> Iterator[str]:
    """Yield what of a trained mask does not fit, as phrases that follow the checkpoint's path."""
    name = checkpoint.MASK
    try:
        saved = _saved_mask(config)
    except ValueError as error:
        yield f"has a {name} that is broken: {error}"
        return
    if saved is None:
        return
    if not isinstance(saved, dict) or not {"embedding", "mask_token_id"} <= saved.keys():
        yield f"has a {name} without embedding or mask_token_id"
        return
    if saved.get("per_position"):
        yield f"has a {name} of one embedding for each position"
        return
    token = mask_token(config)
    width = saved["embedding"].numel()
    if saved["mask_token_id"] != token:
        yield f"has a {name} for token {saved['mask_token_id']}, and mask_token_id is {token}"
    if width != config.hidden_size:
        yield f"has a {name} of {width} numbers, and a width of {config.hidden_size}"


def _trained_mask(config: ModelConfig, device: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the embedding ``[H]`` of masks that a checkpoint has beside its weights, if any.

    SGLang writes it into the target's table; here the target stays as it is.
    """
    saved = _saved_mask(config)
    return None if saved is None else saved["embedding"].flatten().to(device, dtype)


def load_hot(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], None],
    hot: torch.Tensor | None,
    weights: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Load new weights into a running block head, its ``hot`` token ids ``[H]`` in place."""

    def others() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            if hot is not None and name.endswith("d2t"):
                hot.copy_(weight.long() + torch.arange(len(weight), device=weight.device))
            else:
                yield name, weight

    load(others())


def mask_token(config: ModelConfig) -> int:
    return _parsed(config).mask_token_id


def _parsed(config: ModelConfig) -> Any:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    return parse_dflash_draft_config(draft_hf_config=config.hf_config)
