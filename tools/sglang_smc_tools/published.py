"""List published drafts of the models most served: for `doctor`, docs/drafts.md, docs/families.md.

No hub is reached here, so none was opened: names and formats are those of publishers' cards, and
configurations those that the named public source quotes, or trains by.
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


class PublishedDraft(NamedTuple):
    """A row: the draft to take for some models, or why there is none."""

    target: str  # the models, as pages name them
    names: tuple[str, ...]  # with which their names begin, in lower case
    architectures: tuple[str, ...]  # which their configurations name
    draft: str  # a repository on the Hugging Face Hub, or `MTP_LAYER`
    format: str  # SGLang's class in its configuration, or `SPECULATORS` and a type; "" if unknown
    refused: str = ""  # what the server's error says of the target, or else of the draft
    context: int | None = None  # tokens of its texts, by its configuration
    dtype: str = ""
    block: int | None = None  # columns of a block
    window: int | None = None  # tokens that it attends to
    source: str = ""  # of what its configuration says; "" where none was seen

    @property
    def runs(self) -> bool:
        return not self.refused

    @property
    def configuration(self) -> str:
        """Return what its configuration says that decides its fit, and where that stands."""
        if not self.source:
            return "not seen"
        told = [f"{self.context:,} tokens", self.dtype]
        told += [f"block of {self.block}"] if self.block else []
        told += [f"window of {self.window:,}"] if self.window else []
        return f"{', '.join(told)} ({self.source})"


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
        target="Llama 3.1 8B",
        names=("llama-3.1-8b", "meta-llama-3.1-8b"),
        architectures=_LLAMA,
        draft="lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge",
        format=_EAGLE3,
        context=2048,
        dtype="float16",
        source="SpecForge configs/llama3-8B-eagle3.json",
    ),
    PublishedDraft(
        target="Llama 3.2 3B",
        names=("llama-3.2-3b",),
        architectures=_LLAMA,
        draft="rasyosef/Llama-3.2-3B-Instruct-DSpark",
        format="speculators dspark",
        context=131072,
        dtype="bfloat16",
        block=8,
        source="speculators 0.9.0 on this target",
    ),
    PublishedDraft(
        target="Llama 3.3 70B",
        names=("llama-3.3-70b",),
        architectures=_LLAMA,
        draft="lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge",
        format=_EAGLE3,
        context=4096,
        dtype="float16",
        source="SpecForge configs/llama3-70B-ealge3.json",
    ),
    PublishedDraft(
        target="Qwen3 4B",
        names=("qwen3-4b",),
        architectures=_QWEN3,
        draft="deepseek-ai/dspark_qwen3_4b_block7",
        format="Qwen3DSparkModel",
        context=40960,
        dtype="bfloat16",
        block=7,
        source="DeepSpec config/dspark/dspark_qwen3_4b.py",
    ),
    PublishedDraft(
        target="Qwen3 8B",
        names=("qwen3-8b",),
        architectures=_QWEN3,
        draft="deepseek-ai/dspark_qwen3_8b_block7",
        format="Qwen3DSparkModel",
        context=40960,
        dtype="bfloat16",
        block=7,
        source="DeepSpec config/dspark/dspark_qwen3_8b.py",
    ),
    PublishedDraft(
        target="Qwen3 14B",
        names=("qwen3-14b",),
        architectures=_QWEN3,
        draft="deepseek-ai/dspark_qwen3_14b_block7",
        format="Qwen3DSparkModel",
        context=40960,
        dtype="bfloat16",
        block=7,
        source="DeepSpec config/dspark/dspark_qwen3_14b.py",
    ),
    PublishedDraft(
        target="Qwen3 32B",
        names=("qwen3-32b",),
        architectures=_QWEN3,
        draft="RedHatAI/Qwen3-32B-speculator.eagle3",
        format="speculators eagle3",
    ),
    PublishedDraft(
        target="Qwen3 30B-A3B",
        names=("qwen3-30b-a3b",),
        architectures=_QWEN3_MOE,
        draft="RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",
        format="speculators eagle3",
        context=40960,
        dtype="bfloat16",
        source="as RedHatAI's others of speculators",
    ),
    PublishedDraft(
        target="Qwen3 235B-A22B",
        names=("qwen3-235b-a22b",),
        architectures=_QWEN3_MOE,
        draft="lmsys/Qwen3-235B-A22B-EAGLE3",
        format=_EAGLE3,
    ),
    PublishedDraft(
        target="Qwen3-Next",
        names=("qwen3-next", "qwen3-coder-next"),
        architectures=("Qwen3NextForCausalLM",),
        draft=MTP_LAYER,
        format="Qwen3NextForCausalLMMTP",
        refused=_RECURRENT,
    ),
    PublishedDraft(
        target="Qwen3.5, 3.6, 3.8, dense",
        names=("qwen3.5", "qwen3.6", "qwen3.8"),
        architectures=_QWEN3_5,
        draft=MTP_LAYER,
        format="Qwen3_5ForCausalLMMTP",
        context=262144,
        dtype="bfloat16",
        source="aiconfigurator model_configs/",
    ),
    PublishedDraft(
        target="Qwen3.8 27B",
        names=("qwen3.8-27b",),
        architectures=_QWEN3_5,
        draft="RadixArk/Qwen3.8-27B-DSpark",
        format="DSparkDraftModel",
    ),
    PublishedDraft(
        target="Qwen3.8 27B",
        names=("qwen3.8-27b",),
        architectures=_QWEN3_5,
        draft="incoai/Qwen3.8-27B-DFlash2",
        format="DFlash2DraftModel",
        context=262144,
        dtype="bfloat16",
        block=8,
        window=4096,
        source="as Flash-Next exports DFlash2",
    ),
    PublishedDraft(
        target="Qwen3.5, 3.6, 3.8, MoE",
        names=("qwen3.5", "qwen3.6", "qwen3.8"),
        architectures=_QWEN3_5_MOE,
        draft=MTP_LAYER,
        format="Qwen3_5ForCausalLMMTP",
        context=262144,
        dtype="bfloat16",
        source="aiconfigurator model_configs/",
    ),
    PublishedDraft(
        target="Qwen3.6 35B-A3B",
        names=("qwen3.6-35b-a3b",),
        architectures=_QWEN3_5_MOE,
        draft="RedHatAI/Qwen3.6-35B-A3B-speculator.dspark",
        format="speculators dspark",
        context=262144,
        dtype="bfloat16",
        block=8,
        window=2048,
        source="quoted by a test of vllm.cpp",
    ),
    PublishedDraft(
        target="gpt-oss 20b",
        names=("gpt-oss-20b",),
        architectures=_GPT_OSS,
        draft="RedHatAI/gpt-oss-20b-speculator.eagle3",
        format="speculators eagle3",
        context=131072,
        dtype="bfloat16",
        source="RedHatAI's, quoted",
    ),
    PublishedDraft(
        target="gpt-oss 120b",
        names=("gpt-oss-120b",),
        architectures=_GPT_OSS,
        draft="RedHatAI/gpt-oss-120b-speculator.eagle3",
        format="speculators eagle3",
        context=131072,
        dtype="bfloat16",
        source="as RedHatAI's of 20b",
    ),
    PublishedDraft(
        target="DeepSeek V3, V3.1, R1",
        names=("deepseek-v3", "deepseek-v3.1", "deepseek-r1"),
        architectures=_DEEPSEEK,
        draft=MTP_LAYER,
        format="DeepseekV3ForCausalLMNextN",
        context=163840,
        dtype="bfloat16",
        source="aiconfigurator model_configs/",
    ),
    PublishedDraft(
        target="DeepSeek V3.2",
        names=("deepseek-v3.2",),
        architectures=("DeepseekV32ForCausalLM",),
        draft=MTP_LAYER,
        format="DeepseekV3ForCausalLMNextN",
        refused=_SPARSE_ATTENTION,
        context=163840,
        dtype="bfloat16",
        source="aiconfigurator model_configs/",
    ),
    PublishedDraft(
        target="DeepSeek V4",
        names=("deepseek-v4",),
        architectures=("DeepseekV4ForCausalLM",),
        draft="deepseek-ai/DeepSeek-V4-Pro-DSpark",
        format="DeepseekV4ForCausalLMDSpark",
        refused=_SPARSE_ATTENTION,
    ),
    PublishedDraft(
        target="GLM-4.5, 4.6, 4.7",
        names=("glm-4.5", "glm-4.6", "glm-4.7"),
        architectures=("Glm4MoeForCausalLM",),
        draft=MTP_LAYER,
        format="Glm4MoeForCausalLMNextN",
        context=131072,
        dtype="bfloat16",
        source="a test of vlm",
    ),
    PublishedDraft(
        target="GLM-4.7-Flash",
        names=("glm-4.7-flash",),
        architectures=("Glm4MoeLiteForCausalLM",),
        draft=MTP_LAYER,
        format="Glm4MoeLiteForCausalLMNextN",
    ),
    PublishedDraft(
        target="GLM-5, 5.1, 5.2",
        names=("glm-5", "glm-5.1", "glm-5.2"),
        architectures=("GlmMoeDsaForCausalLM",),
        draft="RedHatAI/GLM-5.2-speculator.dspark",
        format="speculators dspark",
        refused=_SPARSE_ATTENTION,
        context=1048576,
        dtype="bfloat16",
        block=8,
        window=2048,
        source="RedHatAI's of GLM-5.3, quoted by tensorfold",
    ),
    PublishedDraft(
        target="GLM-5.3-Flash",
        names=("glm-5.3-flash",),
        architectures=("Glm5NextForConditionalGeneration",),
        draft="incoai/GLM-5.3-Flash-DFlash2",
        format="DFlash2DraftModel",
        refused=_RECURRENT,
    ),
    PublishedDraft(
        target="Kimi K2",
        names=("kimi-k2",),
        architectures=_DEEPSEEK,
        draft="AQ-MedAI/Kimi-K2-Instruct-eagle3",
        format=_EAGLE3,
        context=131072,
        dtype="bfloat16",
        source="SpecForge configs/deepseek-v3-671b-eagle3.json and its card",
    ),
    PublishedDraft(
        target="Kimi K2.5, 2.6, 2.7",
        names=("kimi-k2.5", "kimi-k2.6", "kimi-k2.7"),
        architectures=("KimiK25ForConditionalGeneration",),
        draft="lightseekorg/kimi-k2.6-eagle3-mla",
        format="Eagle3DeepseekV2ForCausalLM",
        refused="inputs that are no text",
    ),
    PublishedDraft(
        target="Kimi K3, K3.1",
        names=("kimi-k3", "kimi-k3.1"),
        architectures=("KimiK3ForConditionalGeneration",),
        draft="Inferact/Kimi-K3-DSpark",
        format="K3DSparkModel",
        refused=_RECURRENT,
        context=65536,
        dtype="bfloat16",
        block=7,
        source="its keys quoted, sizes assumed",
    ),
    PublishedDraft(
        target="MiniMax M2 to M2.7",
        names=("minimax-m2", "minimax-m2.1", "minimax-m2.5", "minimax-m2.7"),
        architectures=("MiniMaxM2ForCausalLM",),
        draft="thoughtworks/MiniMax-M2.5-Eagle3",
        format=_EAGLE3,
        context=196608,
        dtype="bfloat16",
        source="its training script",
    ),
    PublishedDraft(
        target="MiniMax M3",
        names=("minimax-m3",),
        architectures=("MiniMaxM3SparseForConditionalGeneration",),
        draft="Inferact/MiniMax-M3-EAGLE3",
        format="",
        refused=_SPARSE_ATTENTION,
        context=196608,
        dtype="bfloat16",
        source="its keys quoted, sizes assumed",
    ),
    PublishedDraft(
        target="Gemma 3 4B, 12B, 27B",
        names=("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"),
        architectures=_GEMMA3,
        draft="google/gemma-3-270m-it",
        format="Gemma3ForCausalLM",
        context=32768,
        dtype="bfloat16",
        window=512,
        source="transformers' conversion of Gemma 3",
    ),
    PublishedDraft(
        target="Gemma 4",
        names=("gemma-4",),
        architectures=_GEMMA4,
        draft="google/gemma-4-31B-it-assistant",
        format="Gemma4AssistantForCausalLM",
        refused="layers whose heads differ in width",
    ),
    PublishedDraft(
        target="Nemotron 3, 3.5",
        names=("nvidia-nemotron-3", "nvidia-nemotron-3.5", "nemotron-3", "nemotron-3.5"),
        architectures=("NemotronHForCausalLM",),
        draft="nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark",
        format="Qwen3DSparkModel",
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
