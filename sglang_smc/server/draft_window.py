"""Check the window of a draft's attention, and choose that of a draft for short texts.

The flags are SGLang's, --speculative-draft-window-size and --speculative-draft-sink-size. Here they
act on every kind of draft, in prompts and in rounds (`models.windows`).
"""

import logging
from collections.abc import Iterator

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from sglang_smc.models import head_kinds as kinds
from sglang_smc.models.draft_config import trained_length
from sglang_smc.models.supported import draft_config
from sglang_smc.options.server import DEFAULTS, WHOLE_TEXT
from sglang_smc.upstream import Arguments, draft_sink, model_config_of

logger = logging.getLogger(__name__)

_WINDOW = "--speculative-draft-window-size"
_SINK = "--speculative-draft-sink-size"


def problems(server_args: Arguments) -> Iterator[str]:
    """Yield why the window that is given cannot be that of the draft."""
    view = resolved_view(server_args)
    size = view.speculative_draft_window_size
    sink = draft_sink(view)
    if size == WHOLE_TEXT and sink:
        yield (
            f"{_SINK} is {sink} with {_WINDOW} 0; allowed: beside a window, since all of a text "
            "has its first tokens. Leave it out."
        )
    if size in (None, WHOLE_TEXT):
        return
    if view.speculative_draft_model_path is None:
        yield (
            f"{_WINDOW} is {size} without a model that drafts; allowed: with "
            "--speculative-draft-model-path or a target's MTP layer. Leave it out."
        )
        return
    config = draft_config(server_args)
    if _is_latent(config):
        yield (
            f"{_WINDOW} is {size} with a draft over latents (MLA); allowed: with drafts of "
            "ordinary attention. Leave it out."
        )
    num_columns = (view.speculative_num_steps or DEFAULTS.num_steps) + 1
    if kinds.drafter_of(config).is_block and size < num_columns:
        yield (
            f"{_WINDOW} is {size} with blocks of {num_columns} tokens; allowed: at least as many, "
            f"since a block's tokens see each other. Pass {num_columns} or more."
        )


def choose(server_args: Arguments) -> None:
    """Give a draft for short texts a window of their length, unless one is given; log what holds.

    Then a distance between tokens that its training had not never occurs (RoPE, arXiv 2104.09864,
    sees distances alone).
    """
    config = draft_config(server_args)
    size = resolved_view(server_args).speculative_draft_window_size
    if (told := beyond_training(server_args, config)) is not None:
        logger.warning("%s", told)
        if size is None and not _is_latent(config):
            server_args.speculative_draft_window_size = trained_length(config.hf_text_config)
    if size == WHOLE_TEXT:
        server_args.speculative_draft_window_size = None


def beyond_training(server_args: Arguments, draft: ModelConfig) -> str | None:
    """Return a warning if the draft was trained on shorter texts than the server may get."""
    longest = trained_length(draft.hf_text_config)
    context = model_config_of(server_args).context_len
    if longest >= context:
        return None
    size = resolved_view(server_args).speculative_draft_window_size
    if size is None and not _is_latent(draft):  # as `choose` sets it
        size = longest
    if size is not None and size <= longest:
        effect = (
            f"behind that each of its tokens attends to the last {size} alone ({_WINDOW}; 0: to "
            "all, at distances that it was not trained on)."
        )
    else:
        effect = f"from token {longest} on fewer of its draft tokens are kept, which costs speed."
        effect += f" {_WINDOW} {longest} may help." if size is not None else ""
    path = server_args.speculative_draft_model_path
    return (
        f"--speculative-draft-model-path {path} was trained on texts of up to {longest} tokens, "
        f"and this server's have up to {context}: {effect} In mode exact texts are the target's "
        "all the same."
    )


def _is_latent(config: ModelConfig) -> bool:
    return config.attention_arch == AttentionArch.MLA
