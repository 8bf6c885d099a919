"""Entry point of the group `sglang.srt.plugins`.

SGLang calls `register` in every process, of servers without SMC too. So it brings what argument
parsing needs and no more: the name, the flags, and one hook that installs all others once a server
has selected SMC (`patches/server_args.py`).

SGLang swallows what `register` raises and goes on, so nothing may fail unheard: on a release that
is not supported, the name SMC is registered all the same, and tells the reason to whoever selects
it.
"""

import sys
from contextlib import suppress
from typing import NoReturn

from sglang_smc.options.server import ALGORITHM


def register() -> None:
    """Register the algorithm and its flags; a second call changes nothing."""
    from sglang_smc.server import compat

    problem = compat.problem()
    if problem is None:
        _register_algorithm()
        _install_flags()
        _keep_drafts_whole()
        return
    _register_refusal(problem)
    # So that a command line with our flags gets as far as the refusal. Where they cannot even be
    # declared, SGLang itself calls them unknown; servers without them must not hear of it.
    with suppress(Exception):
        _install_flags()


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_smc.server import algorithm

    if isinstance(get_spec(ALGORITHM), algorithm.SMCAlgorithm):
        return
    # Raises where another plugin holds the name already.
    SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=algorithm.validate_server_args,
        spec_class=algorithm.SMCAlgorithm,
    )(algorithm.worker_class)


def _register_refusal(message: str) -> None:
    """Register SMC as an algorithm that no server starts with, for the reason in `message`."""
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
    hooks.hand_over(hooks.collect(hooks.FLAGS))


def _keep_drafts_whole() -> None:
    """Hook a scheduler's configurations: it reads the draft's before it asks for our worker."""
    from sglang_smc.server import hooks

    if "sglang.srt.configs.model_config" in sys.modules:
        hooks.hand_over(hooks.collect(hooks.DRAFTS))
