"""The installed SGLang has all that this package touches in it."""

import pytest
from contract.shape import Symbol
from contract.symbol_check import problems
from contract.symbols import contract

from sglang_smc import upstream
from sglang_smc.server import hooks

SRT = "sglang.srt"
REGISTER = "sglang.srt.plugins.hook_registry.HookRegistry.register"
REGISTRY = "sglang.srt.plugins.hook_registry.HookRegistry"


CONTRACT = contract(upstream.IS_NEWER, upstream.IS_NEWEST)


@pytest.mark.parametrize("symbol", CONTRACT, ids=lambda symbol: symbol.path)
def test_installed_sglang_keeps_the_contract(symbol: Symbol) -> None:
    assert problems(symbol) == []


@pytest.mark.parametrize(
    ("symbol", "problem"),
    [
        (Symbol(SRT + ".no_such_module.f"), "sglang.srt.no_such_module.f is missing"),
        (Symbol(REGISTRY + ".gone"), "HookRegistry.gone is missing"),
        (
            Symbol(REGISTER, "hook target"),
            "takes (target hook hook_type source)",
        ),
        (Symbol(REGISTRY + "._patched", "self"), "HookRegistry._patched is no function"),
        (Symbol(REGISTRY, attributes="_hooks _gone"), "HookRegistry has no _gone"),
    ],
)
def test_breach_names_the_symbol(symbol: Symbol, problem: str) -> None:
    (found,) = problems(symbol)
    assert problem in found


def test_attributes_set_in_methods_count() -> None:
    """Most of SGLang's state is set in `__init__` and declared nowhere."""
    symbol = Symbol("sglang.srt.speculative.spec_registry.CustomSpecAlgo", attributes="factory")
    assert problems(symbol) == []


def test_every_hook_target_is_in_the_contract() -> None:
    paths = {symbol.path for symbol in CONTRACT}
    targets = [patch.target for patch in hooks.collect(*hooks.GROUPS)]
    assert [target for target in targets if target not in paths] == []
