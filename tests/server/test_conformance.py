"""Run the cheap checks of `bench/conformance` on this folder's server, in mode exact."""

import pytest
from conformance.checks.registry import CHECKS
from conformance.run import judge
from conformance.server import CheckedServer, open_server
from http_server import Server

CHEAP = (
    "several choices",
    "several stop strings in one round",
    "stop token ids",
    "longest length",
    "regular expressions",
    "structural tags",
    "log-probabilities of listed tokens",
    "log-probabilities, streamed",
    "usage",
    "scores of items",
    "prefix cache of growing chats",
    "sessions",
)


@pytest.fixture(scope="module")
def tested(server: Server) -> CheckedServer:
    return open_server(server.url, server.key, own={"smc": {"mode": "exact"}})


@pytest.mark.parametrize("feature", CHEAP)
def test_a_feature_is_honoured(feature: str, tested: CheckedServer) -> None:
    (check,) = [one for one in CHECKS if one.feature == feature]
    found = judge(check, tested)
    assert found.verdict == "ok", found.told
