"""What the corpus reads and answers, and how a round follows its trees."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from populations import population_of
from toy_corpus import ToyTrie, Tree, answer

from sglang_smc import upstream
from sglang_smc.options.request import RequestConfig
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.ngram import NONE, Corpus, Matches, as_trees, open_corpus
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.state.request import RequestState

SETTINGS = {
    "speculative_ngram_max_trie_depth": 6,
    "speculative_ngram_min_bfs_breadth": 1,
    "speculative_ngram_max_bfs_breadth": 10,
    "speculative_ngram_match_type": "BFS",
    "speculative_ngram_capacity": 10_000,
}


def request(prompt: list[int], answered: list[int], weight: float = 0.5) -> Any:
    config = RequestConfig(ngram_weight=weight)
    return SimpleNamespace(
        origin_input_ids=prompt, output_ids=answered, smc_state=RequestState.of(0, config)
    )


def tree_of(tokens: np.ndarray, parents: np.ndarray, node: int = 0) -> Tree:
    return {
        int(tokens[child]): tree_of(tokens, parents, child)
        for child in np.flatnonzero(parents == node)
    }


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {5: {6: {7: {}}}},
        {5: {0: {}}, 6: {}},
        {3: {}, 0: {}},
        {0: {4: {}}},
        {3: {}, 2: {}, 1: {}, 4: {}, 9: {}},
        {0: {0: {0: {0: {0: {}}}}}},
    ],
)
def test_trees_are_read_as_sglang_writes_them(tree: Tree) -> None:
    """Red for a parent that is not the nearest, and for padding that is taken for token 0."""
    tokens, mask = answer(8, tree, 6)
    found = as_trees(np.array([tokens, tokens]), np.stack([mask, mask]), 6)
    # Padding and a lone token 0 look alike, and are nothing.
    expected = {token: after for token, after in tree.items() if (token, after) != (0, {})}
    assert [tree_of(found[0][row], found[1][row]) for row in range(2)] == [expected] * 2
    assert (found[1][:, 0] == NONE).all()


def test_each_token_is_read_once_with_what_stands_before_it() -> None:
    """Red where a seam between prompt, rounds and answers is lost, or a text read twice."""
    trie = ToyTrie()
    corpus, req = Corpus(trie, 4, 6), request([1, 2, 3, 4, 5, 6], [])
    corpus.read(req)
    corpus.read(req)
    assert trie.told == [[1, 2, 3, 4, 5, 6]]
    corpus.read(req, [7, 8])
    assert trie.told[1:] == [[4, 5, 6, 7, 8]]
    req.output_ids = [7, 8]
    corpus.read(req)
    corpus.read(req, [9])
    assert trie.told[2:] == [[6, 7, 8, 9]]
    req.output_ids = [7, 8, 9, 10, 11, 12, 13]
    corpus.read(req, [14])
    assert trie.told[3:] == [[7, 8, 9, 10, 11, 12, 13, 14]]


def test_what_particles_have_not_settled_is_not_read() -> None:
    trie = ToyTrie()
    req = request([1, 2], [3])
    req.smc_state.open_token.begin(0)
    Corpus(trie, 4, 6).read(req)
    assert trie.told == [[1, 2]]


def corpus_of(*texts: list[int], **more: Any) -> Corpus:
    if not upstream.IS_NEWER:
        pytest.skip("this SGLang's cache does not compile everywhere, and is refused")
    corpus = open_corpus(SimpleNamespace(**{**SETTINGS, **more}), SMCConfig(num_steps=4))
    for text in texts:
        corpus.read(request(text, []))
    return corpus


def trees(corpus: Corpus, reqs: list[Any], tails: list[list[list[int]]]) -> list[Tree]:
    tokens, parents = corpus.trees(reqs, population_of(tails))
    return [tree_of(*row) for row in zip(tokens, parents, strict=True)]


def test_sglangs_corpus_continues_each_particles_own_text() -> None:
    """Red where a particle is matched by another's text or by its own of the round before."""
    corpus = corpus_of([11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25])
    req = request([40, 11], [12])
    assert trees(corpus, [req], [[[13], [21, 22]]]) == [{14: {15: {16: {}}}}, {23: {24: {25: {}}}}]
    # The same request, each particle with a text that is no continuation of its last.
    assert trees(corpus, [req], [[[21, 22, 23], [13, 14]]]) == [{24: {25: {}}}, {15: {16: {}}}]
    assert trees(corpus, [req], [[[99], [13]]]) == [{}, {14: {15: {16: {}}}}]


def test_prompts_answer_unless_a_request_wants_none_and_a_flush_leaves_nothing() -> None:
    corpus = corpus_of([11, 12, 13])
    talks, silent = request([1, 2, 3, 4, 1, 2], [3]), request([1, 2], [3], weight=0.0)
    assert trees(corpus, [talks, silent], [[[]], [[]]]) == [{4: {1: {2: {3: {}}}}}, {}]
    assert trees(corpus, [request([5, 11], [12])], [[[]]]) == [{13: {}}]
    for _ in range(8):
        corpus.read(request([*range(100, 6_000), 11, 12, 14], []))
    corpus.forget()
    assert trees(corpus, [request([5, 11], [12])], [[[]]]) == [{}]


def test_what_sglang_cannot_build_is_said_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.cpp_ngram import ngram_corpus

    def broken() -> type:
        raise RuntimeError("ninja exited with status 1\nx.h:13:17: error: no such thing\nmore")

    monkeypatch.setattr(ngram_corpus, "get_ngram_corpus_cls", broken)
    with pytest.raises(ValueError, match=r"ngram-weight.*x.h:13:17: error: no such thing.*g\+\+"):
        corpus_of()


def mixed(
    tree: Tree, weights: list[float], logits: list[list[float]], alone: bool = False, **more: Any
) -> Any:
    """Probabilities ``[D, V]`` of q: one tree behind all particles, and the draft's own logits."""
    tokens, mask = answer(1, tree, 6)
    size = len(weights)
    trees = [torch.from_numpy(one).expand(size, -1) for one in as_trees(np.array(tokens), mask, 6)]
    matches = Matches(trees[0], trees[1], torch.zeros(size).long(), torch.tensor(weights), alone)
    draft = TokenDistribution(torch.tensor(logits), torch.ones(size), **more)
    return pytest.approx(matches.mixed(draft).log_probs().exp().numpy(), abs=1e-5)


def test_a_forbidden_token_gets_no_mass() -> None:
    """Red where a match speaks over masks, biases of -inf or filters of its request."""
    found = mixed({2: {}}, [0.5, 0.5], [[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    assert found == np.array([[0.5, 0.5, 0.0], [1 / 6, 1 / 6, 2 / 3]])
    filters = torch.ones(1), torch.tensor([2]), torch.ones(1), torch.zeros(1)
    kept = TokenDistribution.keep_tokens(torch.tensor([[2.0, 1.0, 0.0]]), *filters)
    q = 1 / (1 + math.e)
    assert mixed({2: {}}, [0.5], [[2.0, 1.0, 0.0]], kept=kept) == np.array([[1 - q, q, 0.0]])
    found = mixed({1: {}}, [0.5], [[2.0, 1.0, 0.0]], kept=kept)
    assert found == np.array([[(1 - q) / 2, (1 + q) / 2, 0.0]])


GREEDY: dict[str, Any] = {"greedy": torch.tensor([True])}


@pytest.mark.parametrize(
    ("weight", "tree", "expected"),
    [(0.4, {2: {}}, 0), (0.6, {2: {}}, 2), (0.6, {2: {}, 1: {}}, 0), (0.9, {2: {}, 1: {}}, 1)],
)
def test_at_temperature_0_the_likelier_is_drafted(weight: float, tree: Tree, expected: int) -> None:
    assert mixed(tree, [weight], [[3.0, 1.0, 0.0]], **GREEDY) == np.eye(3)[[expected]]


@pytest.mark.parametrize("more", [{}, GREEDY])
@pytest.mark.parametrize(("tree", "expected"), [({2: {}}, 2), ({0: {}}, 1), ({}, 1)])
def test_alone_matches_are_all_that_is_drafted(
    tree: Tree, expected: int, more: dict[str, Any]
) -> None:
    """Red where flat logits spread a draft over the vocabulary, or a rule's ban is not heard."""
    found = mixed(tree, [1.0], [[-torch.inf, 0.0, 0.0]], alone=True, **more)
    assert found == np.eye(3)[[expected]]
