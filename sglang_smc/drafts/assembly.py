"""The draft of a server, put together: who drafts, and whose passes hand states to it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_smc.drafts import kinds
from sglang_smc.drafts.proposal import LanguageModel, Proposal
from sglang_smc.models import vocabulary
from sglang_smc.models.forward import ParticleForward
from sglang_smc.ops.interface import Ops

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_smc.drafts.prompts import ReadsPrompts
    from sglang_smc.memory.ledger import Ledger


class Drafting(NamedTuple):
    """A target over particles, and who drafts for it."""

    target: ParticleForward
    proposal: Proposal
    prompts: "ReadsPrompts"


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
    name = {"eagle3": "set_eagle3_layers_to_capture", "dflash": "set_dflash_layers_to_capture"}
    needed = [name[kind], "get_embed_and_head" if kind == "eagle3" else "get_input_embeddings"]
    lacking = [method for method in needed if not hasattr(model, method)]
    if lacking:
        raise ValueError(
            f"--speculative-draft-model-path is a head of kind {kind}, and SGLang's "
            f"{type(model).__name__} gives out no states for one (it has no {lacking[0]}). Choose "
            "a language model as the draft, or a target of another family."
        )
    layers = kinds.captured_layers(config, target.model_runner.model_config.num_hidden_layers)
    getattr(model, name[kind])(layers)
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


def assemble(
    target: "TpModelWorker",
    draft: "TpModelWorker",
    ledger: "Ledger",
    ops: Ops,
    num_particles: int,
    num_steps: int,
) -> Drafting:
    """A draft of any kind, beside a target of which all layers attend by softmax.

    Args:
        target, draft: SGLang's workers, their pools built.
        ledger: of KV slots.
        num_particles, num_steps: N and K of the server.
    """
    build = {"model": _model, "eagle3": _eagle, "dflash": _block}
    kind = kinds.kind_of(draft.model_runner.model_config)
    return build[kind](target, draft, ledger, ops, num_particles, num_steps + 1)


def _model(
    target: "TpModelWorker", draft: "TpModelWorker", ledger: "Ledger", ops: Ops, _: int, columns: int
) -> Drafting:
    from sglang_smc.drafts.prompts import ModelPrompts

    widths = vocabulary.vocabularies(target, draft)
    over, runner = (ledger.tails, ops.kind, columns), draft.model_runner
    forward = vocabulary.with_width(ParticleForward(runner, *over), *widths)
    return Drafting(
        ParticleForward(target.model_runner, *over),
        LanguageModel(forward),
        ModelPrompts(runner, vocabulary.last_read(*widths)),
    )


def _eagle(
    target: "TpModelWorker",
    draft: "TpModelWorker",
    ledger: "Ledger",
    ops: Ops,
    num_particles: int,
    columns: int,
) -> Drafting:
    from sglang_smc.drafts.eagle import EagleForward, EagleHead
    from sglang_smc.drafts.prompts import EaglePrompts
    from sglang_smc.drafts.states import ReadTarget, StateTable

    runner, of_target = draft.model_runner, target.model_runner
    model: Any = runner.model
    table = StateTable.of(
        ledger.tails,
        num_columns=columns,
        num_slots=len(ledger.rank),
        width=model.model.fc.in_features,
        dtype=of_target.dtype,
    )
    over = ledger.tails, ops.kind, columns
    hot = model.hot_token_id
    head = EagleHead(
        EagleForward(runner, *over),
        table,
        None if hot is None else hot.to(ledger.device),
        of_target.model_config.vocab_size,
    )
    reads = ReadTarget(of_target, *over, head)
    return Drafting(reads, head, EaglePrompts(runner, reads, table, ledger, num_particles))


def _block(
    target: "TpModelWorker", draft: "TpModelWorker", ledger: "Ledger", ops: Ops, _: int, columns: int
) -> Drafting:
    from sglang_smc.drafts.block import BlockForward, BlockHead
    from sglang_smc.drafts.prompts import BlockPrompts
    from sglang_smc.drafts.states import ReadTarget

    runner, of_target = draft.model_runner, target.model_runner
    over = ledger.tails, ops.kind, columns
    forward = BlockForward(runner, *over, of_target.model)
    head = BlockHead(forward, kinds.mask_token(runner.model_config))
    return Drafting(ReadTarget(of_target, *over, head), head, BlockPrompts(head))
