"""Read a draft's checkpoint in the format it is published in, and load it as a whole model.

SGLang's own reader of configurations knows no checkpoint of `speculators`, and takes that of
EAGLE's authors for a language model.

SGLang loads some checkpoints, given as a draft, for their extra layers alone (MTP, NextN), which
read a target's hidden states. In SMC that holds for the target's own checkpoint, and for one that
names the class of such a layer.

A draft runs at the target's positions, however long the texts are that it was trained on, and by
its own configuration, whatever `--json-model-override-args` makes of the target's.

SGLang sizes the target's KV pool by the draft's configuration, before it builds a worker. So these
hooks are installed earlier than those of `server.hooks.SMC`.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.configs.model_config import ModelConfig

from sglang_smc import upstream
from sglang_smc.models import draft_config
from sglang_smc.process import is_mtp_layer, is_smc
from sglang_smc.server.hooks import Hooks

PATCHES = Hooks(retire_when="A registered algorithm says what its draft is.")


@PATCHES.on(
    "sglang.srt.utils.hf_transformers.config.get_config",
    "srt/utils/hf_transformers/config.py:335 (AutoConfig asks for a model_type)",
    "srt/configs/model_config.py:620 (of target and draft)",
    "srt/arg_groups/boundary_reduction.py:81 (of the draft)",
    why="A checkpoint of speculators ends in 'Unrecognized model', and the registry of parsers "
    "(--model-config-parser) is not asked by all who read a draft's configuration.",
    retire_when="SGLang reads these formats.",
)
def read_published(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Translate a published draft's configuration to the keys of SGLang's classes.

    Any other is read as before. Without SMC a server ends before, as it does without this package.
    """
    return draft_config.read(original, *args, **kwargs)


@PATCHES.on(
    "sglang.srt.configs.model_config.ModelConfig._config_draft_model",
    "srt/configs/model_config.py:1010 (all that is put in place)",
    why="For drafts SGLang puts the class of extra layers in place of Qwen3-MoE, GLM-4.5, "
    "DeepSeek V3 and some twenty others, whatever the algorithm is.",
)
def keep_architecture(original: Callable, config: ModelConfig) -> None:
    """Load a draft as the architecture that its checkpoint names, but an MTP layer."""
    if not (config.is_draft_model and is_smc(config)) or is_mtp_layer(config):
        original(config)


@PATCHES.on(
    "sglang.srt.configs.model_config.ModelConfig._derive_model_shapes",
    "srt/configs/model_config.py:1602 (num_nextn_predict_layers)",
    "srt/model_executor/model_runner_components/layer_setup.py:199 (the draft's own pool)",
    "srt/model_executor/model_runner_components/spec_aux_hidden_state.py:156 (the target's "
    "runner, which plans for both)",
    why="SGLang counts num_nextn_predict_layers for a draft whose checkpoint has extra layers.",
)
def count_own_layers(original: Callable, config: ModelConfig) -> None:
    """Size the KV of a draft by all of its layers.

    `hf_config` keeps the number of extra layers: the models skip their weights by it.
    """
    original(config)
    if config.is_draft_model and is_smc(config) and not is_mtp_layer(config):
        config.num_nextn_predict_layers = None


@PATCHES.on(
    "sglang.srt.configs.model_config.ModelConfig._derive_context_length",
    "srt/configs/model_config.py:1291 (refuses a draft of fewer positions than the target)",
    "srt/utils/common.py:4999 (tables of rotations are extended to the context)",
    why="SGLang refuses such a draft, or raises max_position_embeddings where an environment "
    "variable says so, by which factors of some rotations change.",
    retire_when="SGLang extends a draft's tables, and leaves its rotations as they were trained.",
)
def cover_context(original: Callable, config: ModelConfig, context_length: int | None) -> None:
    """Extend the positions of a draft to the target's, with the rotations that it was trained on.

    Without SMC, and for targets, nothing changes.
    """
    if config.is_draft_model and is_smc(config) and context_length is not None:
        draft_config.extend_positions(config.hf_text_config, context_length)
    original(config, context_length)


@PATCHES.on(
    "sglang.srt.configs.model_config.ModelConfig.from_server_args",
    "srt/configs/model_config.py:924 (json_model_override_args, whatever model it is)",
    why="SGLang overrides the draft's configuration by --json-model-override-args, too: YaRN for a "
    "longer target would scale the rotations of a head that was not trained with it.",
    retire_when="SGLang has overrides of a draft's configuration apart.",
)
def leave_overrides_to_target(
    original: Callable,
    server_args: upstream.Arguments,
    model_path: str | None = None,
    model_revision: str | None = None,
    is_draft_model: bool = False,
    context_length: int | None = None,
    **more: Any,
) -> ModelConfig:
    """Override the target's configuration alone, from which an MTP layer of its own is read, too.

    Without SMC nothing changes.
    """
    if is_draft_model and is_smc(server_args):
        told = server_args.json_model_override_args
        is_targets = model_path in (None, upstream.resolved(server_args).model_path)
        own = {"json_model_override_args": told if is_targets else "{}"}
        server_args = upstream.ReplacedArguments(server_args, **own)
    more |= {"is_draft_model": is_draft_model, "context_length": context_length}
    return original(server_args, model_path, model_revision, **more)
