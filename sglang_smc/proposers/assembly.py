"""Build the draft of a server: its worker, its proposer, and its source of hidden states."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.server_args import ServerArgs

from sglang_smc import upstream
from sglang_smc.drafts import checkpoint
from sglang_smc.models import head_kinds as kinds
from sglang_smc.models import vocabulary
from sglang_smc.models.attention import Implementation
from sglang_smc.models.draft_layers import Int8Rows, fuse_layers, quantize_layers
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.head_parts import for_class, is_set, require_set
from sglang_smc.models.recurrent import RecurrentForward
from sglang_smc.models.rotary import leave_rotations
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.base import DraftProposer, LanguageModel
from sglang_smc.proposers.dflash import BlockForward, BlockHead
from sglang_smc.proposers.eagle3 import EagleForward, EagleHead
from sglang_smc.proposers.hidden_states import ReadRecurrent, ReadTarget, StateTable
from sglang_smc.proposers.hot_tokens import cut_head, lm_head_of, read_map
from sglang_smc.proposers.ngram import Corpus, UniformDraft, open_corpus
from sglang_smc.smc.ledger import Ledger
from sglang_smc.upstream import Arguments

logger = logging.getLogger(__name__)

# Methods of SGLang's target class that a head needs; the first makes it capture hidden states.
_GIVES_OUT = {
    "eagle3": ("set_eagle3_layers_to_capture", "get_embed_and_head"),
    "dflash": (
        "set_dflash_layers_to_capture",
        "get_input_embeddings",
        "logits_processor",
        "lm_head",
    ),
    "eagle": ("get_embed_and_head",),
    "mtp": ("get_embed_and_head",),
}


def build(
    target: TpModelWorker,
    server_args: ServerArgs,
    placement: Mapping[str, Any],
    config: SMCConfig,
) -> TpModelWorker:
    """Build the draft's worker and load its model.

    Args:
        placement: the other arguments with which SGLang builds the SMC worker.

    Raises ValueError for a head, if the target returns no hidden states, and for a draft whose
    layers cannot be fused, if they are to be kept in 8 bits.
    """
    worker = upstream.build_draft(target, server_args, placement)
    own_head = connect(target, worker)
    if config.draft_layers == "fused-int8":
        _quantize(worker.model_runner.model, own_head)
    # SGLang reads the draft's runner under names that only EAGLE's workers declare.
    runner = worker.model_runner
    worker.draft_runner = runner  # pyright: ignore[reportAttributeAccessIssue] -- as above
    worker.draft_runners = [runner]  # pyright: ignore[reportAttributeAccessIssue] -- as above
    return worker


_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def connect(target: TpModelWorker, draft: TpModelWorker) -> torch.nn.Module | None:
    """Share the target's states, embedding and LM head with a head; cut a draft model's LM head.

    Runs before pools and graphs are built, which depend on it. Returns the LM head that is the
    draft's own, cut or not; None where it is the target's, or known to SGLang's class alone.

    Raises ValueError for a target that does not expose them, an LM head that cannot be cut, and a
    head that lacks weights.
    """
    config = draft.model_runner.model_config
    kind = kinds.kind_of(config)
    head: Any = draft.model_runner.model
    if kind == "model":
        path = upstream.resolved(draft.server_args).speculative_token_map
        if path is None:
            return lm_head_of(head)
        both = config, target.model_runner.model_config
        hot = read_map(path, min(one.vocab_size for one in both))
        return cut_head(head, hot.to(draft.model_runner.device))
    model: Any = target.model_runner.model
    lacking = [name for name in _GIVES_OUT[kind] if not hasattr(model, name)]
    if lacking:
        raise ValueError(
            f"--speculative-draft-model-path is a head of kind {kind}, and SGLang's "
            f"{type(model).__name__} gives out no states for one (it has no {lacking[0]}). Choose "
            "a language model as the draft, or a target of another family."
        )
    of_target = target.model_runner.model_config
    if kind in ("eagle3", "dflash"):
        layers = kinds.captured_layers(config, of_target.num_hidden_layers)
        getattr(model, _GIVES_OUT[kind][0])(layers)
    if kind == "dflash":
        _connect_block(head, config, draft.model_runner.device)
    else:
        _share(model, head, kind, embedding=config.hidden_size == of_target.hidden_size)
    if kind == "eagle" and config.hf_config.to_dict().get("bias") is False:
        torch.nn.init.zeros_(head.model.fc.bias)  # random in SGLang's class, where none is loaded
    require_set(head)
    has_own = kind == "eagle3" and not head.load_lm_head_from_target
    return head.lm_head if has_own and head.lm_head is not head.model.embed_tokens else None


def _connect_block(head: Any, config: Any, device: str) -> None:
    """Give a block head the target's ids of the tokens that it drafts, in `hot_token_id`."""
    folder = None
    with suppress(OSError, ValueError):  # it is loaded from elsewhere than a folder
        folder = checkpoint.folder_of(config.model_path, config.revision)
    if folder is not None and (folder / "mask_embedding.pt").exists():
        raise ValueError(
            "--speculative-draft-model-path has a mask_embedding.pt, which would be written into "
            "the target's own embedding; allowed: block heads whose mask is a token of the "
            "target's. Choose another head."
        )
    head.hot_token_id = None
    if kinds.drafts_part(config):
        shifts = None if folder is None else checkpoint.tensor_in(folder, "d2t")
        if shifts is None:
            raise ValueError(
                f"--speculative-draft-model-path {config.model_path} drafts a part of the "
                "vocabulary, and its d2t cannot be read; allowed: a folder, or a name of Hugging "
                "Face. Download the checkpoint."
            )
        head.hot_token_id = (shifts.long() + torch.arange(len(shifts))).to(device)
    load = head.load_weights
    hot = head.hot_token_id
    head.load_weights = lambda new: load_hot(load, hot, for_class(head, new))


def _share(model: Any, head: Any, kind: kinds.Kind, *, embedding: bool) -> None:
    """Share the target's embedding with a head, if it fits, and the LM head that it lacks.

    An embedding that the head's checkpoint has, and that is not the target's, stays.
    """
    of_target = dict(zip((_EMBEDDING, _LM_HEAD), model.get_embed_and_head(), strict=True))
    own = head.model.embed_tokens.weight
    known = of_target[_EMBEDDING]
    kept: list[tuple[Any, str]] = []
    shares = {_EMBEDDING: embedding, _LM_HEAD: True}
    if kind == "eagle3":
        shares[_LM_HEAD] = head.load_lm_head_from_target
        if head.hot_token_id is not None:
            head.hot_token_id = head.hot_token_id.to(known.device)
            kept = [(head, "hot_token_id")]
    if kind in ("eagle", "eagle3") and embedding and is_set(own):
        shares[_EMBEDDING] = torch.equal(own, known)
        if not shares[_EMBEDDING]:
            logger.info("The head keeps its own embedding, which is not the target's.")
    # The classes' own `set_embed_and_head` wait for a CUDA device.
    if shares[_EMBEDDING]:
        head.model.embed_tokens.weight = known
    if shares[_LM_HEAD]:
        head.lm_head.weight = of_target[_LM_HEAD]
    if hasattr(head.model, "midlayer"):  # over latents: parts of a projection, split as it loads
        kept += [(head.model.midlayer.self_attn, name) for name in ("w_kc", "w_vc")]
    shared = tuple(name for name, is_shared in shares.items() if is_shared)
    head.load_weights = partial(load_own, head.load_weights, shared, kept)


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


def _quantize(model: Any, head: Any) -> None:
    """Keep the layers of a draft in 8 bits, and its LM head if it is its own."""
    if not quantize_layers(model):
        raise _not_fused(model, "fused-int8")
    if head is None:
        return
    rows, width = head.weight.shape
    if rows % 16 or width % 64:
        raise ValueError(
            "--speculative-smc-draft-layers is 'fused-int8', and the draft's LM head has "
            f"{rows} rows of {width} numbers; allowed: multiples of 16 and of 64. Shorten "
            "--speculative-token-map, or pass fused."
        )
    model.int8_head = Int8Rows(head)
    model.int8_head.result = torch.float32


def _fuse(model: Any, forward: ParticleForward, skinny: Callable[..., torch.Tensor] | None) -> None:
    """Fuse the layers of a draft where a kernel is given; raise ValueError unless they fit."""
    if skinny is None:
        return
    if not fuse_layers(model, forward.attn_backend, skinny):
        raise _not_fused(model, "fused")
    if (head := vars(model).get("int8_head")) is not None:
        head.skinny = skinny


def _not_fused(model: Any, given: str) -> ValueError:
    return ValueError(
        f"--speculative-smc-draft-layers is {given!r}, and the draft is a "
        f"{type(model).__name__}; allowed: layers of Llama, Qwen 2, Qwen 3 and EAGLE-3, not "
        "quantized, in sizes that 128 divides. Leave it out."
    )


def assemble(
    target: TpModelWorker,
    draft: TpModelWorker | None,
    ledger: Ledger,
    kernels: Implementation,
    *,
    num_particles: int,
    num_columns: int,
    skinny: Callable[..., torch.Tensor] | None,
) -> tuple[ParticleForward, DraftProposer]:
    """Build the target and the draft over particles.

    Args:
        draft: None where n-gram matches draft.
        num_particles: N of the server.
        num_columns: K + 1.
        skinny: the kernel of a draft's layers; None: they run as SGLang has them.
    """
    of_target = target.model_runner
    tails = ledger.tails
    kind = "model" if draft is None else kinds.kind_of(draft.model_runner.model_config)
    passes: Any  # of the target; they hand its states to a head
    if upstream.is_gated_delta(of_target.model_config):
        recurrent = RecurrentForward if kind == "model" else ReadRecurrent
        sizes = {"num_particles": num_particles, "max_columns": num_columns}
        passes = recurrent(of_target, ledger, kernels, **sizes)
    else:
        forward_of = ParticleForward if kind == "model" else ReadTarget
        passes = forward_of(of_target, tails, kernels, num_columns)
    vocab_size = of_target.model_config.vocab_size
    if draft is None:
        return passes, UniformDraft(passes.attn_backend, vocab_size)
    runner = draft.model_runner
    model: Any = runner.model
    if kind == "model":
        num_missing = vocabulary.num_missing(target, draft)
        hot = vars(model).get("hot_token_id")
        forward = ParticleForward(runner, tails, kernels, num_columns)
        leave_rotations(model, forward.attn_backend)
        _fuse(model, forward, skinny)
        return passes, LanguageModel(forward, runner, num_missing, hot)
    if kind == "dflash":
        config = runner.model_config
        lm_head = model.own_lm_head if kinds.has_own_lm_head(config) else None
        forward = BlockForward(runner, tails, kernels, num_columns, of_target.model, lm_head)
        _fuse(model, forward, skinny)
        own = {
            "first": 1 - kinds.drafts_from_anchor(config),
            "markov": model.markov_head if kinds.is_dspark(config) else None,
            "hot": model.hot_token_id,
            "vocab_size": vocab_size,
        }
        passes.reader = BlockHead(forward, kinds.mask_token(config), **own)
        return passes, passes.reader
    width = kinds.num_states(runner.model_config) * of_target.model_config.hidden_size
    forward = EagleForward(runner, tails, kernels, num_columns + 2)
    leave_rotations(model, forward.attn_backend)
    _fuse(model, forward, skinny)
    passes.reader = EagleHead(
        forward,
        StateTable.of(ledger, num_columns=num_columns, width=width, dtype=of_target.dtype),
        model.hot_token_id if kind == "eagle3" else None,
        vocab_size,
        target=passes,
        ledger=ledger,
        num_particles=num_particles,
    )
    return passes, passes.reader


def corpus_of(resolved: Arguments, config: SMCConfig) -> Corpus | None:
    """Return the n-gram corpus of a server, or None where a model drafts."""
    return open_corpus(resolved, config) if config.ngram_matches else None
