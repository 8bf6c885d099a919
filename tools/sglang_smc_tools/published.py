"""List published drafts of the models most served: for `doctor`, docs/drafts.md, docs/support.md.

No hub is reached here, so none was opened: names, formats and K are those of publishers' cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MODE = "exact"
"""The mode for all of them: what a draft never proposes costs tokens there, and no fidelity."""

UNTRIED = "not tried here: no hub"

MTP_LAYER = "its own MTP layer"
SPECULATORS = "speculators"
"""Begins a format that is a `speculators_model_type`."""

DENSE = 8
SPARSE = 1
"""N for up to 8 users: in a mixture of experts each chain visits experts of its own."""


class PublishedDraft(NamedTuple):
    """A row: the draft to take for some models, or why there is none."""

    target: str  # the models, as pages name them
    names: tuple[str, ...]  # with which their names begin, in lower case
    architectures: tuple[str, ...]  # which their configurations name
    draft: str  # a repository on the Hugging Face Hub, or `MTP_LAYER`
    format: str  # SGLang's class in its configuration, or `SPECULATORS` and a type; "" if unknown
    num_particles: int = 0  # N; 0 where it does not run
    num_steps: int | None = None  # K; None for the checkpoint's own
    refused: str = ""  # what the server's error says of the target, or else of the draft

    @property
    def runs(self) -> bool:
        return not self.refused

    @property
    def steps(self) -> str:
        return str(self.num_steps or "the checkpoint's")


_LLAMA = ("LlamaForCausalLM",)
_QWEN3 = ("Qwen3ForCausalLM",)
_QWEN3_MOE = ("Qwen3MoeForCausalLM",)
_QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
_QWEN3_5_MOE = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
_GPT_OSS = ("GptOssForCausalLM",)
_DEEPSEEK = ("DeepseekV3ForCausalLM",)
_GEMMA3 = ("Gemma3ForConditionalGeneration",)
_GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")

_EAGLE3 = "LlamaForCausalLMEagle3"
_RECURRENT = "a recurrent (Mamba-like) state"
_SPARSE_ATTENTION = "sparse attention"

ROWS = (
    PublishedDraft(
        *("Llama 3.1 8B", ("llama-3.1-8b", "meta-llama-3.1-8b"), _LLAMA),
        *("lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge", _EAGLE3, DENSE, 3),
    ),
    PublishedDraft(
        *("Llama 3.2 3B", ("llama-3.2-3b",), _LLAMA),
        *("rasyosef/Llama-3.2-3B-Instruct-DSpark", "speculators dspark", DENSE),
    ),
    PublishedDraft(
        *("Llama 3.3 70B", ("llama-3.3-70b",), _LLAMA),
        *("lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", _EAGLE3, DENSE, 3),
    ),
    PublishedDraft(
        *("Qwen3 4B", ("qwen3-4b",), _QWEN3),
        *("deepseek-ai/dspark_qwen3_4b_block7", "Qwen3DSparkModel", DENSE, 7),
    ),
    PublishedDraft(
        *("Qwen3 8B", ("qwen3-8b",), _QWEN3),
        *("deepseek-ai/dspark_qwen3_8b_block7", "Qwen3DSparkModel", DENSE, 7),
    ),
    PublishedDraft(
        *("Qwen3 14B", ("qwen3-14b",), _QWEN3),
        *("deepseek-ai/dspark_qwen3_14b_block7", "Qwen3DSparkModel", DENSE, 7),
    ),
    PublishedDraft(
        *("Qwen3 32B", ("qwen3-32b",), _QWEN3),
        *("RedHatAI/Qwen3-32B-speculator.eagle3", "speculators eagle3", DENSE),
    ),
    PublishedDraft(
        *("Qwen3 30B-A3B", ("qwen3-30b-a3b",), _QWEN3_MOE),
        *("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3", "speculators eagle3", SPARSE),
    ),
    PublishedDraft(
        *("Qwen3 235B-A22B", ("qwen3-235b-a22b",), _QWEN3_MOE),
        *("lmsys/Qwen3-235B-A22B-EAGLE3", _EAGLE3, SPARSE, 3),
    ),
    PublishedDraft(
        *("Qwen3-Next", ("qwen3-next", "qwen3-coder-next"), ("Qwen3NextForCausalLM",)),
        *(MTP_LAYER, "Qwen3NextForCausalLMMTP"),
        refused=_RECURRENT,
    ),
    PublishedDraft(
        *("Qwen3.5, 3.6, 3.8, dense", ("qwen3.5", "qwen3.6", "qwen3.8"), _QWEN3_5),
        *(MTP_LAYER, "Qwen3_5ForCausalLMMTP", DENSE, 3),
    ),
    PublishedDraft(
        *("Qwen3.8 27B", ("qwen3.8-27b",), _QWEN3_5),
        *("RadixArk/Qwen3.8-27B-DSpark", "DSparkDraftModel", DENSE, 7),
    ),
    PublishedDraft(
        *("Qwen3.8 27B", ("qwen3.8-27b",), _QWEN3_5),
        *("incoai/Qwen3.8-27B-DFlash2", "DFlash2DraftModel"),
        refused="a DFlash2 head, which walks through candidates",
    ),
    PublishedDraft(
        *("Qwen3.5, 3.6, 3.8, MoE", ("qwen3.5", "qwen3.6", "qwen3.8"), _QWEN3_5_MOE),
        *(MTP_LAYER, "Qwen3_5ForCausalLMMTP", SPARSE, 3),
    ),
    PublishedDraft(
        *("Qwen3.6 35B-A3B", ("qwen3.6-35b-a3b",), _QWEN3_5_MOE),
        *("RedHatAI/Qwen3.6-35B-A3B-speculator.dspark", "speculators dspark", SPARSE),
    ),
    PublishedDraft(
        *("gpt-oss 20b", ("gpt-oss-20b",), _GPT_OSS),
        *("RedHatAI/gpt-oss-20b-speculator.eagle3", "speculators eagle3", SPARSE),
    ),
    PublishedDraft(
        *("gpt-oss 120b", ("gpt-oss-120b",), _GPT_OSS),
        *("RedHatAI/gpt-oss-120b-speculator.eagle3", "speculators eagle3", SPARSE),
    ),
    PublishedDraft(
        *("DeepSeek V3, V3.1, R1", ("deepseek-v3", "deepseek-v3.1", "deepseek-r1"), _DEEPSEEK),
        *(MTP_LAYER, "DeepseekV3ForCausalLMNextN", SPARSE, 3),
    ),
    PublishedDraft(
        *("DeepSeek V3.2", ("deepseek-v3.2",), ("DeepseekV32ForCausalLM",)),
        *(MTP_LAYER, "DeepseekV3ForCausalLMNextN"),
        refused=_SPARSE_ATTENTION,
    ),
    PublishedDraft(
        *("DeepSeek V4", ("deepseek-v4",), ("DeepseekV4ForCausalLM",)),
        *("deepseek-ai/DeepSeek-V4-Pro-DSpark", "DeepseekV4ForCausalLMDSpark"),
        refused=_SPARSE_ATTENTION,
    ),
    PublishedDraft(
        *("GLM-4.5, 4.6, 4.7", ("glm-4.5", "glm-4.6", "glm-4.7"), ("Glm4MoeForCausalLM",)),
        *(MTP_LAYER, "Glm4MoeForCausalLMNextN", SPARSE, 3),
    ),
    PublishedDraft(
        *("GLM-4.7-Flash", ("glm-4.7-flash",), ("Glm4MoeLiteForCausalLM",)),
        *(MTP_LAYER, "Glm4MoeLiteForCausalLMNextN", SPARSE, 3),
    ),
    PublishedDraft(
        *("GLM-5, 5.1, 5.2", ("glm-5", "glm-5.1", "glm-5.2"), ("GlmMoeDsaForCausalLM",)),
        *("RedHatAI/GLM-5.2-speculator.dspark", "speculators dspark"),
        refused=_SPARSE_ATTENTION,
    ),
    PublishedDraft(
        *("GLM-5.3-Flash", ("glm-5.3-flash",), ("Glm5NextForConditionalGeneration",)),
        *("incoai/GLM-5.3-Flash-DFlash2", "DFlash2DraftModel"),
        refused=_RECURRENT,
    ),
    PublishedDraft(
        *("Kimi K2", ("kimi-k2",), _DEEPSEEK),
        *("AQ-MedAI/Kimi-K2-Instruct-eagle3", _EAGLE3, SPARSE, 3),
    ),
    PublishedDraft(
        "Kimi K2.5, 2.6, 2.7",
        *(("kimi-k2.5", "kimi-k2.6", "kimi-k2.7"), ("KimiK25ForConditionalGeneration",)),
        *("lightseekorg/kimi-k2.6-eagle3-mla", "Eagle3DeepseekV2ForCausalLM"),
        refused="inputs that are no text",
    ),
    PublishedDraft(
        *("Kimi K3, K3.1", ("kimi-k3", "kimi-k3.1"), ("KimiK3ForConditionalGeneration",)),
        *("Inferact/Kimi-K3-DSpark", "K3DSparkModel"),
        refused=_RECURRENT,
    ),
    PublishedDraft(
        "MiniMax M2 to M2.7",
        ("minimax-m2", "minimax-m2.1", "minimax-m2.5", "minimax-m2.7"),
        *(("MiniMaxM2ForCausalLM",), "thoughtworks/MiniMax-M2.5-Eagle3", _EAGLE3, SPARSE, 5),
    ),
    PublishedDraft(
        *("MiniMax M3", ("minimax-m3",), ("MiniMaxM3SparseForConditionalGeneration",)),
        *("Inferact/MiniMax-M3-EAGLE3", ""),
        refused=_SPARSE_ATTENTION,
    ),
    PublishedDraft(
        *("Gemma 3 4B, 12B, 27B", ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"), _GEMMA3),
        *("google/gemma-3-270m-it", "Gemma3ForCausalLM", DENSE, 8),
    ),
    PublishedDraft(
        *("Gemma 4", ("gemma-4",), _GEMMA4),
        *("google/gemma-4-31B-it-assistant", "Gemma4AssistantForCausalLM"),
        refused="layers whose heads differ in width",
    ),
    PublishedDraft(
        "Nemotron 3, 3.5",
        ("nvidia-nemotron-3", "nvidia-nemotron-3.5", "nemotron-3", "nemotron-3.5"),
        ("NemotronHForCausalLM",),
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark",
        "Qwen3DSparkModel",
        refused=_RECURRENT,
    ),
)


def drafts_of(model: str, architecture: str | None = None) -> Iterator[PublishedDraft]:
    """Yield the rows of a model.

    Args:
        model: its name, with or without its owner, or its folder.
        architecture: that its configuration names, if this can be read: rows of another are none,
            and where no row has the name, all of this architecture are meant.
    """
    rows = [one for one in ROWS if architecture is None or architecture in one.architectures]
    name = model.rstrip("/").rpartition("/")[2].lower()
    named = [one for one in rows if any(_begins(name, known) for known in one.names)]
    yield from named or (rows if architecture else ())


def _begins(name: str, known: str) -> bool:
    """Return whether a name is that of a known model, or of one of its sizes and variants.

    A distilled model has another's architecture.
    """
    return re.match(rf"{re.escape(known)}(?![\w.])(?!-distill)", name) is not None
