"""Propose from n-gram matches, without a draft model.

SGLang's corpus returns, for the last tokens of a sequence, a tree of the continuations that it has
seen. At each draft step a particle is at a node of its tree, or has left it. The proposal q is
uniform over the node's children, since their counts are not returned; where there are none, it has
all mass on one token. All of that is fixed before a token is sampled, so q is known exactly, and
verification corrects for it as for any draft.

A round takes uniform logits in place of a model's. Rules apply to them as usual, so that a token
that a request's rules forbid gets no mass; filters do not (`CorpusMatches.distribution`).

The corpus is SGLang's trie, on the host, of all runs of up to `--speculative-ngram-max-trie-depth`
tokens of prompts and outputs; the oldest are evicted. SGLang keeps the progress of a match under a
request's id, for a sequence that only grows. A particle's sequence may change from round to round,
so each match uses a fresh id that is erased right after. Tensor-parallel ranks keep one corpus
each. They insert the same tokens in the same order, and wait until all are inserted before they
match.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sglang_smc.kv.transfer import to_device
from sglang_smc.models.attention import ParticleAttention
from sglang_smc.options.server import SMCConfig, flag_of
from sglang_smc.proposers.base import DraftContext, DraftProposer, DraftSlots
from sglang_smc.smc.distribution import TokenDistribution, of_each_draw
from sglang_smc.smc.population import Population
from sglang_smc.state.request import state_of
from sglang_smc.state.texts import shared_ids, tails_of
from sglang_smc.upstream import Arguments, release

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

NONE = -2
"""The parent of the root, and of padding."""


def open_corpus(server_args: Arguments, config: SMCConfig) -> "Corpus":
    """Return an empty corpus, of the sizes in the resolved arguments.

    Its trees have a node for each draft token, beside the root, as in SGLang's own worker: in a
    repetitive text a tree is the last continuation alone.

    Raises ValueError where SGLang cannot compile its cache.
    """
    depth = server_args.speculative_ngram_max_trie_depth
    num_nodes = config.num_steps + 1
    try:
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        trie = NgramCorpus(
            max_trie_depth=depth,
            min_bfs_breadth=server_args.speculative_ngram_min_bfs_breadth,
            max_bfs_breadth=server_args.speculative_ngram_max_bfs_breadth,
            draft_token_num=num_nodes,
            match_type=server_args.speculative_ngram_match_type,
            capacity=server_args.speculative_ngram_capacity,
        )
    except Exception as error:  # of a compiler, or of whatever it lacks
        raise ValueError(
            f"{flag_of('ngram_matches')} is given, and SGLang {release()} cannot build its n-gram "
            f"cache: {_told(error)}. It is compiled as a server starts: have a C++20 compiler and "
            "ninja (apt-get install g++ ninja-build), or leave the flag out."
        ) from error
    return Corpus(trie, depth, num_nodes)


def _told(error: Exception) -> str:
    """Return the error line of a compiler's output."""
    lines = str(error).splitlines() or [""]
    found = next((line for line in lines if "error:" in line), lines[0])
    return f"{type(error).__name__}: {found.strip()}"


class Corpus:
    """The tokens of all prompts and outputs, from which continuations are matched.

    Args:
        depth: the longest run of tokens that ``trie`` stores.
        num_nodes: T, nodes of a tree that it returns, the root included.
    """

    def __init__(self, trie: "NgramCorpus", depth: int, num_nodes: int) -> None:
        self._trie = trie
        self._depth = depth
        self._num_nodes = num_nodes

    def read(self, req: "Req", new: Sequence[int] = ()) -> None:
        """Insert the tokens that a request has gained since the last call, and ``new`` after them.

        These are tokens of its prompt and of its shared output. The tokens before them are
        inserted again, so that runs across the boundary are stored, too.
        """
        prompt = req.origin_input_ids
        answer = [*shared_ids(req), *new]
        state = state_of(req)
        num_read = state.kept.get(Corpus, 0)
        length = len(prompt) + len(answer)
        if length > num_read:
            start = max(num_read - self._depth + 1, 0)
            answer_start = max(start - len(prompt), 0)
            self._trie.batch_put([[*prompt[start:], *answer[answer_start:]]])
            state.kept[Corpus] = length

    def forget(self) -> None:
        """Remove all tokens; no request may be running."""
        self._trie.synchronize()  # what is queued would be inserted after the reset
        self._trie.reset()

    def trees(self, reqs: "list[Req]", population: Population) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and parents ``[G * N, T]`` int64 of each particle's tree of continuations.

        Requests that use no matches get empty trees.
        """
        for req in reqs:
            self.read(req)
        # One copy to the host, which waits for the device.
        tails = population._replace(texts=population.texts.cpu(), lengths=population.lengths.cpu())
        nothing = np.zeros((1, self._num_nodes), dtype=np.int64)
        places, contexts = self._places(reqs, tails)
        tokens = nothing
        parents = nothing + NONE
        if contexts:
            found = self._match(contexts)
            tokens, parents = (
                np.concatenate([these, none])
                for these, none in zip(found, (tokens, parents), strict=True)
            )
        return tokens[places], parents[places]

    def _places(
        self, reqs: "list[Req]", tails: Population
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return each particle's index into the distinct contexts (-1: none), and these."""
        contexts: dict[tuple[int, ...], int] = {}
        places: list[int] = []
        for group, req in enumerate(reqs):
            if not state_of(req).config_now.uses_matches:
                places += [-1] * tails.tokens.shape[1]
                continue
            shared = self._end_of(req)
            for tail in tails_of(req, tails, group):
                context = tuple([*shared, *tail][-self._depth :])
                places.append(contexts.setdefault(context, len(contexts)))
        return places, list(contexts)

    def _end_of(self, req: "Req") -> list[int]:
        """Return the last tokens that all particles of a request share."""
        answer = shared_ids(req)[-self._depth :]
        missing = self._depth - len(answer)
        return [*(req.origin_input_ids[-missing:] if missing else ()), *answer]

    def _match(self, contexts: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and parents ``[R, T]`` of the trees after R contexts."""
        ids = [str(place) for place in range(len(contexts))]
        self._trie.synchronize()
        texts = [list(context) for context in contexts]
        tokens, mask = self._trie.batch_get(ids, texts, [len(text) for text in texts])
        self._trie.erase_match_state(ids)
        return as_trees(tokens, mask, self._num_nodes)


def as_trees(tokens: np.ndarray, mask: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Convert SGLang's result to trees: tokens and parents ``[R, T]`` int64.

    SGLang pads trees with token 0 below the root, which a real node can equal. So trailing nodes of
    that form are dropped: this loses a real token 0 that directly continues the sequence and has no
    continuation of its own, and nothing else.

    Args:
        tokens: R * T, a root and its nodes by depth.
        mask: R * T * T, [i, j] is 1 where j is i or an ancestor of i.
        num_nodes: T.
    """
    tokens = tokens.reshape(-1, num_nodes).astype(np.int64)
    node = np.arange(num_nodes)
    above = mask.reshape(-1, num_nodes, num_nodes).astype(bool) & (node < node[:, None])
    parents = np.where(above.any(-1), (above * node).argmax(-1), NONE)
    looks_filled = (tokens == 0) & (parents == 0)
    fills = np.minimum.accumulate(looks_filled[:, ::-1], axis=1)[:, ::-1]
    return tokens, np.where(fills, NONE, parents)


_OUTSIDE = -1  # the sampled token is not in the tree; no node has this parent


class CorpusMatches(NamedTuple):
    """The trees after the sequences of a batch, and each particle's node in its tree.

    D = G * N particles, T nodes of a tree.
    """

    tokens: torch.Tensor  # [D, T] int64; the root comes first, for the sequence itself
    parents: torch.Tensor  # [D, T] int64 nodes; -2 for the root and for padding
    node: torch.Tensor  # [D] int64 current node; `_OUTSIDE` once the particle has left the tree

    @classmethod
    def of(cls, corpus: Corpus, reqs: "list[Req]", population: Population) -> "CorpusMatches":
        """Match the sequences that a round starts from; this waits for the device."""
        size, num_particles, _ = population.texts.shape
        device = population.texts.device
        tokens, parents = map(torch.from_numpy, corpus.trees(reqs, population))
        return cls(
            to_device(device, tokens),
            to_device(device, parents),
            torch.zeros(size * num_particles, dtype=torch.int64, device=device),
        )

    def follow(self, drawn: torch.Tensor) -> "CorpusMatches":
        """Return the matches after ``drawn`` ``[G, N]``, one sampled token for each particle."""
        found = self._children() & (self.tokens == drawn.flatten().unsqueeze(1))  # one at most
        node = torch.where(found.any(1), found.long().argmax(1), _OUTSIDE)
        return self._replace(node=node)

    def distribution(self, allowed: TokenDistribution) -> TokenDistribution:
        """Return q, of D rows: uniform over the matches that the rules allow.

        Where there is none, all mass is on the first token that the rules allow: any is valid,
        since verification corrects for it. At temperature 0 it is on the first of the matches.

        Args:
            allowed: uniform logits, -inf where rules forbid a token.
        """
        num_draws = len(self.node)
        is_greedy = allowed.greedy
        every = torch.ones_like(allowed.temperature, dtype=torch.bool)
        point = allowed._replace(greedy=every, kept=None, sums=None)
        support = point.scores.gather(1, self.tokens) > -torch.inf  # [D, T]
        log_q = uniform_over(self.tokens, self._children() & support, point.log_probs())
        if is_greedy is not None:
            is_point = of_each_draw(is_greedy, num_draws).unsqueeze(1)
            log_q = torch.where(is_point, likeliest(log_q), log_q)
        return point.of_log_probs(log_q, num_groups=len(allowed.temperature))

    def _children(self) -> torch.Tensor:
        """Return which nodes ``[D, T]`` are children of each particle's node."""
        return self.parents == self.node.unsqueeze(1)


def uniform_over(
    tokens: torch.Tensor, proposed: torch.Tensor, otherwise: torch.Tensor
) -> torch.Tensor:
    """Return log-probabilities that are uniform over each row's proposed tokens.

    A row without proposed tokens is that of ``otherwise``; so is a row of NaN there, which is no
    distribution.

    Args:
        tokens: ``[D, T]`` int64 token ids; a row's proposed ones are distinct.
        proposed: ``[D, T]`` bool: the entries of ``tokens`` that are proposed.
        otherwise: ``[D, V]`` normalised log-probabilities.

    Returns:
        ``[D, V]`` float32 log-probabilities.
    """
    counts = proposed.sum(1, keepdim=True)  # [D, 1]
    share = (1.0 / counts.clamp_min(1)).log().masked_fill(~proposed, -torch.inf)  # [D, T]
    nothing = torch.full_like(otherwise, -torch.inf)
    # A tree may have one token at several nodes, of which one at most is proposed.
    found = nothing.scatter_reduce(1, tokens, share, "amax")
    is_matched = (counts > 0) & ~otherwise.isnan().any(1, keepdim=True)
    return torch.where(is_matched, found, otherwise)


def likeliest(log_q: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities ``[D, V]`` with all mass on each row's likeliest token.

    Of ties the first token is taken. A row with NaN stays as it is.
    """
    point = torch.full_like(log_q, -torch.inf).scatter(1, log_q.argmax(1, keepdim=True), 0.0)
    return torch.where(log_q.isnan().any(1, keepdim=True), log_q, point)


class UniformDraft(DraftProposer):
    """Return uniform logits, of which `CorpusMatches` take what the rules allow."""

    def __init__(self, of_target: ParticleAttention, vocab_size: int) -> None:
        self.attn_backend = of_target
        self._vocab_size = vocab_size

    @classmethod
    def build(cls, context: DraftContext) -> "UniformDraft":
        return cls(context.passes.attn_backend, context.vocab_size)

    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        return self._flat(last_two[:, :, 0])

    def next_logits(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        return self._flat(tokens)

    def _flat(self, like: torch.Tensor) -> torch.Tensor:
        """Return new logits ``[G, N, V]`` of zeros: rules write into them."""
        return torch.zeros(*like.shape, self._vocab_size, device=like.device)
