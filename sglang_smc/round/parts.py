"""Build the parts of a server's rounds, once its pools exist."""

from collections.abc import Callable

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.runtime_context import get_parallel

from sglang_smc.kv.report import MemorySizes, Table
from sglang_smc.kv.sizes import slot_bytes, tensor_bytes
from sglang_smc.kv.unread import UnreadSlots
from sglang_smc.models.rotary import may_rotate
from sglang_smc.models.supported import check_layers, heads_of
from sglang_smc.ops import TORCH, ops_of
from sglang_smc.ops import kind_of as kind_of_ops
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers import assembly as drafts
from sglang_smc.proposers.base import ANY
from sglang_smc.proposers.ngram import Corpus
from sglang_smc.round.batch import Tables
from sglang_smc.round.costs import rehearse
from sglang_smc.round.play import ServedRound
from sglang_smc.round.prefill import Prefill
from sglang_smc.smc.ops import Ops
from sglang_smc.state.request import RequestStates
from sglang_smc.upstream import experts_of_passes, is_gated_delta, resolved


def operations(
    config: SMCConfig,
    target: TpModelWorker,
    draft: TpModelWorker | None,
    device: str,
    group: GroupCoordinator,
) -> Ops:
    """Return the operations of a server, on a GPU the kernels that equal their torch references.

    Every rank of ``group``, which shares the models, must call it.

    Raises ValueError if a kernel fails that `--speculative-smc-kernels triton` or, of attention,
    `--speculative-smc-round-graph on` requires.
    """
    ops = ops_of(kind_of_ops(config.kernels, device), device)
    if ops.kind == "torch" or device == "cpu":  # Triton's interpreter is too slow for a start
        return ops
    from sglang_smc.ops import check, check_cases

    runner = target.model_runner
    passes = [check_cases.Passes(heads_of(runner), (config.num_steps + 1,), may_rotate(runner))]
    if draft is not None:
        runner = draft.model_runner
        passes.append(check_cases.Passes(heads_of(runner), (1, 2), may_rotate(runner)))
    sizes = check_cases.CheckSizes(
        config.num_particles,
        config.num_steps,
        tuple(passes),
        gated_delta=is_gated_delta(target.model_runner.model_config),
        draft_layers=config.draft_layers != "sglang",
        vocab_size=target.model_runner.model_config.vocab_size,
    )
    found = check.settle(ops, config.kernels, device, sizes, group)
    if found.kind == "torch" and config.round_graph == "on":
        raise ValueError(
            "--speculative-smc-round-graph is 'on', and the kernel of attention fails on this "
            "device (the log says why), without which no round is recorded; allowed: 'auto' or "
            "'off'. Leave it out."
        )
    return found


def assemble(
    target: TpModelWorker,
    draft: TpModelWorker | None,
    *,
    config: SMCConfig,
    states: RequestStates,
    tables: Tables,
    corpus: Corpus | None = None,
) -> tuple[Prefill, ServedRound]:
    """Build the parts of a server, and run each model once over a particle.

    Args:
        target, draft: SGLang's workers of the two models, with their pools built; ``draft`` is
            None without a draft model.
        corpus: texts of n-gram matches; None where a model drafts.

    Raises ValueError for a model that cannot run in rounds.
    """
    num_columns = config.num_steps + 1
    passes, proposer = drafts.assemble(
        target,
        draft,
        tables.ledger,
        tables.ops.kind,
        config=config,
        skinny=skinny_for(config, tables.ops, draft),
    )
    num_rows = len(target.model_runner.req_to_token_pool.req_to_token)  # pyright: ignore[reportOptionalMemberAccess] -- built before
    routed = experts_of_passes(num_rows * config.num_particles * num_columns)
    check_layers(target.model_runner)
    if draft is not None:
        check_layers(draft.model_runner, blocks=proposer.is_block)
    rehearse(passes, proposer, tables.ledger, tables.ops)
    begin = passes.init_from_prompt
    options = resolved(target.server_args)
    may_skip = proposer.late_tokens == ANY and not options.enable_hierarchical_cache
    unread = UnreadSlots(tables.ledger.table, len(tables.ledger.rank)) if may_skip else None
    prefill = Prefill(target, proposer, states, tables, begin, unread)
    if (size := options.chunked_prefill_size) and size > 0:
        prefill.chunk_size = size
    return prefill, ServedRound(passes, proposer, tables, corpus, routed)


def skinny_for(
    config: SMCConfig, ops: Ops, draft: TpModelWorker | None
) -> Callable[..., torch.Tensor] | None:
    """Return the kernel of a draft's layers; None where they run as SGLang has them.

    Rows are multiplied by a norm's weights before they are normalized, which float16 may not hold.

    Raises ValueError where the layers cannot be fused as asked; `auto` asks for nothing.
    """
    if config.draft_layers == "sglang":
        return None
    device, dtype = (draft.model_runner.device, draft.model_runner.dtype) if draft else ("", None)
    given = (ops.kind, device, dtype, get_parallel().tp_size)
    if given != ("triton", "cuda", torch.bfloat16, 1):
        if config.draft_layers == "auto":
            return None
        raise ValueError(
            f"--speculative-smc-draft-layers is {config.draft_layers!r}, with "
            + (f"a draft in {dtype} on {device}" if draft else "no draft")
            + f", {given[3]} ranks and {ops.kind} operations; allowed: a draft in torch.bfloat16 "
            "on cuda, one rank and triton operations. Leave it out."
        )
    # A kernel that fails its check has been replaced.
    return None if ops.skinny is TORCH.skinny else ops.skinny


def memory_of(
    config: SMCConfig,
    target: TpModelWorker,
    draft: TpModelWorker | None,
    tables: Tables,
    others: dict[str, int],
    *,
    num_slots: int,
    most_running: int,
) -> Table:
    """Return the memory table of a server on this rank; see `MemorySizes`.

    Args:
        others: bytes beside tables and KV caches, by purpose; of 0, nothing is said.
    """
    of_target = slot_bytes(target.model_runner.token_to_kv_pool)
    of_draft = 0 if draft is None else slot_bytes(draft.model_runner.token_to_kv_pool)
    weights = () if draft is None else draft.model_runner.model.parameters()
    sizes = MemorySizes(
        num_slots=num_slots,
        slot_bytes=of_target + of_draft,
        target_slot_bytes=of_target,
        draft_weight_bytes=sum(map(tensor_bytes, weights)),
        most_running=most_running,
        context_length=target.model_runner.model_config.context_len,
        beside={**tables.sizes(), **{name: size for name, size in others.items() if size}},
    )
    return Table.of(config, sizes)
