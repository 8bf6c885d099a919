"""Validate an SMC server's arguments, and resolve those that follow from others."""

import logging
from copy import deepcopy

from msgspec.structs import asdict, replace
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_smc.kv import arena
from sglang_smc.models import supported
from sglang_smc.models.head_kinds import is_head_at
from sglang_smc.ops.select import kind_of
from sglang_smc.options.request import RequestConfig, check_support
from sglang_smc.options.server import (
    KERNELS,
    SERVER_ARGS_FIELDS,
    SMCConfig,
    cpu_overlap_is_forced,
    flag_of,
)
from sglang_smc.process import drafts_all
from sglang_smc.server import presets, refusals, requirements
from sglang_smc.upstream import IS_NEWER, Arguments

logger = logging.getLogger(__name__)

# SGLang's default for its own speculative algorithms.
_DEFAULT_MAX_RUNNING_REQUESTS = 48

ANY_FLAG = SERVER_ARGS_FIELDS["mode"]


def check(server_args: Arguments) -> None:
    """Raise ValueError, listing the reasons, for a server that SMC cannot run on."""
    problems = [
        *_setting_problems(server_args),
        *_draft_problems(server_args),
        *requirements.unmet(server_args),
        *supported.problems(server_args, _widest_heads(server_args)),
    ]
    if problems:
        raise ValueError(
            "--speculative-algorithm SMC cannot start this server:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def resolve(server_args: Arguments) -> None:
    """Write the settings that follow from accepted arguments back into them."""
    config = SMCConfig.from_server_args(server_args)
    for name, attribute in SERVER_ARGS_FIELDS.items():
        setattr(server_args, attribute, getattr(config, name))
    # Read once: a later version of the file would not be validated.
    server_args.speculative_smc_presets = presets.as_json(server_args)  # pyright: ignore[reportAttributeAccessIssue] -- ours
    # Multimodal models are served as their language model, with a tokenizer alone.
    server_args.enable_multimodal = False
    # A chain: one candidate a step; a round has K draft tokens and the bonus token.
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_draft_tokens = config.num_steps + 1
    # On a CPU there is nothing to overlap, and each request would cost one idle round.
    if server_args.device == "cpu" and not cpu_overlap_is_forced():
        server_args.disable_overlap_schedule = True
    # SGLang's decode graphs have one row per request, and no weights: SMC captures its own.
    graphs = deepcopy(server_args.cuda_graph_config)
    assert graphs is not None, "SGLang resolves its graphs before speculative decoding"
    if config.round_graph == "auto" and not _captures(config, server_args):
        server_args.speculative_smc_round_graph = "off"  # pyright: ignore[reportAttributeAccessIssue] -- ours
    graphs.decode.backend = Backend.DISABLED
    if graphs.prefill.backend != Backend.DISABLED and _reads_states(server_args):
        graphs.prefill.backend = Backend.DISABLED
        logger.info(
            "SGLang's prefill graphs are disabled: --speculative-draft-model-path is a head, which "
            "reads the target's states at all tokens of a prompt, and these graphs keep none."
        )
    if IS_NEWER and server_args.device == "cuda" and not server_args.enable_fp32_lm_head:
        # Before 0.5.20 the flag converts the whole LM head in each pass.
        server_args.enable_fp32_lm_head = True
        logger.info(
            "LM heads give logits in float32 (--enable-fp32-lm-head), which saves a copy of them "
            "in each pass. Give a server without SMC the flag, too, to compare answers with it."
        )
    # Layers with a window keep their KV in the pool of the others: a request's row is the ledger
    # of all its slots.
    server_args.disable_hybrid_swa_memory = True
    server_args.cuda_graph_config = graphs
    if server_args.max_running_requests is None:
        server_args.max_running_requests = _DEFAULT_MAX_RUNNING_REQUESTS
        logger.warning(
            "--max-running-requests is set to %d for speculative decoding; pass it to choose.",
            _DEFAULT_MAX_RUNNING_REQUESTS,
        )
    logger.info("SMC speculative decoding: %s", config)


def _reads_states(server_args: Arguments) -> bool:
    """Return whether the draft is a head over the target's hidden states."""
    view = resolved_view(server_args)
    path, revision = view.speculative_draft_model_path, view.speculative_draft_model_revision
    return path is not None and is_head_at(path, revision, view.trust_remote_code)


def _captures(config: SMCConfig, server_args: Arguments) -> bool:
    """Return whether rounds are captured with round graphs set to 'auto'."""
    graphs = server_args.cuda_graph_config
    assert graphs is not None
    wanted = graphs.decode.backend != Backend.DISABLED
    return wanted and _can_capture(config, server_args.device)


def _can_capture(config: SMCConfig, device: str | None) -> bool:
    """Return whether rounds run Triton kernels on a GPU."""
    return kind_of(config.kernels, device or "cuda") == "triton" and device != "cpu"


def _widest_heads(server_args: Arguments) -> int | None:
    """Return the largest head dimension of the kernels, or None where none run."""
    kernels, device = server_args.speculative_smc_kernels or "auto", server_args.device or "cuda"
    if kernels not in KERNELS or (kernels == "triton" and device == "cpu"):
        return None  # invalid, which `SMCConfig` reports, or interpreted kernels on a CPU
    if kind_of(kernels, device) == "torch":
        return None
    from sglang_smc.kernels.attention.work import MAX_HEAD_DIM

    return MAX_HEAD_DIM


def _setting_problems(server_args: Arguments) -> list[str]:
    try:
        config = SMCConfig.from_server_args(server_args)
    except ValueError as error:
        return [str(error)]
    problems = _pool_problems(config, server_args.max_total_tokens)
    problems += _support_problems(config, server_args)
    problems += _kernel_problems(config, server_args.device)
    of_potentials = refusals.problems(server_args)
    problems += of_potentials or presets.problems(server_args)
    given, expected = server_args.speculative_num_draft_tokens, config.num_steps + 1
    if given not in (None, expected):
        problems.append(
            f"--speculative-num-draft-tokens is {given}; allowed: --speculative-num-steps + 1 = "
            f"{expected}. Leave it out and choose --speculative-num-steps alone."
        )
    return problems


def _pool_problems(config: SMCConfig, num_slots: int | None) -> list[str]:
    """Return problems of a KV pool of given size; others are checked at allocation."""
    if num_slots is None:
        return []
    try:
        arena.check_pool(config, num_slots)
    except ValueError as error:
        return [str(error)]
    return []


def _support_problems(config: SMCConfig, server_args: Arguments) -> list[str]:
    """Return the server's settings that need a draft which can draft every token."""
    if drafts_all(resolved_view(server_args)):
        return []
    lacking = check_support(RequestConfig(**asdict(replace(config, drafts_all=False))))
    return [f"The settings are {lacking}"] if lacking else []


def _kernel_problems(config: SMCConfig, device: str | None) -> list[str]:
    try:
        can_capture = _can_capture(config, device)
    except ValueError as error:
        return [str(error)]
    if config.round_graph == "on" and not can_capture:
        return [
            f"--speculative-smc-round-graph is 'on' with --device {device} and "
            f"--speculative-smc-kernels {config.kernels!r}; allowed: 'auto' or 'off', since only "
            "rounds of Triton kernels on a GPU can be captured. Leave it out."
        ]
    return []


def _draft_problems(server_args: Arguments) -> list[str]:
    path, flag = server_args.speculative_draft_model_path, flag_of("ngram_weight")
    if server_args.speculative_smc_ngram_weight == 1:
        if path is None:
            return []
        return [
            f"{flag} is 1 and --speculative-draft-model-path is {path!r}; allowed: one of both, "
            "since n-gram matches draft alone there. Leave the draft out, or pass a smaller "
            "weight."
        ]
    if path is not None:
        return []
    return [
        "--speculative-draft-model-path is missing. Pass a folder or a Hugging Face id of a "
        f"smaller model with the target's vocabulary; without one, {flag} 1 drafts from n-gram "
        "matches alone, in the modes that verify."
    ]
