"""Build the draft of a server: its worker, its proposer, and its source of hidden states."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.server_args import ServerArgs

from sglang_smc import upstream
from sglang_smc.models import windows
from sglang_smc.models.attention import Implementation
from sglang_smc.models.draft_layers import quantize_draft
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.head_kinds import drafter_named, drafter_of, kind_of, sizes_for
from sglang_smc.models.recurrent import RecurrentForward
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.base import DraftContext, DraftProposer
from sglang_smc.proposers.hidden_states import ReadRecurrent, ReadTarget
from sglang_smc.proposers.layer_choice import LayerChoice
from sglang_smc.proposers.ngram import Corpus, UniformDraft, open_corpus
from sglang_smc.smc.ledger import Ledger
from sglang_smc.upstream import Arguments

logger = logging.getLogger(__name__)


def drafter_for(config: SMCConfig, draft: TpModelWorker | None) -> type[DraftProposer]:
    """Return the class of a server's drafter.

    Raises ValueError for a class of the operator's that cannot be had.
    """
    if config.draft_class is not None:
        return drafter_named(config.draft_class)
    return UniformDraft if draft is None else drafter_of(draft.model_runner.model_config)


def reason_of_sizes(server_args: ServerArgs, target: TpModelWorker, config: SMCConfig) -> str:
    """Return where a server's N and K come from."""
    model = target.model_runner.model_config
    return sizes_for(upstream.resolved(server_args), model, config).told(config)


def build(
    target: TpModelWorker,
    server_args: ServerArgs,
    placement: Mapping[str, Any],
    config: SMCConfig,
) -> TpModelWorker | None:
    """Build the draft's worker and load its model; return None where no model drafts.

    Args:
        placement: the other arguments with which SGLang builds the SMC worker.

    Raises ValueError for a head, if the target returns no hidden states, and for a draft whose
    layers cannot be fused, if they are to be kept in 8 bits.
    """
    if upstream.resolved(server_args).speculative_draft_model_path is None:
        _give_states(target, drafter_for(config, None), None, str(config.draft_class))
        return None
    worker = upstream.build_draft(target, server_args, placement)
    _limit(worker.model_runner.model, upstream.resolved(server_args))
    own_head = connect(target, worker, config)
    if config.draft_layers == "fused-int8":
        quantize_draft(worker.model_runner.model, own_head)
    # SGLang reads the draft's runner under names that only EAGLE's workers declare.
    runner = worker.model_runner
    worker.draft_runner = runner  # pyright: ignore[reportAttributeAccessIssue] -- as above
    worker.draft_runners = [runner]  # pyright: ignore[reportAttributeAccessIssue] -- as above
    return worker


def _limit(model: torch.nn.Module, resolved: Arguments) -> None:
    """Give the draft's layers the window of --speculative-draft-window-size, if one is set."""
    size = resolved.speculative_draft_window_size
    if size is None:
        return
    sink = upstream.draft_sink(resolved)
    if windows.limit(model, size, sink):
        first = f", and to the first {sink}" if sink else ""
        logger.info("A token of the draft attends to the last %d%s.", size, first)
    else:
        logger.warning(
            "--speculative-draft-window-size %d changes nothing: all layers of the draft have "
            "windows of their own that are no longer.",
            size,
        )


def connect(
    target: TpModelWorker, draft: TpModelWorker, config: SMCConfig
) -> torch.nn.Module | None:
    """Share the target's states, embedding and LM head with a draft; see `DraftProposer.connect`.

    Runs before pools and graphs are built, which depend on it. Returns the LM head that is the
    draft's own.

    Raises ValueError for a target that does not expose them, an LM head that cannot be cut, and a
    head that lacks weights.
    """
    drafter = drafter_for(config, draft)
    of_draft = draft.model_runner.model_config
    shown = config.draft_class or f"a head of kind {kind_of(of_draft)}"
    _give_states(target, drafter, of_draft, shown)
    return drafter.connect(target, draft)


def _give_states(
    target: TpModelWorker, drafter: type[DraftProposer], of_draft: ModelConfig | None, shown: str
) -> None:
    """Have the target give out the hidden states of the layers that a drafter reads, if any."""
    model: Any = target.model_runner.model
    needs = [*filter(None, (drafter.captures_by,)), *drafter.needs]
    lacking = [name for name in needs if not hasattr(model, name)]
    if lacking:
        raise ValueError(
            f"The draft is {shown}, and SGLang's {type(model).__name__} gives out no states for "
            f"one (it has no {lacking[0]}). Choose a language model as the draft, or a target of "
            "another family."
        )
    if drafter.captures_by:
        count = target.model_runner.model_config.num_hidden_layers
        getattr(model, drafter.captures_by)(drafter.captured_layers(of_draft, count))


def assemble(
    target: TpModelWorker,
    draft: TpModelWorker | None,
    ledger: Ledger,
    kernels: Implementation,
    config: SMCConfig,
    skinny: Callable[..., torch.Tensor] | None,
) -> tuple[ParticleForward, DraftProposer]:
    """Build the target and the draft over particles.

    Args:
        draft: None where no model drafts.
        skinny: the kernel of a draft's layers; None: they run as SGLang has them.

    Raises ValueError for a draft that cannot run in rounds.
    """
    drafter = drafter_for(config, draft)
    num_columns = config.num_steps + 1
    passes: Any  # of the target; they hand its states to a head
    if upstream.is_gated_delta(target.model_runner.model_config):
        recurrent = ReadRecurrent if drafter.wants_states else RecurrentForward
        sizes = {"num_particles": config.num_particles, "max_columns": num_columns}
        passes = recurrent(target.model_runner, ledger, kernels, **sizes)
    else:
        forward_of = ReadTarget if drafter.wants_states else ParticleForward
        passes = forward_of(target.model_runner, ledger.tails, kernels, num_columns)
    choice = LayerChoice() if config.draft_layers == "auto" else None
    if choice is not None and skinny is None:
        choice.leave("others are for drafts in bfloat16 on one GPU, with triton operations")
    context = DraftContext(
        target=target,
        draft=draft,
        passes=passes,
        ledger=ledger,
        kernels=kernels,
        num_particles=config.num_particles,
        num_columns=num_columns,
        skinny=skinny,
        layer_choice=choice,
    )
    proposer = drafter.build(context)
    proposer.layer_choice = choice
    if drafter.wants_states:
        passes.reader = proposer
    return passes, proposer


def corpus_of(resolved: Arguments, config: SMCConfig) -> Corpus | None:
    """Return the n-gram corpus of a server, or None where no matches draft."""
    return open_corpus(resolved, config) if config.ngram_matches else None
