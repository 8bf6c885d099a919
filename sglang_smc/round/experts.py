"""Return the experts that the target's pass routed tokens to, where SGLang keeps them."""

from typing import Any

import torch

from sglang_smc import upstream
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.round.extras import Extra, Stages


class ReturnedExperts(Extra):
    """The experts of tokens by KV slot, in all rounds of a server that keeps them.

    Args:
        routed: `upstream.experts_of_passes`.
    """

    name = "return_routed_experts"
    always = True
    reads_pass = True

    def __init__(self, target: ParticleForward, routed: torch.Tensor) -> None:
        self._target = target
        self._routed = routed

    def emit(
        self, rows: torch.Tensor, chains: Chains, stages: Stages | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots that were written, and ``[G, N, K + 1, layers, experts a token]``."""
        return chains.slots, self._target.of_tokens(self._routed, chains.slots)

    def fields(self, returned: dict[str, Any]) -> dict[str, Any]:
        """Hand the experts over to SGLang, which copies them to the host itself."""
        slots, experts = returned.pop(self.name)
        by_slot = upstream.experts_by_slot(slots.flatten(), experts.flatten(0, 2))
        return {"routed_experts_output": by_slot}
