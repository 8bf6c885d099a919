"""Validate an SMC server's arguments, and resolve those that follow from others."""

import logging
import os
from collections.abc import Iterator
from copy import deepcopy

from msgspec.structs import asdict
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_smc.drafts.heads.mtp import MTP
from sglang_smc.kv import arena
from sglang_smc.models import supported
from sglang_smc.models.head_kinds import (
    Place,
    drafter_named,
    has_mtp,
    reads_states,
)
from sglang_smc.ops import kind_of
from sglang_smc.options.request import RequestConfig, check_support
from sglang_smc.options.server import (
    CPU_OVERLAP_ENV,
    KERNELS,
    SERVER_ARGS_FIELDS,
    SMCConfig,
    flag_of,
)
from sglang_smc.process import config_of
from sglang_smc.server import draft_window, presets, refusals, requirements, sizes
from sglang_smc.upstream import IS_NEWER, Arguments, model_config_of

logger = logging.getLogger(__name__)

# SGLang's default for its own speculative algorithms.
_DEFAULT_MAX_RUNNING_REQUESTS = 48

ANY_FLAG = SERVER_ARGS_FIELDS["mode"]


def check_arguments(server_args: Arguments) -> None:
    """Raise ValueError, listing the reasons, for a server that SMC cannot run on."""
    _draft_from_target(server_args)
    sizes.choose(server_args)
    # What else is wrong with a server that cannot run would send its operator in circles.
    problems = supported.target_refusals(server_args) or [
        *_setting_problems(server_args),
        *_draft_problems(server_args),
        *requirements.unmet(server_args),
        *supported.model_problems(server_args, _widest_heads(server_args)),
        *draft_window.problems(server_args),
    ]
    if problems:
        raise ValueError(
            "--speculative-algorithm SMC cannot start this server:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _draft_from_target(server_args: Arguments) -> None:
    """Name the target as its own draft where no other is given and it has an MTP layer."""
    view = resolved_view(server_args)
    if view.speculative_draft_model_path is not None or _drafts_alone(view):
        return
    if has_mtp(Place.of_target(view)):
        server_args.speculative_draft_model_path = view.model_path
        server_args.speculative_draft_model_revision = view.revision


def _drafts_alone(view: Arguments) -> bool:
    """Return whether these arguments name what may draft without a model."""
    return view.speculative_smc_ngram_matches or view.speculative_smc_draft_class is not None


def resolve(server_args: Arguments) -> None:
    """Write the settings that follow from accepted arguments back into them."""
    config = config_of(server_args)
    for name, attribute in SERVER_ARGS_FIELDS.items():
        setattr(server_args, attribute, getattr(config, name))
    # Read once: a later version of the file would not be validated.
    server_args.speculative_smc_presets = presets.as_json(server_args)
    if resolved_view(server_args).speculative_draft_model_path is not None:
        _draft_as_target(server_args)
    # Else multimodal models are served as their language model, with a tokenizer alone.
    server_args.enable_multimodal = bool(resolved_view(server_args).enable_multimodal)
    # A chain: one candidate a step; a round has K draft tokens and the bonus token.
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_draft_tokens = config.num_steps + 1
    # On a CPU there is nothing to overlap, and each request would cost one idle round.
    if server_args.device == "cpu" and os.environ.get(CPU_OVERLAP_ENV) != "1":
        server_args.disable_overlap_schedule = True
    # SGLang's decode graphs have one row per request, and no weights: SMC captures its own.
    graphs = deepcopy(server_args.cuda_graph_config)
    assert graphs is not None, "SGLang resolves its graphs before speculative decoding"
    if config.round_graph == "auto" and not _captures(config, server_args):
        server_args.speculative_smc_round_graph = "off"
    if _has_lora(server_args):
        logger.info("Rounds are not captured as CUDA graphs, which hold no LoRA adapters.")
    graphs.decode.backend = Backend.DISABLED
    if graphs.prefill.backend != Backend.DISABLED and _wants_states(server_args):
        graphs.prefill.backend = Backend.DISABLED
        logger.info(
            "SGLang's prefill graphs are disabled: the draft is a head, which needs the target's "
            "states at all tokens of a prompt, and these graphs store none."
        )
    alone = server_args.tp_size == 1  # ranks would exchange twice the bytes
    if IS_NEWER and server_args.device == "cuda" and alone and not server_args.enable_fp32_lm_head:
        # Before 0.5.20 the flag converts the whole LM head in each pass.
        server_args.enable_fp32_lm_head = True
        logger.info(
            "LM heads give logits in float32 (--enable-fp32-lm-head), which saves a copy of them "
            "in each pass. Give a server without SMC the flag, too, to compare answers with it."
        )
    # Trainers send the target's weights anew, and seldom the draft's.
    server_args.enable_draft_weights_cpu_backup |= server_args.enable_memory_saver
    # Layers with a window keep their KV in the pool of the others: a request's row is the ledger
    # of all its slots.
    server_args.disable_hybrid_swa_memory = True
    server_args.cuda_graph_config = graphs
    if server_args.disaggregation_mode == "decode":
        # All that admission knows of arenas: at least one at the defaults, at most the largest.
        reserved = max(server_args.num_reserved_decode_tokens, arena.arena(config, config.lag))
        server_args.num_reserved_decode_tokens = min(reserved, arena.max_arena(config))
        backup = server_args.disaggregation_decode_retraction_backup
        server_args.disaggregation_decode_retraction_backup = backup or "cpu_tensor"
    if server_args.max_running_requests is None:
        server_args.max_running_requests = _DEFAULT_MAX_RUNNING_REQUESTS
        logger.warning(
            "--max-running-requests is set to %d for speculative decoding; pass it to choose.",
            _DEFAULT_MAX_RUNNING_REQUESTS,
        )
    logger.info("SMC speculative decoding: %s", config)


def _draft_as_target(server_args: Arguments) -> None:
    """Have the draft loaded in the target's dtype, and attend to texts as it was trained to.

    With `auto` SGLang would take each model's from its own configuration; a head reads the target's
    states and embedding.
    """
    if server_args.dtype == "auto":
        server_args.dtype = str(model_config_of(server_args).dtype).removeprefix("torch.")
    draft_window.choose(server_args)


def _wants_states(server_args: Arguments) -> bool:
    """Return whether the target's hidden states are handed to the draft."""
    view = resolved_view(server_args)
    own = view.speculative_smc_draft_class
    return reads_states(view) if own is None else drafter_named(own).wants_states


def _captures(config: SMCConfig, server_args: Arguments) -> bool:
    """Return whether rounds are captured with round graphs set to 'auto'."""
    wanted = server_args.cuda_graph_config.decode.backend != Backend.DISABLED
    return wanted and not _has_lora(server_args) and _can_capture(config, server_args.device)


def _can_capture(config: SMCConfig, device: str | None) -> bool:
    return kind_of(config.kernels, device or "cuda") == "triton" and device != "cpu"


def _has_lora(server_args: Arguments) -> bool:
    """Return whether the server may run adapters; SGLang settles enable_lora later."""
    view = resolved_view(server_args)
    return bool(view.lora_paths) if view.enable_lora is None else view.enable_lora


def _widest_heads(server_args: Arguments) -> int | None:
    """Return the largest head dimension of the kernels, or None where none run."""
    kernels = server_args.speculative_smc_kernels or "auto"
    device = server_args.device or "cuda"
    # Invalid kernels are reported by `SMCConfig`; those on a CPU are interpreted.
    is_other = kernels not in KERNELS or (kernels == "triton" and device == "cpu")
    if is_other or kind_of(kernels, device) == "torch":
        return None
    from sglang_smc.kernels.attention.work import MAX_HEAD_DIM

    return MAX_HEAD_DIM


def _setting_problems(server_args: Arguments) -> Iterator[str]:
    try:
        config = config_of(server_args)
    except ValueError as error:
        yield str(error)
        return
    if server_args.max_total_tokens is not None:  # else the pool is checked when it is sized
        try:
            arena.check_pool(config, server_args.max_total_tokens)
        except ValueError as error:
            yield str(error)
    if not config.drafts_all and (lacking := check_support(RequestConfig(**asdict(config)))):
        yield f"The settings are {lacking}"
    if config.round_graph == "on" and _has_lora(server_args):
        yield (
            "--speculative-smc-round-graph is 'on' with LoRA adapters; allowed: 'auto' or 'off', "
            "since the adapters of a batch are not part of what is captured. Leave it out."
        )
    else:
        yield from _kernel_problems(config, server_args)
    yield from refusals.potential_problems(server_args) or presets.preset_problems(server_args)
    given = server_args.speculative_num_draft_tokens
    expected = config.num_steps + 1
    if given not in (None, expected):
        yield (
            f"--speculative-num-draft-tokens is {given}; allowed: --speculative-num-steps + 1 = "
            f"{expected}. Leave it out and choose --speculative-num-steps alone."
        )


def _kernel_problems(config: SMCConfig, server_args: Arguments) -> Iterator[str]:
    """Yield why kernels do not run on this device, or rounds cannot be captured there."""
    try:
        can_capture = _can_capture(config, server_args.device)
    except ValueError as error:
        yield str(error)
        return
    if config.round_graph == "on" and not can_capture:
        yield (
            f"--speculative-smc-round-graph is 'on' with --device {server_args.device} and "
            f"--speculative-smc-kernels {config.kernels!r}; allowed: 'auto' or 'off', since only "
            "rounds of Triton kernels on a GPU can be captured. Leave it out."
        )


def _draft_problems(server_args: Arguments) -> Iterator[str]:
    path = server_args.speculative_draft_model_path
    flag = flag_of("ngram_matches")
    if server_args.speculative_smc_ngram_matches and path is not None:
        yield (
            f"{flag} is True and --speculative-draft-model-path is {path!r}; allowed: one of both, "
            "since n-gram matches draft alone. Leave one of them out."
        )
    if not _drafts_alone(server_args) and path is None:
        yield (
            "--speculative-draft-model-path is missing. Pass a folder or a Hugging Face id of a "
            f"smaller model with the target's vocabulary; without one, {flag} drafts from n-gram "
            "matches, where drafts are verified. A target with an MTP layer needs none: "
            f"{' or '.join(MTP)}."
        )
    if server_args.speculative_smc_draft_class is not None:
        yield from _class_problems(server_args)
    tokens = server_args.speculative_token_map
    view = resolved_view(server_args)
    if tokens is not None and (path is None or reads_states(view)):
        yield (
            f"--speculative-token-map is {tokens!r}; allowed: with a language model as the draft, "
            "whose LM head it cuts. Heads have tokens of their own or the target's LM head, n-gram "
            "matches no LM head. Leave it out."
        )


def _class_problems(server_args: Arguments) -> Iterator[str]:
    """Yield why a drafter of the operator's own cannot draft with these arguments."""
    path = server_args.speculative_draft_model_path
    given = f"{flag_of('draft_class')} is {server_args.speculative_smc_draft_class!r}"
    if server_args.speculative_smc_ngram_matches:
        other = flag_of("ngram_matches")
        yield f"{given} and {other} is True; allowed: one of both. Leave one of them out."
    try:
        drafter = drafter_named(server_args.speculative_smc_draft_class)
    except ValueError:  # told of the settings
        return
    if drafter.runs_model and path is None:
        yield (
            f"{given}, whose runs_model is True, without --speculative-draft-model-path; allowed: "
            "both. Pass the model that it runs."
        )
    elif path is not None and not drafter.runs_model:
        yield (
            f"{given}, whose runs_model is False, and --speculative-draft-model-path is {path!r}; "
            "allowed: one of both. Leave the model out, or set runs_model = True in the class."
        )
    if drafter.wants_states and server_args.disaggregation_mode != "null":
        yield (
            f"{given}, whose wants_states is True, and --disaggregation-mode is "
            f"{server_args.disaggregation_mode!r}; allowed: 'null', since no hidden states are "
            "sent. Leave one of them out."
        )
