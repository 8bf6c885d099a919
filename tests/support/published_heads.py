"""Heads as trainers publish them: random checkpoints, and their drafts by transformers' layers."""

import json
from pathlib import Path
from typing import Any

import torch
from head_laws import PairDraft
from safetensors.torch import load_file, save_file
from support.families import LATENT as LATENTS
from support.families import VOCAB
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3MLP
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from sglang_smc_tools.distill.heads import Midlayer

EAGLE = "eagle"
EAGLE_QWEN2 = "eagle of qwen2"
IDS = "eagle_aux_hidden_state_layer_ids"
FULL = "eagle3 with all that one may have"
WINDOW = 9  # pairs that the first layer of it attends to, a pair's own among them
LATENT = "eagle3 over latents"
#: What their config.json says beside sizes of the target.
PUBLISHED: dict[str, dict[str, Any]] = {
    EAGLE: {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "bias": False,
    },
    EAGLE_QWEN2: {
        "architectures": ["Qwen2ForCausalLMEagle"],
        "model_type": "qwen2",
        "num_hidden_layers": 1,
    },
    FULL: {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "qwen3",
        "mlp_bias": False,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "hidden_size": 24,
        "target_hidden_size": 32,
        "draft_vocab_size": VOCAB,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
        "eagle_config": {IDS: [0, 2], "norm_before_fc": True},
    },
    LATENT: {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 1,
        "hidden_size": 24,
        "target_hidden_size": 32,
        "draft_vocab_size": VOCAB,
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {IDS: [1]},
        **{name: LATENTS[name] for name in LATENTS if "rank" in name or "head_dim" in name},
    },
}
STD = 0.15
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "max_position_embeddings", "rope_parameters", "tie_word_embeddings"),
)


class NormedFirst(Midlayer):
    """EAGLE-3's layer with norms of queries and keys, whose residual is the normalized state."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own: Any = Qwen3Attention(config, 0)
        own.q_proj, own.k_proj, own.v_proj = (
            self.self_attn.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")
        )
        self.self_attn = own

    def forward(self, embedded: Any, states: Any, at: Any, cache: Any, mask: Any = None) -> Any:
        states = self.hidden_norm(states)
        read = torch.cat([self.input_layernorm(embedded), states], -1)
        attended, _ = self.self_attn(read, at, mask, past_key_values=cache)
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class LatentLayer(nn.Module):
    """EAGLE-3's layer with DeepSeek's attention."""

    forward = Midlayer.forward

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.self_attn = DeepseekV3Attention(config, 0)
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            size = self.self_attn.get_submodule(name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * width, size, bias=False))
        self.mlp = DeepseekV3MLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)


class Published(nn.Module):
    """The weights of a head's checkpoint, by its config.json, and what they compute.

    Args:
        told: the config.json of an EAGLE head, or of an EAGLE-3 head with all that SGLang's class
            takes.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.config: Any = AutoConfig.for_model(**told, attn_implementation="sdpa")
        width = told["hidden_size"]
        eps = told["rms_norm_eps"]
        count = told["num_hidden_layers"]
        self.layer_ids: list[int] | None = told.get("eagle_config", {}).get(IDS)
        self.embed_tokens = nn.Embedding(told["vocab_size"], width)
        first = {"deepseek_v3": LatentLayer, "qwen3": NormedFirst}.get(told["model_type"], Midlayer)
        later = {"qwen2": Qwen2DecoderLayer, "qwen3": Qwen3DecoderLayer}
        layer = later.get(told["model_type"], LlamaDecoderLayer)
        num_later = count - (self.layer_ids is not None)  # the first of EAGLE-3 is another
        layers: list[nn.Module] = [layer(self.config, count - 1) for _ in range(num_later)]
        self.rotary = LlamaRotaryEmbedding(self.config)
        if self.layer_ids is None:
            self.fc = nn.Linear(2 * width, width, bias=told.get("bias", True))
            layers[0].input_layernorm = nn.Identity()
        else:
            reads = told["target_hidden_size"]
            self.fc = nn.Linear(len(self.layer_ids) * reads, width, bias=False)
            self.input_norm = nn.Identity()
            if told["eagle_config"].get("norm_before_fc"):
                self.input_norm = nn.RMSNorm(len(self.layer_ids) * reads, eps)
            self.fc_norm = nn.ModuleList(nn.RMSNorm(reads, eps) for _ in self.layer_ids)
            layers.insert(0, first(self.config))
            self.norm = nn.RMSNorm(width, eps)
            self.lm_head = nn.Linear(width, told["vocab_size"], bias=False)
        self.layers = nn.ModuleList(layers)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Map the target's states ``[R, L, F]`` to those of pairs ``[R, L, H]``."""
        assert self.layer_ids is not None
        parts = self.input_norm(features).chunk(len(self.layer_ids), -1)
        normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(torch.cat(normed, -1))

    def forward(self, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output ``[R, L, H]`` for pairs."""
        at = self.rotary(before, torch.arange(before.shape[1]).unsqueeze(0))
        if self.layer_ids is None:
            hidden = self.fc(torch.cat([embedded, before], -1))
            later = self.layers
        else:
            seen = self.mask(before.shape[1])
            hidden = self.layers[0](embedded, before, at, DynamicCache(), seen)
            later = self.layers[1:]
        for layer in later:
            hidden = layer(hidden, position_embeddings=at)
        return hidden

    def mask(self, length: int) -> torch.Tensor | None:
        """What a window shows the first layer, ``[1, 1, L, L]`` bool; None without one."""
        if "sliding_attention" not in (vars(self.config).get("layer_types") or ()):
            return None
        behind = torch.arange(length).unsqueeze(1) - torch.arange(length)
        return ((behind >= 0) & (behind < WINDOW))[None, None]

    @staticmethod
    def renamed(name: str) -> str:
        """SGLang's name of a weight: later layers have no norm of embeddings."""
        return name.replace("layers.1.input_layernorm", "layers.1.hidden_norm")


class PublishedDraft(PairDraft):
    """The law of a head that `write_head` wrote."""

    def __init__(self, target: str, folder: str, num_steps: int) -> None:
        super().__init__(target, num_steps)
        self.told = json.loads(Path(folder, "config.json").read_text())
        self.head = Published(self.told)
        weights = load_file(Path(folder, "model.safetensors"))
        names = {self.head.renamed(name): name for name in self.head.state_dict()}
        self.head.load_state_dict({names[name]: weight for name, weight in weights.items()})
        self.head.double().eval()

    def states(self, texts: torch.Tensor) -> torch.Tensor:
        if self.head.layer_ids is None:
            return super().states(texts)
        states = self.model(texts, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in self.head.layer_ids], -1)
        return self.head.project(features)

    def run(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.head.layer_ids is None:
            own = self.head(self.head.embed_tokens(tokens), before)  # it is not the target's
            return own, self.model.lm_head(own)
        normed = self.head.norm(self.head(self.head.embed_tokens(tokens), before))
        return normed, self.head.lm_head(normed)


def write_head(kind: str, target: str, folder: Path) -> str:
    """Write a random head in the form of published ones; see `Published`."""
    of_target = AutoConfig.from_pretrained(target)
    told = {name: getattr(of_target, name) for name in SIZES} | PUBLISHED[kind]
    torch.manual_seed(5)
    head = Published(told)
    for name, weight in head.named_parameters():
        nn.init.normal_(weight, 1.0 if weight.ndim == 1 and "norm" in name else 0.0, STD)
    folder.mkdir()
    weights = {
        head.renamed(name): weight.contiguous() for name, weight in head.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(told))
    return str(folder)
