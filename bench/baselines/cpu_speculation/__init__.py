"""Run SGLang's own speculative decoding on a CPU, for baselines, as a plugin of their servers.

This package's folder on PYTHONPATH makes SGLang load it (`bench/start.py`). It gives the platform
`smc_cpu` what SGLang asks platforms for, attention and torch functions in place of kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sglang.srt.platforms  # noqa: F401  before our platform, which it imports as a plugin

from sglang_smc.cpu import platform
from sglang_smc.cpu.platform import PlainCpuPlatform
from sglang_smc.server.hooks import Group

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from sglang_smc.upstream import Arguments

#: What options of SGLang's algorithms may be here: that which disables each; and pages of one slot.
OPTIONS = {
    "speculative_use_rejection_sampling": (False,),
    "speculative_use_block_verification": (False,),
    "speculative_accept_threshold_single": (1.0,),
    "speculative_accept_threshold_acc": (1.0,),
    "speculative_draft_window_size": (None,),
    "speculative_adaptive": (False,),
    "enable_multi_layer_eagle": (False,),
    "page_size": (1, None),
}
HOOKS = Group(
    ("hooks",),
    where="In processes that run models on the platform `smc_cpu` with SGLang's own speculation",
    when="By `worker_cls`, which SGLang asks before it builds the worker.",
    package=__name__,
)
_apply_defaults = PlainCpuPlatform.apply_server_args_defaults


def register() -> None:
    """Add SGLang's algorithms to the platform; SGLang calls it in each process."""
    for name, method in METHODS.items():
        setattr(PlainCpuPlatform, name, method)


def supports(self: PlainCpuPlatform, algorithm: str) -> bool:
    """Return whether an algorithm of SGLang's runs here."""
    return algorithm in platform.OWN_ALGORITHMS


def apply_defaults(self: PlainCpuPlatform, server_args: Arguments) -> None:
    """Fill in the platform's defaults; raise ValueError for what is not supported here."""
    if server_args.speculative_algorithm in platform.OWN_ALGORITHMS:
        platform.refuse(server_args, OPTIONS)
    _apply_defaults(self, server_args)


def cache_locs_fn(self: PlainCpuPlatform) -> Callable[..., torch.Tensor]:
    """Return what gives the slots of positions."""
    from .trees import slots_between

    return slots_between


def worker_cls(self: PlainCpuPlatform, algorithm: str) -> None:
    """Return None for SGLang's own worker, after preparing the worker's process."""
    from sglang_smc.cpu.attention import CpuAttentionBackend
    from sglang_smc.server import hooks

    from .attention import stand_in_for_wheel, tree_of

    if algorithm in platform.OWN_ALGORITHMS:
        stand_in_for_wheel()
        CpuAttentionBackend.tree_of = staticmethod(tree_of)
        hooks.install(HOOKS)


#: Methods of SGLang's platforms.
METHODS = {
    "supports_speculative_algorithm": supports,
    "apply_server_args_defaults": apply_defaults,
    "get_speculative_cache_locs_fn": cache_locs_fn,
    "get_speculative_worker_cls": worker_cls,
}
