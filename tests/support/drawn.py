"""Random cases, of kernels the same ones each time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smc.kv.transfer import each_tensor
from sglang_smc.ops.check_cases import CheckSizes, Inputs

Test = Callable[..., None]


class Case(Inputs):
    """What is drawn for one run of a test: its choices, and random tensors by its ``seed``."""

    def __init__(self, seed: int, **choices: Any) -> None:
        super().__init__("cpu", CheckSizes(), seed)
        vars(self).update(choices, seed=seed)

    def logits(self, *shape: int, spread: float, forbidden: float) -> torch.Tensor:
        """Rows ``[R, V]`` in which some tokens are forbidden, but one is left at the least."""
        banned = self.flags(forbidden, *shape)
        kept = self.whole(0, shape[1], shape[0], 1)
        left = ~banned.scatter(1, kept, False)
        return (spread * self.normal(*shape)).where(left, -torch.inf)

    def first_of(self, size: int, count: int) -> torch.Tensor:
        """``[size, count]`` bool: the first of each row, and some that follow it, or all."""
        return torch.arange(count) < self.whole(1, count + 1, size, 1)


def drawn(count: int, **choices: Any) -> Callable[[Test], Test]:
    """Have a test run over ``count`` cases ``c``, which have each of ``choices`` and a ``seed``.

    A choice is a strategy, or a list of values to choose from.
    """
    each = {name: st.sampled_from(c) if isinstance(c, list) else c for name, c in choices.items()}
    cases = st.builds(Case, **each, seed=st.integers(0, 2**16))
    same = settings(max_examples=count)
    return lambda test: same(given(c=cases)(test))


def patterns(atoms: Sequence[str], repeats: Sequence[str]) -> st.SearchStrategy:
    """Regular expressions of a few atoms."""

    def longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        few = st.lists(inner, min_size=2, max_size=3)
        repeated = st.tuples(inner, st.sampled_from(repeats))
        return st.one_of(
            few.map("".join),
            few.map(lambda all: f"(?:{'|'.join(all)})"),
            repeated.map(lambda both: f"(?:{both[0]}){both[1]}"),
            st.tuples(st.sampled_from("ims"), inner).map(lambda both: f"(?{both[0]}:{both[1]})"),
        )

    return st.recursive(st.sampled_from(atoms), longer, max_leaves=6)


def assert_same(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: Any,
    device: str,
    rounding: float = 0.0,
) -> Any:
    """Return the kernel's results, on the CPU, which are the reference's."""
    there = copied(list(arguments), device)
    found = each_tensor(lambda tensor: tensor.cpu(), kernel(*there))
    torch.testing.assert_close(found, reference(*arguments), rtol=rounding, atol=rounding)
    return found


def copied(values: Any, device: str) -> Any:
    """Copy all tensors to a device: kernels write over some that they are given."""
    return each_tensor(lambda tensor: tensor.to(device, copy=True), values)
