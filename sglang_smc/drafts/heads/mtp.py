"""MTP layers (arXiv 2412.19437): a layer of the target's own checkpoint, or of one beside it."""

from sglang_smc.drafts.heads import eagle
from sglang_smc.drafts.heads.base import HeadKind, Refused

MTP = {
    "DeepseekV3ForCausalLM": "DeepseekV3ForCausalLMNextN",
    "Glm4MoeForCausalLM": "Glm4MoeForCausalLMNextN",
    "Glm4MoeLiteForCausalLM": "Glm4MoeLiteForCausalLMNextN",
    "MiMoForCausalLM": "MiMoMTP",
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
}
"""SGLang's classes of MTP layers, by the class of the target whose checkpoint has one."""

_DRAFTER = "sglang_smc.proposers.eagle3:MTPHead"
_ALONE = MTP["MiMoForCausalLM"]  # it has checkpoints of its own
_WITHIN = tuple(dict.fromkeys(name for name in MTP.values() if name != _ALONE))

HEADS = (
    HeadKind("mtp", _WITHIN, _DRAFTER),
    HeadKind("mtp", (_ALONE,), _DRAFTER, eagle.sizes),
)
REFUSED = (
    Refused("an MTP layer in the format of speculators, which SGLang has no class for", type="mtp"),
    Refused("an MTP layer of a kind that is not supported", part="NextN"),
    Refused("an MTP layer of a kind that is not supported", part="MTP"),
)
