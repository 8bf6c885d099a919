"""What stands for SGLang's kernels of speculative decoding, against loops over nodes and slots."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from baselines import cpu_speculation
from baselines.cpu_speculation import hooks as speculation
from baselines.cpu_speculation import trees
from laws import PLAIN, p_value, rules, sampling, sorted_law
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_smc.cpu.platform import PlainCpuPlatform
from sglang_smc.server import hooks

SEEDS = range(5)
NUM_STEPS = 3
TOPK = 3
WIDTH = 7


#: What the hooks are around: not to be called.
no_kernel = Mock(side_effect=AssertionError)


class Drafted(NamedTuple):
    """What SGLang knows of drafted candidates, of several requests."""

    parent_list: torch.Tensor  # [requests, groups]
    selected: torch.Tensor  # [requests, width - 1]
    parents: list[list[int]]  # of each request's nodes; the root's is -1
    seq_lens: torch.Tensor  # [requests]


def drafted(seed: int, requests: int = 3) -> Drafted:
    """Random trees. Candidates are numbered by steps; ``TOPK`` of a step go on to the next."""
    rng = random.Random(seed)
    groups = []
    selected = []
    parents = []
    for _ in range(requests):
        follows = [-1] * TOPK
        score = [rng.random() for _ in range(TOPK)]
        kept = list(range(TOPK))
        group = [-1, *range(TOPK)]
        for _step in range(1, NUM_STEPS):
            first = len(follows)
            behind = [parent for parent in kept for _ in range(TOPK)]
            follows += behind
            score += [score[parent] * rng.random() for parent in behind]
            fresh = range(first, len(follows))
            kept = sorted(fresh, key=score.__getitem__, reverse=True)[:TOPK]
            group += kept
        ranked = sorted(range(len(follows)), key=score.__getitem__, reverse=True)
        best = sorted(ranked[: WIDTH - 1])
        node = {-1: 0} | {candidate: number for number, candidate in enumerate(best, start=1)}
        groups.append(group[:-TOPK])  # nothing follows the last step's
        selected.append(best)
        parents.append([-1, *(node[follows[c]] for c in best)])
    seq_lens = torch.tensor([rng.randint(1, 8) for _ in range(requests)])
    return Drafted(torch.tensor(groups), torch.tensor(selected), parents, seq_lens)


class Tree(NamedTuple):
    """Tensors as SGLang gives them to be written."""

    mask: torch.Tensor
    positions: torch.Tensor
    links: torch.Tensor  # [3, requests, width]: indices, first children, next siblings

    @classmethod
    def unwritten(cls, seq_lens: torch.Tensor, width: int) -> Tree:
        size = int((width * (seq_lens + width)).sum())
        requests = len(seq_lens)
        mask = torch.ones(size, dtype=torch.bool)
        return cls(mask, torch.empty(requests * width).long(), torch.full((3, requests, width), -1))


def build(case: Drafted, topk: int = TOPK) -> Tree:
    width = case.selected.shape[1] + 1
    tree = Tree.unwritten(case.seq_lens, width)
    args = (case.parent_list, case.selected, case.seq_lens, tree.mask, tree.positions)
    speculation.build_trees(no_kernel, *args, *tree.links, topk, NUM_STEPS, width, 0)
    return tree


def ancestors(parents: list[int], node: int) -> list[int]:
    found = []
    while node != -1:
        found.append(node)
        node = parents[node]
    return found


def assert_links(tree: Tree, case: Drafted) -> None:
    width = len(case.parents[0])
    for row, parents in enumerate(case.parents):
        children = {node: [c for c in range(width) if parents[c] == node] for node in range(width)}
        index, child, sibling = tree.links[:, row].tolist()
        assert index == [row * width + node for node in range(width)]
        assert child == [min(children[node], default=-1) for node in range(width)]
        later = [[c for c in children.get(parents[n], []) if c > n] for n in range(width)]
        assert sibling == [min(after, default=-1) for after in later]
        depth = [len(ancestors(parents, node)) - 1 for node in range(width)]
        positions = tree.positions.view(-1, width)[row].tolist()
        assert positions == [int(case.seq_lens[row]) + d for d in depth]


@pytest.mark.parametrize("seed", SEEDS)
def test_trees(seed: int) -> None:
    """From candidates, and from the mask that these make."""
    case = drafted(seed)
    tree = build(case)
    assert_links(tree, case)
    wanted = []
    for text, parents in zip(case.seq_lens.tolist(), case.parents, strict=True):
        for node in range(WIDTH):
            own = ancestors(parents, node)
            wanted += [True] * text + [other in own for other in range(WIDTH)]
    assert tree.mask.tolist() == wanted
    sees = tree.mask[trees.places_in_mask(case.seq_lens, WIDTH)]
    other = Tree.unwritten(case.seq_lens, WIDTH)
    args = (sees.flatten(), case.seq_lens, other.positions)
    trees.tree_of_mask(*args, *other.links, len(sees), WIDTH)
    assert_links(other, case)


@pytest.mark.parametrize("steps", [NUM_STEPS, 1])
def test_chains(steps: int) -> None:
    chosen = torch.arange(steps).repeat(2, 1)
    groups = chosen - 1 if steps > 1 else torch.empty(2, 0).long()
    case = Drafted(groups, chosen, [[*range(-1, steps)]] * 2, torch.tensor([4, 1]))
    assert_links(build(case, topk=1), case)


def test_a_node_whose_parent_was_not_selected_is_out_of_the_tree() -> None:
    """Candidate 3 follows candidate 0: as probable, where that is certain."""
    case = Drafted(torch.tensor([[-1, 0, 1]]), torch.tensor([[1, 2]]), [], torch.ones(1))
    assert build(case, topk=2).links[1:].tolist() == [[[1, -1, -1]], [[-1, -1, -1]]]


def verified(
    case: Drafted, tokens: torch.Tensor, target: torch.Tensor, longest: int, topk: int = TOPK
) -> Any:
    requests, width = tokens.shape
    names = "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"
    links = dict(zip(names, build(case, topk).links, strict=True))
    found = {
        "predicts": torch.zeros(requests * width, dtype=torch.int32),
        "accept_index": torch.full((requests, longest), -1, dtype=torch.int32),
        "accept_token_num": torch.empty(requests, dtype=torch.int32),
    }
    given = {"candidates": tokens, "target_predict": target, **links}
    speculation.verify_trees(no_kernel, **found, **given)
    return SimpleNamespace(**found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("longest", [2, NUM_STEPS + 1])
def test_walks(seed: int, longest: int) -> None:
    """Few tokens, so that some walks reach a leaf and siblings hold one token at times."""
    case = drafted(seed, requests=20)
    generator = torch.Generator().manual_seed(seed)
    tokens, target = torch.randint(0, 3, (2, 20, WIDTH), generator=generator)
    found = verified(case, tokens, target, longest)
    lengths = []
    for row, parents in enumerate(case.parents):
        walk = [0]
        while len(walk) < longest:
            fits = [c for c in range(WIDTH) if parents[c] == walk[-1]]
            fits = [c for c in fits if tokens[row, c] == target[row, walk[-1]]]
            if not fits:
                break
            walk.append(fits[0])
        padding = [-1] * (longest - len(walk))
        assert found.accept_index[row].tolist() == [row * WIDTH + n for n in walk] + padding
        assert found.accept_token_num[row] == len(walk) - 1
        own = found.predicts.view(-1, WIDTH)[row].tolist()
        assert own == [int(target[row, n]) if n in walk else 0 for n in range(WIDTH)]
        lengths.append(len(walk))
    assert len(set(lengths)) > 1


def target_tokens(logits: torch.Tensor, info: Any, size: int) -> torch.Tensor:
    sizes = {"batch_size": size, "verify_width": len(logits) // size, "max_top_k": None}
    return speculation.sample_target(
        no_kernel, next_token_logits=logits, sampling_info=info, **sizes
    )


#: Two tokens behind the root, and one behind the first of them: nodes by the text that leads there.
NODES = {(): 0, (0,): 1, (2,): 2, (0, 3): 3}


@pytest.mark.parametrize(
    "limits",
    [{}, {"temperatures": 0.5}, {"top_ks": 2}, {"top_ps": 0.6}, {"min_ps": 0.5}],
    ids=lambda limits: next(iter(limits), "plain"),
)
def test_accepted_texts_follow_the_target(limits: dict[str, Any]) -> None:
    size = 4000
    parents = [-1, 0, 0, 1]
    torch.manual_seed(0)
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    target = target_tokens(logits.repeat(size, 1), sampling(size, **limits), size)
    selected = torch.tensor([[-1, 0, 1], [0, 1, 2]]).repeat_interleave(size, 0).view(2, size, 3)
    case = Drafted(*selected, [parents] * size, torch.ones(size))
    found = verified(case, torch.tensor([0, 0, 2, 3]).repeat(size, 1), target, 3, topk=2)
    texts = [tuple(found.predicts[walk[walk != -1]].tolist()) for walk in found.accept_index]
    probs = sorted_law(logits, rules(*(PLAIN | limits).values())).exp()
    law = law_of_texts({text: probs[node] for text, node in NODES.items()})
    assert p_value(texts, law) > 1e-4


def law_of_texts(next_probs: dict[tuple[int, ...], torch.Tensor]) -> dict[tuple[int, ...], float]:
    """Of all texts that end one token behind a node."""
    law: dict[tuple[int, ...], float] = {}
    for text, probs in next_probs.items():
        mass = math.prod(float(next_probs[text[:n]][token]) for n, token in enumerate(text))
        for token, share in enumerate(probs.tolist()):
            if (*text, token) not in next_probs and mass * share > 0:
                law[(*text, token)] = mass * share
    assert sum(law.values()) == pytest.approx(1.0)
    return law


def test_greedy_rows_beside_others_stay_greedy() -> None:
    logits = torch.randn(6, 50)
    info = sampling(2, top_ks=1)
    info.top_ks[1] = 50
    assert torch.equal(target_tokens(logits, info, 2)[0], logits[:3].argmax(1))


def test_slots_and_tokens_are_moved_as_kernels_move_them() -> None:
    table = torch.arange(100, dtype=torch.int32).view(5, 20)
    rows = torch.tensor([3, 0, 4])
    start = torch.tensor([2, 0, 7])
    end = torch.tensor([5, 0, 11])
    spans = list(zip(rows, start, end, strict=True))
    wanted = torch.cat([table[row, a:b] for row, a, b in spans]).long()
    places = {"start_offset": start.int(), "end_offset": end, "batch_size": 3}
    found = trees.slots_between(req_pool_indices=rows, req_to_token=table, **places)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)

    written = table.clone()
    expected = table.clone()
    speculation.fill_table(no_kernel, rows, written, start.int(), end.int(), wanted + 1000, 3)
    for row, a, b in spans:
        expected[row, a:b] += 1000
    assert torch.equal(written, expected)

    slots = torch.empty(3 * 6, dtype=torch.long)
    speculation.draft_slots(no_kernel, rows, table, start, slots, topk=2, num_cols=3)
    assert torch.equal(slots.int(), torch.cat([table[row, a : a + 6] for row, a, _ in spans]))

    window = torch.arange(100, 112)
    to, of = torch.zeros(2, 6, dtype=torch.long)
    speculation.front_slots(no_kernel, torch.tensor([2, 3]), window, to)
    walks = torch.tensor([[0, 4, -1], [6, 8, 11]], dtype=torch.int32)
    speculation.accepted_slots(no_kernel, walks, window, of, 6)
    assert to.tolist() == [100, 101, 106, 107, 108, 0]
    assert of.tolist() == [100, 104, 106, 108, 111, 0]

    bonus = torch.empty(2, dtype=torch.int32)
    tokens = torch.tensor([[5, 6, 9], [7, 9, 9]])
    lengths = torch.tensor([2, 1])
    speculation.last_accepted(no_kernel, tokens, lengths, bonus, 3, 2)
    assert bonus.tolist() == [6, 7]


@pytest.mark.parametrize("lost", [patch.target for patch in hooks.collect(cpu_speculation.HOOKS)])
def test_hook_that_did_not_land_is_named(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    hooks.install(cpu_speculation.HOOKS)
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {lost})
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(RuntimeError, match=lost):
        cpu_speculation.worker_cls(PlainCpuPlatform(), "STANDALONE")


@pytest.mark.parametrize("field", cpu_speculation.OPTIONS)
def test_options_that_do_not_run_are_refused(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Of SGLang's own algorithms; SMC judges them itself."""
    monkeypatch.setattr(cpu_speculation, "_apply_defaults", Mock())
    runs = {name: allowed[0] for name, allowed in cpu_speculation.OPTIONS.items()}

    def apply(algorithm: str, **changes: Any) -> None:
        args: Any = SimpleNamespace(speculative_algorithm=algorithm, **runs | changes)
        cpu_speculation.apply_defaults(PlainCpuPlatform(), args)

    apply("SMC", **{field: 16})
    apply("NEXTN")
    with pytest.raises(ValueError, match=rf"{field}=16 \(allowed: {runs[field]}\)"):
        apply("NEXTN", **{field: 16})
