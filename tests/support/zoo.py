"""Published pairs of targets and drafts by their configurations, and what a server says of each.

`zoo.json` has the configurations, each as its differences from another: ``own`` is merged into that
of the model it is ``like``, ``without`` some of its keys. ``{"=": ...}`` replaces an object,
``{"repeat": [[3, "a"], [2, "b", "c"]]}`` is the list aaabcbc. Left out are keys that neither SGLang
nor transformers nor this package reads before weights are loaded: of training and of sampling, and
the layers that a quantization leaves out.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


class Pair(NamedTuple):
    """A target, its draft, and what becomes of them on an H200."""

    target: str
    draft: str | None  # None: the target's own MTP layer
    source: str  # of the draft, or else of the target
    refused: str = ""  # a part of what a server says; "" if it starts
    trained: int | None = None  # tokens of the draft's texts, where the target takes more
    num_steps: int | None = None  # that its publisher names; None for what a server takes

    @property
    def name(self) -> str:
        return f"{self.target} with {self.draft or 'its MTP layer'}"


_SPECFORGE = "SpecForge configs/"
_DEEPSPEC = "DeepSpec config/dspark/"
_TARGETS = "aiconfigurator model_configs/"
_WINDOW = "speculators issue 1065"
_SPARSE = "sparse attention"
_RECURRENT = "a recurrent (Mamba-like) state"

#: Most targets are those of aiconfigurator's model_configs/, Llama's those of tt-metal's
#: model_params/. Sizes of Gemma 3 and GLM-4.5-Air, and what Kimi's, MiniMax's and gpt-oss's heads
#: have beside their quoted keys, are assumed.
PAIRS = (
    Pair(
        "llama31-8b", "llama31-8b+lmsys-eagle3", _SPECFORGE + "llama3-8B-eagle3.json", "", 2048, 3
    ),
    Pair("llama31-8b", "llama31-8b+yuhuili", "EAGLE traineagle3/config.json", "", 2048, 3),
    Pair("llama32-3b", "llama32-3b+dspark", "speculators 0.9.0"),
    Pair(
        "llama33-70b", "llama33-70b+specforge", _SPECFORGE + "llama3-70B-ealge3.json", "", 4096, 3
    ),
    Pair("qwen3-4b", "qwen3-4b+deepspec", _DEEPSPEC + "dspark_qwen3_4b.py"),
    Pair("qwen3-8b", "qwen3-8b+deepspec", _DEEPSPEC + "dspark_qwen3_8b.py"),
    Pair("qwen3-14b", "qwen3-14b+deepspec", _DEEPSPEC + "dspark_qwen3_14b.py"),
    Pair("qwen3-30b-2507", "qwen3-30b-2507+redhat-like", "RedHatAI's pattern", "", 40960),
    Pair("qwen3-30b", "qwen3-30b+specforge", _SPECFORGE + "qwen3-30B-A3B-eagle3.json", "", 2048, 3),
    Pair(
        "qwen3-30b",
        "qwen3-30b+specforge-3.1",
        _SPECFORGE + "qwen3-30B-A3B-eagle3.1.json",
        trained=2048,
        num_steps=3,
    ),
    Pair("qwen3-235b-2507", "qwen3-235b-2507+window-eagle3", _WINDOW),
    Pair("qwen3.5-27b", None, _TARGETS + "Qwen3.5-27B", num_steps=3),
    Pair("qwen3.5-27b", "qwen3.8-27b+dflash2", "Flash-Next's export of DFlash2"),
    Pair("qwen3.5-35b", None, _TARGETS + "Qwen3.5-35B-A3B", num_steps=3),
    Pair("qwen3.6-35b", "qwen3.6-35b+redhat-dspark", "RedHatAI's, in a test of vllm.cpp"),
    Pair("qwen3.6-35b", "qwen3.6-35b+ornith-dspark", "Ornith's"),
    Pair("gpt-oss-20b", "gpt-oss-20b+redhat", "RedHatAI's"),
    Pair("gpt-oss-120b", "gpt-oss-20b+redhat", "RedHatAI's of 20b"),
    Pair(
        "gpt-oss-20b", "gpt-oss-20b+specforge", _SPECFORGE + "gpt-oss-20B-eagle3.json", "", 4096, 3
    ),
    Pair("deepseek-v3", None, _TARGETS + "DeepSeek-V3", num_steps=3),
    Pair(
        "deepseek-v3",
        "deepseek-v3+specforge",
        _SPECFORGE + "deepseek-v3-671b-eagle3.json",
        num_steps=3,
    ),
    Pair("glm-4.5-air", None, "a test of vlm", num_steps=3),
    Pair("kimi-k2", "kimi-k2+aq-medai", _SPECFORGE + "deepseek-v3-671b-eagle3.json", num_steps=3),
    Pair("minimax-m2.5", "minimax-m2.5+thoughtworks", "phase0/eagle_draft.py", num_steps=5),
    Pair("gemma3-4b", "gemma3-4b+270m", "transformers' conversion", "", 32768),
    Pair("qwen3-8b", "qwen3-8b+specforge-eagle3", _SPECFORGE + "qwen3-8b-eagle3.json", num_steps=3),
    Pair("qwen3-8b", "qwen3-8b+angelslim", "AngelSlim configs/", num_steps=3),
    Pair("qwen3-8b", "qwen3-8b+specforge-domino", _SPECFORGE + "qwen3-8b-domino.json"),
    Pair("qwen3-8b", "qwen3-8b+specforge-dspark", _SPECFORGE + "qwen3-8b-dspark.json"),
    Pair("qwen3-8b-yarn", "qwen3-8b+specforge-eagle3", "Qwen3's card, YaRN x 4", "", 40960, 3),
    Pair("qwen3-30b-2507", "qwen3-30b+specforge", _SPECFORGE + "qwen3-coder", "", 2048, 3),
    Pair("qwen3-30b-2507", "qwen3-30b-2507+0.6b", _TARGETS + "Qwen3-0.6B", "", 40960),
    Pair("gemma4-31b", "gemma4-31b+redhat-eagle3", "RedHatAI's", "heads differ in width"),
    Pair("glm5.2", "glm5.2+redhat-dspark", "RedHatAI's of GLM-5.3", _SPARSE),
    Pair("deepseek-v3.2", None, _TARGETS + "DeepSeek-V3.2", _SPARSE, num_steps=3),
    Pair("kimi-k2.5", "kimi-k2+aq-medai", _TARGETS + "Kimi-K2.5", "inputs that are no text"),
    Pair("minimax-m3", "minimax-m3+head", _TARGETS + "MiniMax-M3", "does not recognize"),
    Pair("nemotron3-nano", None, _TARGETS + "Nemotron-3-Nano", _RECURRENT, num_steps=3),
    Pair("kimi-k3", "kimi-k3+head", _TARGETS + "Kimi-K3", _RECURRENT),
    Pair("gpt-oss-20b-bf16", "gpt-oss-20b+redhat", "RedHatAI's"),
    Pair("qwen3-8b", "qwen3-8b+fp16-0.6b", "Qwen3-0.6B in float16"),
    Pair("qwen3-8b", "qwen3-8b+window-eagle3", "SpecForge's, as speculators 0.7 trains"),
)


def config_of(name: str) -> dict[str, Any]:
    """Return the configuration of a model, as its publisher has it."""
    return _expanded(_told(name))


def write(name: str, folder: Path) -> str:
    """Write a model's configuration into a folder; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    return str(folder)


def _told(name: str) -> dict[str, Any]:
    entry = MODELS[name]
    base = _told(entry["like"]) if "like" in entry else {}
    kept = {key: value for key, value in base.items() if key not in entry.get("without", ())}
    return _merged(kept, entry["own"])


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in own.items():
        is_object = isinstance(value, dict) and isinstance(found.get(key), dict)
        if isinstance(value, dict) and "=" in value:
            found[key] = value["="]
        elif is_object and "repeat" not in value:
            found[key] = _merged(found[key], value)
        else:
            found[key] = value
    return found


def _expanded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "repeat" in value:
        return [item for times, *items in value["repeat"] for item in items * times]
    return {key: _expanded(item) for key, item in value.items()}
