"""Clients ask for as many top log-probabilities as a server allows."""

import pytest

from sglang_smc_tools.testing.client import TOPS, Client, RefusedError


def refuses_above(most: int, asked: list[int]) -> Client:
    """A client of a server that allows so many."""
    client = Client("http://nowhere")

    def ask(top: int) -> int:
        asked.append(top)
        if top > most:
            raise RefusedError(f"at most {most}")
        return top

    client.with_top(ask)
    return client


def test_fewer_are_asked_for_until_a_server_allows_them() -> None:
    asked: list[int] = []
    client = refuses_above(10, asked)
    assert asked == [64, 32, 20, 8]
    assert client.top == 8


def test_what_is_refused_for_another_reason_changes_nothing() -> None:
    """Red if a request that is refused whatever it asks for takes log-probabilities from others."""
    client = Client("http://nowhere")

    def refused(top: int) -> int:
        raise RefusedError("no such parameter")

    with pytest.raises(RefusedError, match="no such parameter"):
        client.with_top(refused)
    assert client.top == TOPS[0]
