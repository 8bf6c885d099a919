"""The algorithm `SMC` as SGLang sees it: its answers about itself, and the servers it accepts.

The model to imitate is STANDALONE: an independent draft model whose KV pool is indexed by the same
slots as the target's. That predicate is True, the other builtin ones (`is_eagle`, ...) stay False,
since the code behind them builds EAGLE's tree inputs.
"""

import logging
import os
from typing import TYPE_CHECKING

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_smc.memory import arena
from sglang_smc.models import supported
from sglang_smc.ops.select import kind_of
from sglang_smc.options.server import SERVER_ARGS_FIELDS, SMCConfig
from sglang_smc.server import hooks, requirements

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# For tests: results reach the scheduler one round late on a CPU, too, as they do on a GPU.
CPU_OVERLAP_ENV = "SGLANG_SMC_CPU_OVERLAP"

# What SGLang sets for each of its own speculative algorithms.
_DEFAULT_MAX_RUNNING_REQUESTS = 48


class SMCAlgorithm(CustomSpecAlgo):
    """Answers for SMC wherever SGLang dispatches on `spec_algorithm`."""

    def carries_draft_hidden_states(self) -> bool:
        """False: the draft is a plain language model."""
        return False

    def is_standalone(self) -> bool:
        """True: so that the KV pool is sized for the draft's layers beside the target's."""
        return True

    def need_topk(self) -> bool:
        """False: the next round starts from tokens alone, without the draft's top-k."""
        return False

    def create_future_map(
        self,
        device: "torch.device",
        req_to_token_pool: "ReqToTokenPool",
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> "FutureMap":
        """The stock relay between rounds, for sequence lengths alone."""
        from sglang_smc.round.draft_input import LengthRelay

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
        """K + 1 positions for the target; one for the draft, which only ever decodes."""
        return 1 if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args: "ServerArgs") -> None:
        """Write the resolved settings back, after `validate_server_args` has accepted them."""
        config = SMCConfig.from_server_args(server_args)
        for name, attribute in SERVER_ARGS_FIELDS.items():
            setattr(server_args, attribute, getattr(config, name))
        # A chain: one candidate a step, and the K drafted tokens plus the bonus make a round.
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = config.num_steps + 1
        # On a CPU there is nothing to overlap with, and each request would pay one idle round.
        if server_args.device == "cpu" and not cpu_overlap_is_forced():
            server_args.disable_overlap_schedule = True
        # SGLang's decode graphs hold one row a request, and no weights: we capture our own.
        graphs = server_args.cuda_graph_config
        assert graphs is not None, "SGLang resolves its graphs before speculative decoding"
        if config.round_graph == "auto" and not _captures(config, server_args):
            server_args.speculative_smc_round_graph = "off"  # pyright: ignore
        graphs.decode.backend = Backend.DISABLED
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _DEFAULT_MAX_RUNNING_REQUESTS
            logger.warning(
                "--max-running-requests is set to %d for speculative decoding; pass it to choose.",
                _DEFAULT_MAX_RUNNING_REQUESTS,
            )
        logger.info("SMC speculative decoding: %s", config)


def cpu_overlap_is_forced() -> bool:
    """Whether the overlap schedule is wanted on a CPU."""
    return os.environ.get(CPU_OVERLAP_ENV) == "1"


def _captures(config: SMCConfig, server_args: "ServerArgs") -> bool:
    """Whether rounds are captured where the user leaves it to us."""
    graphs = server_args.cuda_graph_config
    assert graphs is not None
    wanted = graphs.decode.backend != Backend.DISABLED
    return wanted and _can_capture(config, server_args.device)


def _can_capture(config: SMCConfig, device: str | None) -> bool:
    """Whether there are kernels, and a GPU that runs them."""
    return kind_of(config.kernels, device or "cuda") == "triton" and device != "cpu"


def worker_class(server_args: "ServerArgs") -> type:
    """The worker's class, for the scheduler; hooks may have failed in this process alone."""
    hooks.require_landed()
    from sglang_smc.worker import SMCWorker

    return SMCWorker


def validate_server_args(server_args: "ServerArgs") -> None:
    """Raise ValueError, listing the reasons, for a server that SMC cannot run on.

    Called by SGLang while it resolves the server arguments, in the process that starts the server.
    """
    hooks.require_landed()
    problems = [
        *_setting_problems(server_args),
        *_draft_problems(server_args),
        *requirements.unmet(server_args),
        *supported.problems(server_args),
    ]
    if problems:
        raise ValueError(
            "--speculative-algorithm SMC cannot start this server:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _setting_problems(server_args: "ServerArgs") -> list[str]:
    try:
        config = SMCConfig.from_server_args(server_args)
    except ValueError as error:
        return [str(error)]
    problems = _pool_problems(config, server_args.max_total_tokens)
    problems += _kernel_problems(config, server_args.device)
    given, expected = server_args.speculative_num_draft_tokens, config.num_steps + 1
    if given not in (None, expected):
        problems.append(
            f"--speculative-num-draft-tokens is {given}; allowed: --speculative-num-steps + 1 = "
            f"{expected}. Leave it out and choose --speculative-num-steps alone."
        )
    return problems


def _pool_problems(config: SMCConfig, num_slots: int | None) -> list[str]:
    """A pool whose size is given can be judged now, others when they are allocated."""
    if num_slots is None:
        return []
    try:
        arena.check_pool(config, num_slots)
    except ValueError as error:
        return [str(error)]
    return []


def _kernel_problems(config: SMCConfig, device: str | None) -> list[str]:
    try:
        can_capture = _can_capture(config, device)
    except ValueError as error:
        return [str(error)]
    if config.round_graph == "on" and not can_capture:
        return [
            f"--speculative-smc-round-graph is 'on' with --device {device} and "
            f"--speculative-smc-kernels {config.kernels!r}; allowed: 'auto' or 'off', since only "
            "rounds of Triton kernels on a GPU can be captured. Leave it out."
        ]
    return []


def _draft_problems(server_args: "ServerArgs") -> list[str]:
    if server_args.speculative_draft_model_path is not None:
        return []
    return [
        "--speculative-draft-model-path is missing. Pass a folder or a Hugging Face id of a "
        "smaller model with the target's vocabulary."
    ]
