"""A mask as a potential: p and q restricted to the tokens that may come next.

What knows which tokens may follow a text multiplies p(x | text) by m(x | text), which is 0 or 1.
To sample whole texts from that product, drafts come from q m over its sum and weigh log p
minus its log-probability, with p as it is; the bonus token comes from p m over its sum Z, and log Z
is its weight, whichever token it is. Z is the mass that the mask leaves of p.
"""

import torch


def unpack(packed: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bits of 32-bit words, the lowest first: ``[..., W]`` int32 to ``[..., V]`` bool.

    V is at most 32 W. The layout is that of SGLang's token bitmasks.
    """
    octets = packed.contiguous().view(torch.uint8).unsqueeze(-1)  # [..., 4 W, 1]
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def restrict(
    logits: torch.Tensor, allowed: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forbid what is not allowed, and say how much is left.

    Where nothing is left, the logits stay as they are, so that something can be drawn, and the
    mass is zero, so that it weighs nothing.

    Args:
        logits: ``[..., V]``, any float type; ``-inf`` marks a token that is forbidden already.
        allowed: ``[..., V]`` bool.
        temperature: > 0, any shape that broadcasts to ``[...]``.

    Returns:
        ``[..., V]`` logits, and the log of the allowed tokens' probability at this temperature
        ``[...]`` float32.
    """
    scaled = logits.float() / temperature.float().unsqueeze(-1)
    forbidden = ~allowed
    log_mass = scaled.masked_fill(forbidden, -torch.inf).logsumexp(-1) - scaled.logsumexp(-1)
    is_empty = (log_mass == -torch.inf).unsqueeze(-1)
    return logits.masked_fill(forbidden & ~is_empty, -torch.inf), log_mass
