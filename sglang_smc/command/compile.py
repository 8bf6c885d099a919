"""Run ``sglang-smc compile``: fill Triton's cache for a pair of models, without a GPU."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from sglang_smc.command.program import command, positive
from sglang_smc.drafts.sizes import NGRAM
from sglang_smc.options.request import Budget, budgets
from sglang_smc.options.server import ADAPTIVE, MODES, SMCConfig

if TYPE_CHECKING:
    from sglang_smc.ops.check_cases import CheckSizes, Passes

MTP = "mtp"
MOST_PROCESSES = 4
"""By default: a start loads weights beside it."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc compile",
        description="Compiles the Triton kernels that a server of these models checks when it "
        "starts, for a GPU that need not be there, into Triton's cache (TRITON_CACHE_DIR, by "
        "default ~/.triton/cache). A start with the same versions finds them. No weights are read.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = result.add_argument
    add("--target", metavar="DIR", required=True, help="folder of the target, or its name on the "
        "hub")  # fmt: skip
    add("--draft", metavar="DIR", default=MTP, help=f"the same of the draft, or {NGRAM}; {MTP} is "
        "the target's own layer")  # fmt: skip
    add("--device", required=True, help="kind of GPU: h200, or another that an error lists")
    add("--tp", type=positive, default=1, help="tensor-parallel devices")
    add("--mode", choices=MODES, default=SMCConfig().mode, help="as --speculative-smc-mode")
    add("--adaptive", choices=ADAPTIVE, default="auto", help="as --speculative-smc-adaptive")
    chosen = "default: what a server chooses for the pair"
    add("--num-particles", type=positive, help=f"N; {chosen}")
    add("--num-steps", type=positive, help=f"K; {chosen}")
    add("--processes", type=positive, default=min(MOST_PROCESSES, os.cpu_count() or 1), help="to "
        "compile in")  # fmt: skip
    trust = "run code that comes with the models, as a server with this flag does"
    add("--trust-remote-code", action="store_true", help=trust)
    return result


def run(options: argparse.Namespace) -> int:
    """Compile, and print the number of variants, the CPU seconds and the cache's folder."""
    from sglang.srt.plugins import load_plugins
    from tqdm import tqdm
    from triton import knobs

    from sglang_smc.ops import compiling

    device = compiling.target_named(options.device.lower())
    load_plugins()
    sizes = sizes_of(options)
    jobs = compiling.jobs_of(sizes)
    start = compiling.cpu_seconds()
    interval = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(total=len(jobs), desc="Compiling", mininterval=interval) as bar:
        found = compiling.compile_checks(device, jobs, bar.update, options.processes)
    seconds = compiling.cpu_seconds() - start
    largest = sizes[0]
    print(
        f"{len(found)} variants of kernels for {options.device.lower()} "
        f"(sm_{device.capability}), N = {largest.num_particles}, K = {largest.num_steps}: "
        f"{seconds:.1f} CPU s, in {knobs.cache.dir}"
    )
    return 0


def sizes_of(options: argparse.Namespace) -> list[CheckSizes]:
    """Return the sizes to check at: a server's, and those of fewer particles where N adapts."""
    from sglang_smc.ops.check_cases import CheckSizes
    from sglang_smc.upstream import is_gated_delta

    target = _model(options.target, options)
    draft = None
    if options.draft not in (NGRAM, MTP):
        draft = _model(options.draft, options, is_draft_model=True)
    config = _settings(options, target, draft)
    passes = _passes(target, options.tp, (config.num_steps + 1,))
    if options.draft != NGRAM:
        passes += _passes(draft or target, options.tp, (1, 2))
    largest = Budget(config.num_particles, config.num_steps)
    of_n = {one.num_particles for one in budgets(largest)} if config.adapts else set()
    return [
        CheckSizes(
            num_particles,
            config.num_steps,
            passes,
            gated_delta=is_gated_delta(target),
            draft_layers=config.draft_layers != "sglang",
            vocab_size=target.vocab_size,
        )
        for num_particles in sorted({largest.num_particles} | of_n, reverse=True)
    ]


def _settings(options: argparse.Namespace, target: Any, draft: Any) -> SMCConfig:
    """Return the settings of a server with these options."""
    from sglang_smc.drafts import sizes
    from sglang_smc.models.head_kinds import kind_of

    config = SMCConfig(mode=options.mode, adaptive=options.adaptive)
    kind = options.draft
    of_draft = None
    if draft is not None:
        of_draft = draft.hf_config.to_dict()
        kind = kind_of(draft)
    is_mixture = sizes.is_mixture(target.hf_config.to_dict())
    chosen = sizes.choose(kind, of_draft, config, is_mixture=is_mixture)
    config = replace(
        config,
        num_particles=options.num_particles or chosen.num_particles,
        num_steps=options.num_steps or chosen.num_steps,
    )
    config.validate()
    return config


def _model(path: str, options: argparse.Namespace, **how: Any) -> Any:
    """Return SGLang's configuration of a model.

    Raises ValueError if none can be read there.
    """
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_smc.upstream import any_quantization

    try:
        with any_quantization():
            return ModelConfig(path, trust_remote_code=options.trust_remote_code, **how)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path!r} has no configuration that SGLang reads: {error}. Give a model's folder with "
            "its config.json, or its name on the hub."
        ) from error


def _passes(model: Any, tp_size: int, columns: tuple[int, ...]) -> tuple[Passes, ...]:
    """Return how a model's attention may run: layers' classes say whether it rotates, too."""
    from sglang.srt.configs.model_config import AttentionArch

    from sglang_smc.models.softmax import Heads
    from sglang_smc.ops.check_cases import Passes

    q_heads = model.get_num_attention_heads(tp_size)
    if model.attention_arch == AttentionArch.MLA:
        rank = model.kv_lora_rank
        heads = Heads(q_heads, 1, rank + model.qk_rope_head_dim, model.dtype, rank)
        return (Passes(heads, columns),)
    heads = Heads(q_heads, model.get_num_kv_heads(tp_size), model.head_dim, model.dtype)
    kinds = (False, True) if model.dtype.itemsize == 2 else (False,)
    return tuple(Passes(heads, columns, rotates) for rotates in kinds)


main = command(parser, run)
