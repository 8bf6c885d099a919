"""What there is to compile for: servers' batches, and layers of attention of every kind."""

from typing import NamedTuple

import torch

from sglang_smc.kernels.attention.work import A100, H100, Chip

CHIPS = {  # by compute capability, from the data sheets
    80: A100,
    86: Chip(84, 99 << 10),  # A40
    89: Chip(142, 99 << 10),  # L40S
    90: H100,
    100: Chip(148, 227 << 10, overlaps=True),  # B200
    120: Chip(188, 99 << 10, overlaps=True),  # RTX PRO 6000
}


class Heads(NamedTuple):
    q: int
    kv: int
    dim: int


class Latents(NamedTuple):
    q: int
    rank: int
    rope: int


DEEPSEEK_V3 = Latents(128, 512, 64)
DEEPSEEK_V2_LITE = Latents(16, 512, 64)


class Layer(NamedTuple):
    """What attention there is besides that to all of the text, by heads of up to 128 dimensions."""

    heads: Heads
    window: int | None = None
    cap: float = 0.0
    sinks: bool = False
    sees_block: bool = False
    cache: torch.dtype | None = None  # None: the queries'
    least_capability: int = 80


class Sizes(NamedTuple):
    """One server's batches of one size."""

    models: str
    target: Heads
    draft: Heads
    groups: int = 1
    particles: int = 8
    steps: int = 8
    vocab: int = 128_256
    dtype: torch.dtype = torch.bfloat16  # of both models
    max_lag: int = 256
    context: int = 131_072
    layers: tuple[Layer, ...] = ()
    latent_target: Latents = DEEPSEEK_V3
    latent_draft: Latents = DEEPSEEK_V2_LITE


LAYERS = (
    Layer(Heads(32, 16, 128), window=1024),  # Gemma 3 27B
    Layer(Heads(4, 1, 256), window=512),  # Gemma 3 1B
    Layer(Heads(8, 4, 256), window=4096, cap=50.0),  # Gemma 2 2B
    Layer(Heads(64, 8, 64), window=128, sinks=True),  # gpt-oss
    Layer(Heads(32, 8, 128), sees_block=True),  # DFlash heads of Qwen3-8B
    Layer(Heads(32, 8, 128), window=2047, sees_block=True),  # DFlash2 heads
    Layer(Heads(32, 8, 128), cache=torch.float8_e5m2),
    # What the A100 cannot convert.
    Layer(Heads(32, 8, 128), cache=torch.float8_e4m3fn, least_capability=89),
)
LLAMA = Sizes("Llama-3.1-8B + 1B", Heads(32, 8, 128), Heads(32, 8, 64), layers=LAYERS[2:5])
QWEN = Sizes("Qwen3-30B-A3B + 0.6B", Heads(32, 4, 128), Heads(16, 8, 128), vocab=151_936)
OTHERS = [
    LLAMA._replace(groups=8, layers=LAYERS),
    LLAMA._replace(groups=32),
    LLAMA._replace(particles=1, steps=4),
    LLAMA._replace(particles=32, steps=16, max_lag=1024),
    LLAMA._replace(models="Llama-3.1-70B + 8B", target=Heads(64, 8, 128), draft=LLAMA.target),
    QWEN,
    QWEN._replace(groups=2, particles=5, steps=3),
    Sizes("Qwen2.5-7B + 0.5B", Heads(28, 4, 128), Heads(14, 2, 64), vocab=152_064),
    Sizes("heads of 96 in float32", Heads(32, 32, 96), Heads(8, 4, 96), dtype=torch.float32),
    Sizes("heads of 256 in float32", Heads(8, 4, 256), Heads(4, 1, 256), dtype=torch.float32),
    LLAMA._replace(dtype=torch.float16),
    LLAMA._replace(
        models="Kimi-K2 + GLM-4.7-Flash",
        latent_target=Latents(64, 512, 64),
        latent_draft=Latents(20, 512, 64),
    ),
    LLAMA._replace(
        models="DeepSeek-V2-Lite + MiniCPM3, or DeepSeek-V3 on 8 GPUs",
        latent_target=DEEPSEEK_V2_LITE,
        latent_draft=Latents(40, 256, 32),
    ),
    LLAMA._replace(models="MiniCPM3", latent_target=Latents(40, 256, 32)),
]
