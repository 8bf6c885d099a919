"""Return the answers of a list beside the failures of its other items.

SGLang raises the error of one item for a list that is not streamed, and drops all its answers.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from fastapi import Request

from sglang_smc.state.failures import is_own

# Their answers show a finish reason for each item, and its message.
_ROUTES = ("/generate", "/vertex_generate")

_keeps_errors: ContextVar[bool] = ContextVar("keeps_errors", default=False)


class Failed(dict[str, Any]):
    """The answer of a request that SMC has ended, with the error that SGLang raises for it."""

    def __init__(self, answer: dict[str, Any], error: Exception) -> None:
        super().__init__(answer)
        self.error = error


def shows_each(request: Any) -> bool:
    """Return whether a request's caller, an engine's by None, is shown how each item ended."""
    return request is None or (isinstance(request, Request) and request.url.path in _ROUTES)


def is_kept(answer: dict[str, Any]) -> bool:
    """Return whether an answer is of a request that SMC has ended, below `whole_or_each`."""
    return _keeps_errors.get() and is_own(answer["meta_info"]["finish_reason"])


async def whole_or_each(answers: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    """Yield the answer to a request that is not streamed; raise its error if all of it failed.

    Args:
        answers: yields one answer, or one list of them, of which some may be `Failed`.
    """
    async with aclosing(answers):
        token = _keeps_errors.set(True)  # in the tasks of its items, too
        try:
            answer = await anext(answers)
        finally:
            _keeps_errors.reset(token)
        items = answer if isinstance(answer, list) else [answer]
        errors = [item.error for item in items if isinstance(item, Failed)]
        if errors and len(errors) == len(items):
            raise errors[0]
        yield answer
