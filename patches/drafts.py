"""Read a draft's checkpoint in the format it is published in, and load it as a whole model.

SGLang's own reader of configurations knows no checkpoint of `speculators`, and takes that of
EAGLE's authors for a language model.

SGLang loads some checkpoints, given as a draft, for their extra layers alone (MTP, NextN), which
read a target's hidden states. In SMC that holds for the target's own checkpoint, and for one that
names the class of such a layer.

SGLang sizes the target's KV pool by the draft's configuration, before it builds a worker. So these
hooks are installed earlier than those of `server.hooks.SMC`.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.configs.model_config import ModelConfig

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
