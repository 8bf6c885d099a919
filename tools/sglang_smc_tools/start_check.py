"""Check a pair as a server does when it starts, by configurations alone, for `sglang-smc doctor`.

Where this machine has the device, SGLang resolves the arguments as for a server. Elsewhere it would
judge by this machine, which has other kernels and other quantizations: there the checks of
sglang-smc decide, and what SGLang alone would say is a warning.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sglang_smc.command.machine import HERE, Finding, fail, ok, warning
from sglang_smc.options.server import flag_of
from sglang_smc_tools.plan import shapes

SETTINGS = ("num_particles", "num_steps", "max_lag")
ABOUT = "server arguments"


class StartVerdict(NamedTuple):
    """Hold what became of server arguments."""

    problem: Finding | None
    longest: int = 0  # tokens that the target takes, where there is no problem
    beyond: str | None = None  # what a server warns of a draft for shorter texts


def findings(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield whether a server starts with these models and settings; no weights are loaded."""
    given = server_arguments(options)
    elsewhere = is_elsewhere(options.device)
    verdict = _without_sglang(given) if elsewhere else _as_a_server(given)
    if verdict.problem is not None:
        yield verdict.problem
        return
    flags = [name for name in ("--disable-radix-cache", "--trust-remote-code") if name in given]
    told = "".join(f", with {name}" for name in flags)
    yield ok(ABOUT, f"accepted{told}, and both models' families (by configuration)")
    yield from _context(options.context, verdict)
    if elsewhere and _as_a_server(given).problem is not None:
        yield warning(
            "SGLang's own checks",
            "not checked: this machine has no such device",
            f"Run it on the machine that is to serve, without --device {options.device}.",
        )


def is_elsewhere(device: str) -> bool:
    """Return whether the device of the pair is a GPU, and this machine has none."""
    import torch

    return device != HERE and not torch.cuda.is_available()


def server_arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line of the server that the options describe."""
    given = ["--model-path", options.target]
    if options.draft != shapes.MTP:  # which a server finds in the target's checkpoint
        given += ["--speculative-draft-model-path", options.draft]
    given += ["--speculative-algorithm", "SMC", "--log-level", "error"]
    given += ["--disable-radix-cache"] if shapes.is_recurrent(options.target) else []
    given += ["--trust-remote-code"] if options.trust_remote_code else []
    given += ["--device", "cuda"] if is_elsewhere(options.device) else []
    for name in SETTINGS:
        given += [flag_of(name), str(getattr(options, name))]
    return given


def _as_a_server(given: list[str]) -> StartVerdict:
    """Resolve and check the arguments as this machine would to start a server."""
    from sglang_smc import upstream

    here = [word for word in given if word not in ("--device", "cuda")]
    return _tried(here, upstream.resolve_now)


def _without_sglang(given: list[str]) -> StartVerdict:
    """Check the arguments as sglang-smc does, whatever SGLang makes of them on this machine."""
    from sglang_smc import upstream
    from sglang_smc.server.algorithm import validate_server_args

    with upstream.any_quantization():
        return _tried(given, validate_server_args)


def _tried(given: list[str], check: Callable[[Any], None]) -> StartVerdict:
    from sglang.srt.server_args import prepare_server_args

    from sglang_smc import upstream
    from sglang_smc.models.supported import draft_config
    from sglang_smc.server import draft_window

    beyond = None
    try:
        server_args: Any = prepare_server_args(given)
        check(server_args)
        longest = upstream.model_config_of(server_args).context_len
        if server_args.speculative_draft_model_path is not None:
            beyond = draft_window.beyond_training(server_args, draft_config(server_args))
    except (OSError, ValueError) as error:
        return StartVerdict(fail(ABOUT, "refused", str(error)))
    except Exception as error:  # of SGLang, whatever a broken configuration raises
        return StartVerdict(fail(ABOUT, "not read", f"{type(error).__name__}: {error}"))
    return StartVerdict(None, longest, beyond)


def _context(asked: int | None, verdict: StartVerdict) -> Iterator[Finding]:
    """Yield what is wrong with the length of texts: for the target, or for the draft."""
    if asked is not None and asked > verdict.longest:
        do = f"Allowed: at most {verdict.longest:,}, what the target takes."
        yield fail("context", f"--context is {asked:,}", do)
    if verdict.beyond is not None:
        yield warning("context of the draft", "shorter than the target's", verdict.beyond)
