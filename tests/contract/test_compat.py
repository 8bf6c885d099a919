"""Three releases of SGLang are supported, and others are told from them."""

import pytest
from sglang import version

from sglang_smc import upstream
from sglang_smc.server import compat


def test_installed_version_is_supported() -> None:
    assert compat.problem() is None


@pytest.mark.parametrize(
    ("installed", "is_supported"),
    [
        *((release, True) for release in upstream.SUPPORTED),
        ("0.5.17+cpu", True),
        ("0.5.17.post1", False),
        ("0.5.18", False),
        ("0.5.24", False),
    ],
)
def test_version(monkeypatch: pytest.MonkeyPatch, installed: str, is_supported: bool) -> None:
    monkeypatch.setattr(version, "__version__", installed)
    assert (compat.problem() is None) is is_supported


def test_version_check_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "__version__", "9.9.9")
    monkeypatch.setenv(compat.SKIP_VERSION_ENV, "1")
    assert compat.problem() is None
