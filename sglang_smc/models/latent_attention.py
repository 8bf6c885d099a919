"""Have SGLang's layers attend over latents (MLA), in the form that particles take.

A layer caches one latent per token, and each query head has absorbed its part of the projections
(DeepSeek-V2, arXiv 2405.04434, section 2.1): scores are dot products with the whole latent, values
are its first numbers. So all heads read the same keys, and those of the shared prefix are gathered
once per request for all its particles, columns and heads.

SGLang's DeepSeek layers choose, by the name of the attention backend, between two forms that are
equal in exact arithmetic: absorbed, over latents, and with keys and values of each head
decompressed from the latents. Particles use the absorbed form in all forwards, since it alone reads
the cache as it is stored.
"""

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

NAME = "smc_latent"


def absorb(backend_name: str) -> None:
    """Make SGLang's layers use the absorbed form, in all modes, for a backend of this name."""
    AttentionBackendRegistry.register(backend_name, lambda *_: AttnForwardMethod.MLA)
