"""Entry point of the group `sglang.srt.plugins`.

SGLang calls `register` in every process, swallows what it raises and goes on. So nothing here may
fail unheard: the name SMC is registered first, whatever `compat` finds, and carries the findings to
whoever selects it.
"""

from typing import NoReturn

from sglang_smc.options.server import ALGORITHM


def register() -> None:
    """Register the algorithm, its flags and its hooks; a second call changes nothing."""
    from sglang_smc.server import compat

    problems = compat.check()
    if not problems:
        _register_algorithm()
        _install_everything()
        return
    _register_refusal(compat.explain(problems))
    if not compat.check_symbols(compat.FLAGS):
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
    """So that a command line with our flags gets as far as the refusal."""
    from sglang_smc.patches import server_args
    from sglang_smc.server import hooks

    server_args.add_fields()
    hooks.install(server_args.PATCHES)


def _install_everything() -> None:
    from sglang_smc.server import hooks

    _install_flags()
    hooks.install(hooks.collect())
