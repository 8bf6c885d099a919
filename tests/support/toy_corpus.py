"""A corpus that knows what to propose, in the form of SGLang's answers."""

from typing import Any

import numpy as np
import torch
from toy_worker import PROMPT

from sglang_smc.proposers.ngram import Corpus

Tree = dict[int, Any]  # token -> what may follow it

NUM_NODES = 5
DEPTH = 4
_TREES: tuple[Tree, ...] = (
    {1: {1: {1: {1: {}}}}},
    {0: {1: {}, 0: {}}, 1: {}},
    {},
    {2: {}, 1: {0: {0: {}}}},
)


def tree_behind(context: list[int]) -> Tree:
    """What follows the last tokens of a text, by their values and their number."""
    return _TREES[sum((3 * place + 1) * token for place, token in enumerate(context)) % len(_TREES)]


def answer(last: int, tree: Tree, num_nodes: int) -> tuple[list[int], np.ndarray]:
    """Tokens ``[T]`` and mask ``[T, T]`` of a tree, filled up as SGLang does."""
    tokens = [last]
    above = [[0]]
    queue = [([0], tree)]
    while queue:
        path, here = queue.pop(0)
        for token, following in here.items():
            tokens.append(token)
            above.append([*path, len(tokens) - 1])
            queue.append((above[-1], following))
    for node in range(len(tokens), num_nodes):
        tokens.append(0)
        above.append([0, node])
    mask = np.zeros((num_nodes, num_nodes), dtype=np.int64)
    for node, these in enumerate(above):
        mask[node, these] = 1
    return tokens, mask


class ToyTrie:
    """In place of SGLang's, with the trees above; it has read ``told``."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.open: set[str] = set()

    def batch_put(self, batch_tokens: list[list[int]]) -> None:
        self.told += batch_tokens

    def synchronize(self) -> None:
        pass

    def reset(self) -> None:
        self.told = []

    def batch_get(
        self, req_ids: list[str], batch_tokens: list[list[int]], total_lens: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        assert not self.open & set(req_ids), "matched on from another particle's text"
        self.open |= set(req_ids)
        found = [answer(text[-1], tree_behind(text), NUM_NODES) for text in batch_tokens]
        tokens, masks = zip(*found, strict=True)
        return np.array(tokens).ravel(), np.stack(masks).ravel()

    def erase_match_state(self, req_ids: list[str]) -> None:
        self.open -= set(req_ids)


def corpus() -> Corpus:
    return Corpus(ToyTrie(), DEPTH, NUM_NODES)


def children(text: tuple[int, ...], start: int) -> list[int]:
    """What is proposed behind an output that has gone on from its first ``start`` tokens."""
    here = tree_behind([*PROMPT, *text[:start]][-DEPTH:])
    for token in text[start:]:
        here = here.get(token, {})
    return list(here)


def law_of_matches(proposed: list[int], vocab_size: int) -> torch.Tensor:
    """The law ``[V]`` of what is drafted, by its definition."""
    law = torch.zeros(vocab_size)
    law[proposed or [0]] = 1 / max(len(proposed), 1)
    return law
