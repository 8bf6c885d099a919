"""The draft of a server, put together: who drafts, and whose passes hand states to it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_smc import upstream
from sglang_smc.drafts.proposal import LanguageModel, Proposal
from sglang_smc.models import head_kinds as kinds
from sglang_smc.models import vocabulary
from sglang_smc.models.attention import Implementation
from sglang_smc.models.forward import ParticleForward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

    from sglang_smc.drafts.corpus import Corpus
    from sglang_smc.drafts.prompts import ReadsPrompts
    from sglang_smc.memory.ledger import Ledger
    from sglang_smc.options.server import SMCConfig
    from sglang_smc.upstream import Arguments


# What a head asks of SGLang's class of its target: first, to capture states.
_GIVES_OUT = {
    "eagle3": ("set_eagle3_layers_to_capture", "get_embed_and_head"),
    "dflash": (
        "set_dflash_layers_to_capture",
        "get_input_embeddings",
        "logits_processor",
        "lm_head",
    ),
}


class Drafting(NamedTuple):
    """A target over particles, and who drafts for it."""

    target: ParticleForward
    proposal: Proposal
    prompts: "ReadsPrompts"


def build(
    target: "TpModelWorker", server_args: "ServerArgs", placement: "Mapping[str, Any]"
) -> "TpModelWorker":
    """A worker for the draft, its model loaded; ``placement`` is what else SGLang builds ours with.

    Raises:
        ValueError: for a head whose target gives out no states.
    """
    worker = upstream.build_draft(target, server_args, placement)
    connect(target, worker)
    # SGLang looks for the draft's runner under names that only EAGLE's workers declare.
    runner = worker.model_runner
    worker.draft_runner = runner  # pyright: ignore[reportAttributeAccessIssue] -- as said
    worker.draft_runners = [runner]  # pyright: ignore[reportAttributeAccessIssue] -- as said
    return worker


def connect(target: "TpModelWorker", draft: "TpModelWorker") -> None:
    """Let a head share what it has not: the target gives out states, its embedding and LM head.

    Before pools and graphs, which are made of it.

    Raises:
        ValueError: for a target that does not give them out.
    """
    config = draft.model_runner.model_config
    kind = kinds.kind_of(config)
    if kind == "model":
        return
    model, head = target.model_runner.model, draft.model_runner.model
    lacking = [name for name in _GIVES_OUT[kind] if not hasattr(model, name)]
    if lacking:
        raise ValueError(
            f"--speculative-draft-model-path is a head of kind {kind}, and SGLang's "
            f"{type(model).__name__} gives out no states for one (it has no {lacking[0]}). Choose "
            "a language model as the draft, or a target of another family."
        )
    layers = kinds.captured_layers(config, target.model_runner.model_config.num_hidden_layers)
    getattr(model, _GIVES_OUT[kind][0])(layers)
    if kind == "eagle3":
        _share_embedding(model, head)
    elif (Path(config.model_path) / "mask_embedding.pt").exists():
        raise ValueError(
            "--speculative-draft-model-path has a mask_embedding.pt, which would be written into "
            "the target's own embedding; allowed: block heads whose mask is a token of the "
            "target's. Choose another head."
        )


def _share_embedding(model: Any, head: Any) -> None:
    embedding, lm_head = model.get_embed_and_head()
    if head.load_lm_head_from_target:
        head.set_embed_and_head(embedding, lm_head)
    else:
        head.set_embed(embedding)
    shared = ("embed_tokens.weight", "lm_head.weight")[: 1 + head.load_lm_head_from_target]
    if head.hot_token_id is not None:
        head.hot_token_id = head.hot_token_id.to(embedding.device)
    head.load_weights = partial(load_own, head, head.load_weights, shared)


def load_own(
    head: Any,
    load: "Callable[[Iterable[tuple[str, torch.Tensor]]], None]",
    shared: tuple[str, ...],
    weights: "Iterable[tuple[str, torch.Tensor]]",
) -> None:
    """Load new weights into a running head in place: not what it shares, which is the target's.

    Args:
        head: SGLang's.
        load: its own way to.
        shared: what names of shared weights end with.
        weights: of a checkpoint.
    """
    hot = head.hot_token_id
    load((name, weight) for name, weight in weights if not name.endswith(shared))
    if hot is not None:
        hot.copy_(head.hot_token_id)  # rounds have been recorded with it
        head.hot_token_id = hot


class Beside(NamedTuple):
    """What a draft is put together from."""

    target: "TpModelWorker"
    draft: "TpModelWorker | None"  # None: there are n-gram matches alone
    ledger: "Ledger"  # of KV slots
    kernels: Implementation
    num_particles: int  # N of the server
    num_columns: int  # K + 1

    @property
    def over(self) -> "tuple[torch.Tensor, Implementation, int]":
        """What all passes over particles are built with."""
        return self.ledger.tails, self.kernels, self.num_columns


def assemble(given: Beside) -> Drafting:
    """A draft of any kind, beside a target all of whose layers attend by softmax."""
    if given.draft is None:
        return _nobody(given)
    build = {"model": _model, "eagle3": _eagle, "dflash": _block}
    return build[kinds.kind_of(given.draft.model_runner.model_config)](given, given.draft)


def _nobody(given: Beside) -> Drafting:
    from sglang_smc.drafts.nobody import Nobody, NoPrompts

    runner = given.target.model_runner
    target = ParticleForward(runner, *given.over)
    width = runner.model_config.vocab_size
    return Drafting(target, Nobody(target.attn_backend, width), NoPrompts())


def _model(given: Beside, draft: "TpModelWorker") -> Drafting:
    from sglang_smc.drafts.prompts import ModelPrompts

    widths = vocabulary.vocabularies(given.target, draft)
    runner = draft.model_runner
    forward = vocabulary.with_width(ParticleForward(runner, *given.over), *widths)
    return Drafting(
        ParticleForward(given.target.model_runner, *given.over),
        LanguageModel(forward),
        ModelPrompts(runner, vocabulary.last_read(*widths)),
    )


def _eagle(given: Beside, draft: "TpModelWorker") -> Drafting:
    from sglang_smc.drafts.eagle import EagleForward, EagleHead
    from sglang_smc.drafts.prompts import EaglePrompts
    from sglang_smc.drafts.states import ReadTarget, StateTable

    runner, of_target, ledger = draft.model_runner, given.target.model_runner, given.ledger
    model: Any = runner.model
    table = StateTable.of(
        ledger.tails,
        num_columns=given.num_columns,
        num_slots=len(ledger.rank),
        width=model.model.fc.in_features,
        dtype=of_target.dtype,
    )
    head = EagleHead(
        EagleForward(runner, *given.over),
        table,
        model.hot_token_id,
        of_target.model_config.vocab_size,
    )
    reads = ReadTarget(of_target, *given.over, head)
    return Drafting(reads, head, EaglePrompts(runner, reads, table, ledger, given.num_particles))


def _block(given: Beside, draft: "TpModelWorker") -> Drafting:
    from sglang_smc.drafts.block import BlockForward, BlockHead
    from sglang_smc.drafts.prompts import BlockPrompts
    from sglang_smc.drafts.states import ReadTarget

    runner, of_target = draft.model_runner, given.target.model_runner
    forward = BlockForward(runner, *given.over, of_target.model)
    head = BlockHead(forward, kinds.mask_token(runner.model_config))
    return Drafting(ReadTarget(of_target, *given.over, head), head, BlockPrompts(forward))


def corpus_of(settled: "Arguments", config: "SMCConfig") -> "Corpus | None":
    """The texts that n-gram matches are of, where a server has any."""
    if not config.keeps_texts:
        return None
    from sglang_smc.drafts.corpus import open_corpus

    return open_corpus(settled, config)
