"""The contract holds for the installed SGLang, and a breach is told, one line for each."""

import pytest
import sglang

from sglang_smc.server import compat, hooks
from sglang_smc.server.compat import Symbol

REGISTER = "sglang.srt.plugins.hook_registry.HookRegistry.register"
REGISTRY = "sglang.srt.plugins.hook_registry.HookRegistry"


@pytest.mark.parametrize("symbol", compat.CONTRACT, ids=lambda symbol: symbol.path)
def test_installed_sglang_keeps_the_contract(symbol: Symbol) -> None:
    assert compat.check_symbols((symbol,)) == []


def test_installed_version_is_supported() -> None:
    assert compat.check_version() == []


@pytest.mark.parametrize(
    ("symbol", "problem"),
    [
        (Symbol("sglang.srt.no_such_module.f"), "sglang.srt.no_such_module.f is missing"),
        (Symbol(REGISTRY + ".gone"), "HookRegistry.gone is missing"),
        (
            Symbol(REGISTER, "target hook"),
            "takes (target hook hook_type source)",
        ),
        (Symbol(REGISTRY + "._patched", "self"), "HookRegistry._patched is no function"),
        (Symbol(REGISTRY, attributes="_hooks _gone"), "HookRegistry has no _gone"),
    ],
)
def test_breach_names_the_symbol(symbol: Symbol, problem: str) -> None:
    (found,) = compat.check_symbols((symbol,))
    assert problem in found


def test_attributes_set_in_methods_count() -> None:
    """Most of SGLang's state is set in `__init__` and declared nowhere."""
    symbol = Symbol("sglang.srt.speculative.spec_registry.CustomSpecAlgo", attributes="factory")
    assert compat.check_symbols((symbol,)) == []


@pytest.mark.parametrize(
    ("installed", "is_supported"),
    [("0.5.17", True), ("0.5.17+cpu", True), ("0.5.17.post1", False), ("0.5.18", False)],
)
def test_version(monkeypatch: pytest.MonkeyPatch, installed: str, is_supported: bool) -> None:
    monkeypatch.setattr(sglang, "__version__", installed)
    assert (compat.check_version() == []) is is_supported


def test_version_check_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "9.9.9")
    monkeypatch.setenv(compat.SKIP_VERSION_ENV, "1")
    assert compat.check_version() == []


def test_every_hook_target_is_in_the_contract() -> None:
    paths = {symbol.path for symbol in compat.CONTRACT}
    assert [patch.target for patch in hooks.collect() if patch.target not in paths] == []
