"""Schedulers in this process, one at a time, kept while tests ask for the same."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """Start schedulers by keyword; asking for another ends the last one."""
    import in_process

    with ExitStack() as stack:
        kept: dict[str, in_process.Server] = {}

        def begin(**arguments: Any) -> in_process.Server:
            key = repr(sorted(arguments.items()))
            if key not in kept:
                stack.close()
                kept.clear()
                kept[key] = stack.enter_context(in_process.running(**arguments))
            server = kept[key]
            server.flush()
            return server

        yield begin


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    """A target and a draft that disagree."""
    model = {"vocab_size": 64, "scale": 0.3}
    return tiny(seed=1, **model), tiny(seed=2, **model)
