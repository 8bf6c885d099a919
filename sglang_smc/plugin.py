"""Register SMC with SGLang: the entry point of the group `sglang.srt.plugins`.

SGLang calls `register` in every process, of servers without SMC too. So it installs only what
argument parsing needs: the name, the flags, and one hook that installs all others once a server has
selected SMC (`patches/server_args.py`).

SGLang suppresses exceptions of `register`. So on an SGLang release that is not supported, the name
SMC is registered all the same, and selecting it raises the reason.

The parts of supported releases that the package uses are derived from its source, in
tests/contract/upstream/relied.py, and compared there with the installed release: a check for a
change of release, not for each start of a server.
"""

import os
import sys
from contextlib import suppress
from typing import NoReturn

from sglang import version

from sglang_smc.options.server import ALGORITHM
from sglang_smc.upstream import SUPPORTED, release


def register() -> None:
    """Register the algorithm and its flags; a second call changes nothing."""
    refusal = problem()
    if refusal is None:
        _register_algorithm()
        _install_flags()
        _install_early()
        return
    _register_refusal(refusal)
    # So that a command line with SMC's flags is parsed, and then refused. Where the flags cannot be
    # declared, SGLang reports them as unknown; servers without them must not be affected.
    with suppress(Exception):
        _install_flags()


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_smc.server import algorithm

    if isinstance(get_spec(ALGORITHM), algorithm.SMCAlgorithm):
        return
    # Raises where another plugin has registered the name.
    SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=algorithm.validate_server_args,
        spec_class=algorithm.SMCAlgorithm,
    )(algorithm.worker_class)


def _register_refusal(message: str) -> None:
    """Register SMC as an algorithm that raises ``message`` in validation."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    def refuse(server_args: object) -> NoReturn:
        raise ValueError(message)

    if get_spec(ALGORITHM) is None:
        SpeculativeAlgorithm.register(
            ALGORITHM, supports_overlap=True, validate_server_args=refuse
        )(refuse)


def _install_flags() -> None:
    from sglang_smc.patches import server_args
    from sglang_smc.server import hooks

    server_args.add_fields()
    hooks.register(hooks.collect(hooks.FLAGS))


def _install_early() -> None:
    """Register the hooks of processes that have no later call: by the modules that they load.

    A scheduler reads its models' configurations before it builds the worker.
    """
    from sglang_smc.server import hooks

    if "sglang.srt.configs.model_config" in sys.modules:
        hooks.register(hooks.collect(hooks.DRAFTS))
    if "sglang.srt.managers.detokenizer_manager" in sys.modules:
        hooks.register(hooks.collect(hooks.DETOKENIZER))


# For development against another SGLang. A hook without its target still prevents a start.
SKIP_VERSION_ENV = "SGLANG_SMC_DISABLE_VERSION_CHECK"


def problem() -> str | None:
    """Return the error for selecting SMC on another release; None on a supported one."""
    if release() in SUPPORTED or os.environ.get(SKIP_VERSION_ENV) == "1":
        return None
    return (
        f"--speculative-algorithm SMC cannot run here: sglang {version.__version__} is installed; "
        f"allowed: {', '.join(SUPPORTED)}. Install one of them (pip install "
        f"'sglang=={SUPPORTED[-1]}'), or an sglang-smc made for {release()}. To develop against "
        f"another SGLang, set {SKIP_VERSION_ENV}=1."
    )
