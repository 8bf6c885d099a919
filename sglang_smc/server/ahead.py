"""Compile the kernels of a start in processes of their own, while weights load.

`sglang-smc compile` does, with the models of this server, into Triton's cache. The check at start
finds its kernels there, and compiles what is missing: a failure here costs time alone.
"""

import logging
import os
import subprocess
import sys
from threading import Thread

import torch

from sglang_smc.drafts.sizes import NGRAM
from sglang_smc.ops import kind_of
from sglang_smc.process import config_of
from sglang_smc.upstream import Arguments, resolved

logger = logging.getLogger(__name__)


def start(server_args: Arguments) -> None:
    """Begin to compile for this machine's GPU, where a server runs kernels on one of NVIDIA's."""
    view = resolved(server_args)
    is_nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    if view.device != "cuda" or not is_nvidia:
        return
    if kind_of(config_of(server_args).kernels, "cuda") == "torch":
        return
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_smc.command", "compile", *words(server_args)],
            # It takes no memory of a GPU that it does not see.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except Exception as error:  # of the driver, or of starting a process
        logger.warning("SMC compiles no kernels while weights load: %s", error)
        return
    Thread(target=_tell, args=(process,), daemon=True).start()


def words(server_args: Arguments) -> list[str]:
    """Return the options of `sglang-smc compile` for this server and this machine's GPU."""
    from sglang_smc.ops.compiling import name_here

    view = resolved(server_args)
    config = config_of(server_args)
    given = {
        "--target": view.model_path,
        "--device": name_here(),
        "--tp": view.tp_size,
        "--mode": config.mode,
        "--adaptive": config.adaptive,
        "--num-particles": config.num_particles,
        "--num-steps": config.num_steps,
    }
    draft = view.speculative_draft_model_path or NGRAM
    if draft != view.model_path:  # else the target's own layer drafts
        given["--draft"] = draft
    flags = ["--trust-remote-code"] if view.trust_remote_code else []
    return [str(word) for option in given.items() for word in option] + flags


def _tell(process: subprocess.Popen[str]) -> None:
    """Log what a process says last."""
    said, _ = process.communicate()
    last = said.strip().rpartition("\n")[2]
    if process.returncode == 0:
        logger.info("SMC compiled while weights loaded: %s", last)
    else:
        logger.warning("SMC could not compile while weights loaded: %s", last)
