"""What the texts of a server have said, kept on the host by SGLang's n-gram cache.

The cache is a trie of all runs of up to `--speculative-ngram-max-trie-depth` tokens that it was
told, of which it forgets the oldest. It is told prompts as they are read, and answers as the host
hears of their tokens.

SGLang asks it with an id for each request, under which it remembers how far it has matched, and
takes a longer text to go on from there. A particle's text may be another's from round to round. So
texts are matched as they come, under ids that are forgotten at once: some hundred look-ups each.

Tensor-parallel ranks keep one corpus each. They are told the same in the same order, and wait until
all of it is read before they ask.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from sglang_smc.options.server import SMCConfig, flag_of
from sglang_smc.requests.state import settled_ids, state_of, tails_of
from sglang_smc.state.population import Population
from sglang_smc.upstream import Arguments, release

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

NONE = -2
"""The parent of the root, and of what is no node."""


class Trie(Protocol):
    """SGLang's `NgramCorpus`."""

    def batch_put(self, batch_tokens: list[list[int]]) -> None: ...

    def synchronize(self) -> None: ...

    def batch_get(
        self, req_ids: list[str], batch_tokens: list[list[int]], total_lens: list[int]
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def erase_match_state(self, req_ids: list[str]) -> None: ...

    def reset(self) -> None: ...


class _HostTails(NamedTuple):
    """What `tails_of` reads of a population."""

    last_emitted: torch.Tensor  # [G, N]
    tokens: torch.Tensor  # [G, N, T]
    lengths: torch.Tensor  # [G, N]

    @classmethod
    def of(cls, of: Population) -> "_HostTails":
        """Waits for the device."""
        return cls(of.last_emitted.cpu(), of.tokens.cpu(), of.lengths.cpu())


def open_corpus(server_args: Arguments, config: SMCConfig) -> "Corpus":
    """An empty corpus, of the sizes that resolved arguments ask for.

    Its trees have a node for each drafted token, beside the root, as in SGLang's own worker: in a
    text that repeats itself they are what it said the last time, and no more.

    Raises:
        ValueError: where SGLang cannot build its cache, which it compiles for that.
    """
    depth, num_nodes = server_args.speculative_ngram_max_trie_depth, config.num_steps + 1
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
            f"{flag_of('ngram_weight')} is above 0, and SGLang {release()} cannot build its n-gram "
            f"cache: {_told(error)}. It is compiled as a server starts: have a C++20 compiler and "
            "ninja (apt-get install g++ ninja-build), or leave the flag out."
        ) from error
    return Corpus(trie, depth, num_nodes, alone=config.has_no_draft)


def _told(error: Exception) -> str:
    """The line that says what is wrong: a compiler says much."""
    lines = str(error).splitlines() or [""]
    found = next((line for line in lines if "error:" in line), lines[0])
    return f"{type(error).__name__}: {found.strip()}"


class Corpus:
    """What was said, and what may therefore follow.

    Args:
        trie: SGLang's.
        depth: the longest run of tokens that it knows.
        num_nodes: T, of a tree that it finds, the root included.
        alone: whether nothing else drafts.
    """

    def __init__(self, trie: Trie, depth: int, num_nodes: int, *, alone: bool = False) -> None:
        self.alone = alone
        self._trie = trie
        self._depth = depth
        self._num_nodes = num_nodes

    def read(self, req: "Req", new: Sequence[int] = ()) -> None:
        """Read what a request has said since it was last read, and ``new`` behind that.

        Its prompt and what is settled of its answer. With the tokens before, so that runs across
        the seam are known, too.
        """
        prompt, answer = req.origin_input_ids, [*settled_ids(req), *new]
        state = state_of(req)
        num_read, length = state.kept.get(Corpus, 0), len(prompt) + len(answer)
        if length > num_read:
            start = max(num_read - self._depth + 1, 0)
            answer_start = max(start - len(prompt), 0)
            self._trie.batch_put([[*prompt[start:], *answer[answer_start:]]])
            state.kept[Corpus] = length

    def forget(self) -> None:
        """Forget all; no request may be running."""
        self._trie.reset()

    def trees(self, reqs: "list[Req]", population: Population) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents ``[G * N, T]`` int64 of what may follow each particle's text.

        Of requests that want no matches nothing follows.
        """
        for req in reqs:
            self.read(req)
        tails = _HostTails.of(population)
        nothing = np.zeros((1, self._num_nodes), dtype=np.int64)
        places, contexts = self._places(reqs, tails)
        tokens, parents = nothing, nothing + NONE
        if contexts:
            found = self._match(contexts)
            tokens, parents = (
                np.concatenate([these, none])
                for these, none in zip(found, (tokens, parents), strict=True)
            )
        return tokens[places], parents[places]

    def _places(
        self, reqs: "list[Req]", tails: _HostTails
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """The contexts that occur, each once, and which of them each particle has; -1: none."""
        contexts: dict[tuple[int, ...], int] = {}
        places: list[int] = []
        for group, req in enumerate(reqs):
            if not state_of(req).now.uses_matches:
                places += [-1] * tails.tokens.shape[1]
                continue
            shared = self._end_of(req)
            for tail in tails_of(req, tails, group):
                context = tuple([*shared, *tail][-self._depth :])
                places.append(contexts.setdefault(context, len(contexts)))
        return places, list(contexts)

    def _end_of(self, req: "Req") -> list[int]:
        """The last tokens of what all particles share."""
        answer = settled_ids(req)[-self._depth :]
        missing = self._depth - len(answer)
        return [*(req.origin_input_ids[-missing:] if missing else ()), *answer]

    def _match(self, contexts: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents ``[R, T]`` of the trees behind R contexts."""
        ids = [str(place) for place in range(len(contexts))]
        self._trie.synchronize()
        texts = [list(context) for context in contexts]
        tokens, mask = self._trie.batch_get(ids, texts, [len(text) for text in texts])
        self._trie.erase_match_state(ids)
        return as_trees(tokens, mask, self._num_nodes)


def as_trees(tokens: np.ndarray, mask: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """SGLang's answer as trees: tokens and parents ``[R, T]`` int64.

    It fills up trees with the token 0 behind the root, which looks like a node of that kind. So
    what stands at the end and looks so is none: lost is a real 0 behind a text that has nothing
    behind that, and nothing deeper elsewhere.

    Args:
        tokens: R * T, a root and its nodes by depth.
        mask: R * T * T, [i, j] is 1 where j is i, or leads to it.
        num_nodes: T.
    """
    tokens = tokens.reshape(-1, num_nodes).astype(np.int64)
    node = np.arange(num_nodes)
    above = mask.reshape(-1, num_nodes, num_nodes).astype(bool) & (node < node[:, None])
    parents = np.where(above.any(-1), (above * node).argmax(-1), NONE)
    looks_filled = (tokens == 0) & (parents == 0)
    fills = np.minimum.accumulate(looks_filled[:, ::-1], axis=1)[:, ::-1]
    return tokens, np.where(fills, NONE, parents)
