"""What the corpus reads and answers, and how a round follows its trees."""

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
from sglang_smc.proposers.ngram import (
    NONE,
    Corpus,
    CorpusMatches,
    as_trees,
    likeliest,
    open_corpus,
    uniform_over,
)
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.state.request import RequestState

SETTINGS = {
    "speculative_ngram_max_trie_depth": 6,
    "speculative_ngram_min_bfs_breadth": 1,
    "speculative_ngram_max_bfs_breadth": 10,
    "speculative_ngram_match_type": "BFS",
    "speculative_ngram_capacity": 10_000,
}


def request(prompt: list[int], answered: list[int], num_steps: int = 4) -> Any:
    config = RequestConfig(ngram_matches=True, num_steps=num_steps)
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
    corpus = Corpus(trie, 4, 6)
    req = request([1, 2, 3, 4, 5, 6], [])
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


def test_prompts_answer_unless_a_request_drafts_nothing_and_a_flush_leaves_nothing() -> None:
    corpus = corpus_of([11, 12, 13])
    talks = request([1, 2, 3, 4, 1, 2], [3])
    silent = request([1, 2], [3], num_steps=0)
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
    with pytest.raises(ValueError, match=r"ngram-matches.*x.h:13:17: error: no such thing.*g\+\+"):
        corpus_of()


def drafted(tree: Tree, logits: list[list[float]], **more: Any) -> Any:
    """Probabilities ``[D, V]`` of q: one tree behind all particles."""
    tokens, mask = answer(1, tree, 6)
    size = len(logits)
    trees = [torch.from_numpy(one).expand(size, -1) for one in as_trees(np.array(tokens), mask, 6)]
    matches = CorpusMatches(trees[0], trees[1], torch.zeros(size).long())
    allowed = TokenDistribution(torch.tensor(logits), torch.ones(size), **more)
    return pytest.approx(matches.distribution(allowed).log_probs().exp().numpy(), abs=1e-5)


GREEDY: dict[str, Any] = {"greedy": torch.tensor([True])}


@pytest.mark.parametrize("more", [{}, GREEDY])
@pytest.mark.parametrize(("tree", "expected"), [({2: {}}, 2), ({0: {}}, 1), ({}, 1)])
def test_matches_are_all_that_is_drafted(tree: Tree, expected: int, more: dict[str, Any]) -> None:
    """Red where flat logits spread a draft over the vocabulary, or a rule's ban is not heard."""
    assert drafted(tree, [[-torch.inf, 0.0, 0.0]], **more) == np.eye(3)[[expected]]


def test_several_matches_share_the_mass_and_at_temperature_0_the_first_takes_it() -> None:
    """Of the tokens that are proposed and allowed, by rows."""
    tree = {2: {}, 1: {}}
    flat = [0.0, 0.0, 0.0]
    found = drafted(tree, [flat, [0.0, 0.0, -torch.inf]])
    assert found == np.array([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])
    assert drafted(tree, [flat], **GREEDY) == np.eye(3)[[1]]


def test_what_is_no_distribution_stays_none() -> None:
    lost = torch.tensor([[0.5, torch.nan, 0.5]])
    found = uniform_over(torch.tensor([[1]]), torch.tensor([[True]]), lost)
    assert found.isnan().any() and likeliest(found).isnan().any()
    found = likeliest(torch.tensor([[0.25, 0.5, 0.25], [0.4, 0.2, 0.4]]).log())
    assert torch.equal(found.exp(), torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
