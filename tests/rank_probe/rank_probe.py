"""What each rank of an SMC server holds after each round, as a plugin of SGLang, for tests.

SGLang finds it where this folder is on the path; it writes where `RANK_PROBE_OUT` names a folder.
There each scheduler process gets a file with one line a round: a digest of all numbers that the
round has decided and of the weights that it leaves, bit for bit.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

OUT = "RANK_PROBE_OUT"


def register() -> None:
    """Called by SGLang in every process."""
    if OUT in os.environ:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register("sglang_smc.round.play.ServedRound.play", play, HookType.AROUND)
        experts = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
        HookRegistry.register(experts, own_experts, HookType.AROUND)


def play(original: Callable, of_server: Any, inputs: Any, shape: Any, *rest: Any) -> Any:
    """One round, and its line."""
    from sglang.srt.runtime_context import get_parallel

    outcome = original(of_server, inputs, shape, *rest)
    after = of_server._tables.particles.gather(inputs.rows, shape.num_particles, shape.max_tail)[0]
    digest = hashlib.sha256(repr(shape).encode())
    for tensor in tensors((inputs, outcome, after)):
        digest.update(tensor.contiguous().numpy().tobytes())
    rank = get_parallel().tp_rank
    with (Path(os.environ[OUT]) / f"rank{rank}.txt").open("a") as file:
        file.write(f"{len(inputs.rows)} {digest.hexdigest()}\n")
    return outcome


def own_experts(_: Callable, layer: Any, x: Any, chosen: Any, *rest: Any) -> torch.Tensor:
    """Run this rank's experts alone, as kernels do: SGLang's loop takes no id of -1 for others."""
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native

    weights = chosen.topk_weights.masked_fill(chosen.topk_ids < 0, 0.0)
    given = SimpleNamespace(hidden_states=x, topk_output=chosen._replace(topk_weights=weights))
    return fused_moe_forward_native(layer, given).hidden_states


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors(part)
