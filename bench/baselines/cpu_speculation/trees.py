"""Build and verify trees of draft tokens in torch, for SGLang's own speculative decoding.

Nodes are numbered from the root, 0; a child has a higher number than its parent. A chain is a tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_smc.kv.rows import spans


class Links(NamedTuple):
    """The outputs that describe a batch's trees to SGLang; each [requests, width] int64."""

    index: torch.Tensor  # a node's index among those of all requests
    child: torch.Tensor  # its first child, or -1
    sibling: torch.Tensor  # the next child of its parent, or -1


def who_sees_whom(parent_list: torch.Tensor, selected: torch.Tensor, topk: int) -> torch.Tensor:
    """Return each node's ancestors, itself included: ``[requests, width, width]`` bool.

    Args:
        parent_list: [requests, n] for each group of ``topk`` candidates, their parent candidate
        selected: [requests, width - 1] the candidates that became nodes 1, 2, ...; ascending
    """
    requests = len(selected)
    width = selected.shape[1] + 1
    group = selected // topk
    follows = torch.zeros_like(selected)
    if parent_list.numel():
        follows = parent_list.gather(1, group.clamp(max=parent_list.shape[1] - 1))
    is_parent = selected.unsqueeze(1) == follows.unsqueeze(2)
    # With ties a parent may not have been selected: its children are left out of the tree.
    parents = torch.where(is_parent.any(2), is_parent.int().argmax(2) + 1, torch.arange(1, width))
    parents = torch.where(group == 0, 0, parents)  # the first group follows the root
    sees = torch.eye(width, dtype=torch.bool).repeat(requests, 1, 1)
    for node in range(1, width):
        sees[:, node] |= sees[torch.arange(requests), parents[:, node - 1]]
    return sees


def places_in_mask(cached: torch.Tensor, width: int) -> torch.Tensor:
    """Return the indices of SGLang's tree mask for new tokens, ``[rows, width, width]`` int64.

    The mask has a line for each new token, over all of its row's cached and new tokens; the lines
    of all rows are concatenated.

    Args:
        cached: [rows] cached tokens
        width: new tokens of each row
    """
    cached = cached.long()
    size = width * (cached + width)  # [rows] of a row's lines together
    line = torch.arange(width).unsqueeze(1) * (cached + width).view(-1, 1, 1)
    start = (size.cumsum(0) - size + cached).view(-1, 1, 1) + line  # [rows, width, 1]
    return start + torch.arange(width)


def write_tree(
    sees: torch.Tensor, seq_lens: torch.Tensor, positions: torch.Tensor, links: Links
) -> None:
    """Write positions and links of trees, from ancestors and ``seq_lens`` [requests]."""
    requests, width, _ = sees.shape
    node = torch.arange(width)
    positions.copy_((sees.sum(2) - 1 + seq_lens.unsqueeze(1)).flatten())
    links.index.copy_(torch.arange(requests * width).view(requests, width))
    parent = (sees & (node < node.unsqueeze(1))).int().mul(node + 1).amax(2) - 1  # -1: the root's
    child = parent.unsqueeze(1) == node.unsqueeze(1)  # [requests, node, its child]
    sibling = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (node > node.unsqueeze(1))
    sibling &= parent.unsqueeze(2) >= 0
    for written, found in ((links.child, child), (links.sibling, sibling)):
        written.copy_(torch.where(found.any(2), found.int().argmax(2), -1))


def walk(
    tokens: list[int], wanted: list[int], child: list[int], sibling: list[int], longest: int
) -> list[int]:
    """Return the nodes from the root on, each holding the target's token at the node before."""
    nodes = [0]
    while len(nodes) < longest:
        node = child[nodes[-1]]
        while node != -1 and tokens[node] != wanted[nodes[-1]]:
            node = sibling[node]
        if node == -1:
            break
        nodes.append(node)
    return nodes


def slots_between(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Return the slots of each row's positions ``start .. end - 1``, concatenated, int64."""
    return req_to_token[spans(req_pool_indices, start_offset, end_offset)].long()


def tree_of_mask(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    width: int,
) -> None:
    """Call `write_tree` with a mask that has a line for each node, over the nodes alone."""
    sees = tree_mask.view(batch_size, width, width).bool()
    links = Links(retrieve_index, retrieve_next_token, retrieve_next_sibling)
    write_tree(sees, seq_lens, positions, links)
