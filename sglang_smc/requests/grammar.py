"""Where each particle stands in its request's grammar, and what it may say next.

SGLang keeps a grammar at the emitted text. A round starts copies there, walks them through the
particles' tails, and on through what they draft; nothing outlives it. So resampling, retraction and
other numbers of particles need no word here.
"""

import copy
import math
from typing import TYPE_CHECKING

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from sglang_smc.requests.state import settled_ids, state_of
from sglang_smc.requests.stopping import tails_of
from sglang_smc.smc.masking import unpack
from sglang_smc.state.population import Population

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import Req

WORD = 32  # bits of a mask's words


def has_grammar(req: "Req") -> bool:
    """Whether a request's text must follow a grammar."""
    return req.grammar is not None


def forked(grammar: BaseGrammarObject) -> BaseGrammarObject:
    """A grammar in the same state, that goes its own way."""
    twin = copy.copy(grammar)
    if isinstance(twin, ReasonerGrammarObject):
        twin._thinking_match_history = list(twin._thinking_match_history)
        twin.grammar = None if twin.grammar is None else forked(twin.grammar)
    elif isinstance(twin, XGrammarGrammar):
        twin.matcher = twin.matcher.fork()
        twin.accepted_tokens = list(twin.accepted_tokens)
    else:
        raise TypeError(f"{type(grammar).__name__} is none of SGLang's xgrammar grammars")
    return twin


def stop_ids(grammar: BaseGrammarObject | None) -> frozenset[int]:
    """The tokens that can end a grammar's text."""
    if isinstance(grammar, ReasonerGrammarObject):
        return stop_ids(grammar.grammar)
    if isinstance(grammar, XGrammarGrammar):
        return frozenset(grammar.matcher.stop_token_ids)
    return frozenset()


class _Text:
    """A text, the state that it leaves a grammar in, and the texts that go on from it."""

    def __init__(self, grammar: BaseGrammarObject, num_words: int) -> None:
        self._grammar = grammar
        self._longer: dict[int, _Text | None] = {}
        self.has_ended = grammar.is_terminated()
        self.row = torch.full((1, num_words), -1, dtype=torch.int32)  # packed: what may follow
        if not self.has_ended:
            grammar.fill_vocab_mask(self.row, 0)

    def then(self, token: int) -> "_Text | None":
        """The text with one more token; None behind an end, or where the token is illegal."""
        if token not in self._longer:
            self._longer[token] = self._grown(token)
        return self._longer[token]

    def _grown(self, token: int) -> "_Text | None":
        # xgrammar reads past its tables for a token beyond the tokenizer's, which is never legal.
        if self.has_ended or not int(self.row[0, token // WORD]) >> token % WORD & 1:
            return None
        grammar = forked(self._grammar)
        grammar.accept_token(token)
        return _Text(grammar, self.row.shape[1])


class Masks:
    """What the grammars of a batch let each particle say, token by token.

    Requests without a grammar and particles that have ended may say anything, and so may those
    that have died: they weigh nothing.

    Args:
        reqs: G requests.
        population: their particles as the round starts; None at a prefill, where N is 1.
        vocab_size: V, of the logits.
        device: of the masks.
    """

    def __init__(
        self,
        reqs: "Sequence[Req]",
        population: Population | None,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        self._vocab_size, self._device = vocab_size, device
        num_words = -(-vocab_size // WORD)
        self._anything = torch.full((1, num_words), -1, dtype=torch.int32)
        self._texts = [
            _texts(req, _tails(req, population, group), num_words) for group, req in enumerate(reqs)
        ]
        self._columns = [self._rows()]  # [G, N, W] int32 each

    def first(self) -> torch.Tensor:
        """What may come first at a prefill, ``[G, 1, V]`` bool."""
        return self._unpacked(0, 0).squeeze(2)

    def after(self, chains: torch.Tensor) -> torch.Tensor:
        """What may follow ``chains`` ``[G, N, J]`` of drafted tokens: ``[G, N, 1, V]`` bool."""
        self._walk(chains)
        return self._unpacked(chains.shape[2], chains.shape[2])

    def along(self, chains: torch.Tensor) -> torch.Tensor:
        """What may follow the first 0, 1, ..., J tokens of ``chains``: ``[G, N, J + 1, V]``."""
        self._walk(chains)
        return self._unpacked(0, chains.shape[2])

    def _walk(self, chains: torch.Tensor) -> None:
        """Read what has been drafted since the last call."""
        for column in range(len(self._columns) - 1, chains.shape[2]):
            drawn = chains[:, :, column].tolist()
            self._texts = [
                [text and text.then(token) for text, token in zip(*both, strict=True)]
                for both in zip(self._texts, drawn, strict=True)
            ]
            self._columns.append(self._rows())

    def _rows(self) -> torch.Tensor:
        rows = [[text.row if text else self._anything for text in each] for each in self._texts]
        return torch.stack([torch.cat(each) for each in rows])

    def _unpacked(self, first: int, last: int) -> torch.Tensor:
        packed = torch.stack(self._columns[first : last + 1], dim=2)  # [G, N, C, W]
        return unpack(packed.to(self._device, non_blocking=True), self._vocab_size)


def masks_of(
    reqs: "Sequence[Req]",
    population: Population | None,
    vocab_size: int,
    device: torch.device | str,
) -> Masks | None:
    """The same, where some request has a grammar."""
    return Masks(reqs, population, vocab_size, device) if any(map(has_grammar, reqs)) else None


def mark_terminated(
    ends: torch.Tensor,
    reqs: "Sequence[Req]",
    tokens: torch.Tensor,
    population: Population | None = None,
) -> torch.Tensor:
    """Add to ``ends`` ``[G, N, C]`` where the candidate ``tokens`` end a grammar's text.

    Without a population the tokens stand right behind the emitted text. Mostly these are ends
    already, by the model's own stop tokens; not so with `ignore_eos`, which no grammar knows.
    """
    ends = ends.clone()
    for group, req in enumerate(reqs):
        if not has_grammar(req):
            continue
        stops = stop_ids(req.grammar)
        candidates, known = tokens[group].tolist(), ends[group].tolist()
        beyond = _tails(req, population, group, len(candidates))
        for particle, both in enumerate(zip(candidates, known, strict=True)):
            if any(token in stops and not end for token, end in zip(*both, strict=True)):
                (text,) = _texts(req, beyond[particle : particle + 1], -(-req.vocab_size // WORD))
                column = _ending_column(text, candidates[particle])
                if column is not None:
                    ends[group, particle, column] = True
    return ends


def note_prefill(reqs: "Sequence[Req]", tokens: torch.Tensor, log_sums: torch.Tensor) -> None:
    """Note what SGLang does not look for when it takes a prefill's token.

    Args:
        tokens: ``[G]`` drawn.
        log_sums: ``[G]`` of what grammars left to draw from; -inf where that is nothing.
    """
    drawn = tokens.view(-1, 1, 1)
    ends = mark_terminated(torch.zeros_like(drawn, dtype=torch.bool), reqs, drawn)
    found = zip(tokens.tolist(), ends.flatten().tolist(), log_sums.tolist(), strict=True)
    for req, (token, is_end, log_sum) in zip(reqs, found, strict=True):
        if has_grammar(req):
            run = state_of(req)
            run.is_stuck = log_sum == -math.inf
            run.terminated_by = token if is_end and run.open_token_at is None else None


def _ending_column(text: _Text | None, tokens: list[int]) -> int | None:
    """Index of the token that ends the grammar's text."""
    for column, token in enumerate(tokens):
        text = text and text.then(token)
        if text is not None and text.has_ended:
            return column
    return None


def _tails(
    req: "Req", population: Population | None, group: int, num_particles: int = 1
) -> list[list[int] | None]:
    """What each particle of a request has beyond the text that is settled.

    None for one that has ended, or has died: what it says weighs nothing.
    """
    if population is None or not has_grammar(req):
        return [[]] * (num_particles if population is None else population.ended.shape[1])
    lives = (~population.ended[group] & (population.log_weights[group] > -torch.inf)).tolist()
    found = zip(tails_of(req, population, group), lives, strict=True)
    return [tail if alive else None for tail, alive in found]


def _texts(req: "Req", beyond: list[list[int] | None], num_words: int) -> list[_Text | None]:
    """The texts of a request's particles, equal ones as one; None where anything may be said."""
    grammar = _emitted(req)
    found: dict[tuple[int, ...], _Text] = {}
    if grammar is not None:
        for tail in beyond:
            if tail is not None and tuple(tail) not in found:
                found[tuple(tail)] = _Text(_read(grammar, tail), num_words)
    return [None if tail is None else found.get(tuple(tail)) for tail in beyond]


def _read(grammar: BaseGrammarObject, tokens: list[int]) -> BaseGrammarObject:
    """A copy of a grammar behind more tokens, all legal."""
    twin = forked(grammar)
    for token in tokens:
        twin.accept_token(token)
    return twin


def _emitted(req: "Req") -> BaseGrammarObject | None:
    """A request's grammar behind the text that all of its particles share; None if it has none."""
    if not has_grammar(req) or req.finished():
        return None
    grammar = forked(req.grammar)
    if num_open := len(req.output_ids) - len(settled_ids(req)):
        grammar.rollback(num_open)  # SGLang has it read the token that stands in for an open one
    return None if grammar.is_terminated() else grammar
