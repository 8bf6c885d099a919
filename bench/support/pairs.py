"""Compute the memory for KV that a GPU has beside common pairs of models."""

from __future__ import annotations

from typing import NamedTuple

from results import number_cell

GB = 1e9
SHARE = 0.88  # share of a GPU's memory that SGLang uses for weights and KV
ASIDE = 1.5 * GB  # activations, graphs, tables
TOKENS = 1024 + 512  # per request


class Model(NamedTuple):
    """A model's sizes, by its config.json."""

    name: str
    weights: float  # GB
    kv_layers: int
    kv_numbers: int  # per token and layer: keys and values, or a latent

    @property
    def kv_bytes(self) -> int:
        """Return the KV bytes of a token, in 16 bits."""
        return 2 * self.kv_layers * self.kv_numbers


PADDED = "tables padded differently"
LLAMA_1B = Model("Llama 3.2 1B", 2.5, 16, 2 * 8 * 64)
QWEN_06B = Model("Qwen3 0.6B", 1.2, 28, 2 * 8 * 128)
#: Target, draft and a note.
PAIRS = (
    (Model("Llama 3.1 8B", 16.1, 32, 2 * 8 * 128), LLAMA_1B, ""),
    (Model("Llama 3.3 70B, FP8", 70.6, 80, 2 * 8 * 128), LLAMA_1B, ""),
    (Model("Qwen3 32B", 65.5, 64, 2 * 8 * 128), QWEN_06B, ""),
    (Model("Qwen3 30B-A3B", 61.1, 48, 2 * 4 * 128), QWEN_06B, ""),
    (
        Model("Qwen2.5 72B, 4 bits", 41.6, 80, 2 * 8 * 128),
        Model("Qwen2.5 0.5B", 1.0, 24, 2 * 2 * 64),
        PADDED,
    ),
    (
        Model("Gemma 3 27B", 54.9, 62, 2 * 16 * 128),
        Model("Gemma 3 270M", 0.5, 18, 2 * 1 * 256),
        PADDED,
    ),
    (
        Model("gpt-oss 120B", 65.3, 36, 2 * 8 * 64),
        Model("gpt-oss 20B", 13.8, 24, 2 * 8 * 64),
        "4-bit experts; not run",
    ),
)


def fit(target: Model, draft: Model, memory: float, arena: int) -> int | None:
    """Return the requests of `TOKENS`, each with an arena of slots, that fit into the memory."""
    room = SHARE * memory - ASIDE - (target.weights + draft.weights) * GB
    if room <= 0:
        return None
    return int(room / (target.kv_bytes + draft.kv_bytes) / (TOKENS + arena))


def pairs_page(arena: int = 81) -> str:
    """Return the table of requests that fit, in mode auto at N = K = 8."""
    lines = [
        f"Requests of 1,024 + 512 tokens in mode `auto` at N = K = 8 ({arena} slots each), with "
        f"{SHARE:.0%} of the memory less 1.5 GB: arithmetic from configurations, not measured.",
        "",
        "| target | draft | weights, GB | KV of a token, KB | requests on 80 GB | on 141 GB | |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for target, draft, note in PAIRS:
        weights, kv = target.weights + draft.weights, (target.kv_bytes + draft.kv_bytes) / 1024
        counts = [fit(target, draft, memory * GB, arena) for memory in (80, 141)]
        cells = [number_cell(count, "d", "weights do not fit") for count in counts]
        told = [target.name, draft.name, f"{weights:.1f}", f"{kv:.0f}", *cells, note]
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join(lines) + "\n"
