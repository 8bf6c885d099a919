"""Define the algorithm `SMC` for SGLang, and validate the arguments of its servers.

SMC is registered like STANDALONE: an independent draft model with a KV pool indexed by the same
slots as the target's. That predicate is True; the other builtin ones (`is_eagle`, ...) stay False,
since the code behind them builds EAGLE's tree inputs.

This module is imported wherever the plugin is loaded: functions import the rest when SMC is
selected.
"""

from typing import TYPE_CHECKING

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_smc.server import hooks
from sglang_smc.upstream import IS_NEWEST

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    from sglang_smc.round.result import SMCDraftInput


class SMCAlgorithm(CustomSpecAlgo):
    """The properties of SMC that SGLang reads from `spec_algorithm`."""

    def carries_draft_hidden_states(self) -> bool:
        """Return False: rounds pass no hidden states through SGLang."""
        return False

    def is_standalone(self) -> bool:
        """Return True, so that the KV pool is sized for the draft's layers beside the target's."""
        return True

    def need_topk(self) -> bool:
        """Return False: the next round starts from tokens alone, without the draft's top-k."""
        return False

    def create_future_map(
        self,
        device: "torch.device",
        req_to_token_pool: "ReqToTokenPool",
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> "FutureMap":
        """Return SGLang's relay between rounds, for sequence lengths alone."""
        from sglang_smc.round.result import LengthRelay

        return LengthRelay(
            device=device,
            spec_algo=self,  # pyright: ignore[reportArgumentType] -- any registered algorithm
            req_to_token_pool=req_to_token_pool,
            needs_cpu_seq_lens=needs_cpu_seq_lens,
            needs_confidence_relay=needs_confidence_relay,
        )

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        """Return K + 1 positions for the target; 1 for the draft, which only ever decodes."""
        return 1 if is_draft_worker else num_draft_tokens

    if IS_NEWEST:  # a server on older releases is no decode server

        def build_disagg_draft_input(
            self,
            batch: "ScheduleBatch",
            last_tokens_tensor: "torch.Tensor",
            future_map: "FutureMap",
        ) -> "SMCDraftInput":
            """Start particles on a decode server; see `SMCWorker.begin_transferred`."""
            from sglang.srt.managers.overlap_utils import RelayPayload

            from sglang_smc.process import active

            assert active.worker is not None, "it is built before any batch"
            found = active.worker.begin_transferred(batch, last_tokens_tensor)
            if batch.enable_overlap:
                found.future_indices = batch.req_pool_indices
                future_map.publish(found.future_indices, batch.seq_lens)
                payload = RelayPayload(bonus_tokens=last_tokens_tensor)
                future_map.stash(found.future_indices, payload)
            return found

    def handle_server_args(self, server_args: "ServerArgs") -> None:
        """Write the resolved settings back, after `validate_server_args` has accepted them."""
        from sglang_smc.server import arguments

        arguments.resolve(server_args)


def worker_class(server_args: "ServerArgs") -> type:
    """Return the worker's class, for the scheduler: SGLang's first call in that process."""
    hooks.verify_installed(hooks.FLAGS)
    hooks.verify_installed(hooks.DRAFTS)  # in time for the target's runner, which is built before
    hooks.install(hooks.SMC)
    hooks.install(hooks.HEADS)
    from sglang_smc.worker import SMCWorker

    return SMCWorker


def validate_server_args(server_args: "ServerArgs") -> None:
    """Raise ValueError, listing the reasons, for a server that SMC cannot run on.

    SGLang calls this while it resolves the server arguments, in the process that starts the server.
    """
    hooks.verify_installed(hooks.FLAGS)
    from sglang_smc.server import arguments

    if not hasattr(server_args, arguments.ANY_FLAG):
        raise RuntimeError(
            "sglang-smc cannot start: these server arguments were built before plugins were "
            "loaded. Call sglang.srt.plugins.load_plugins() first, then build them."
        )
    hooks.install(hooks.DRAFTS)
    arguments.check_arguments(server_args)
