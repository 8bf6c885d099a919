"""Track each particle's grammar state, and mask the tokens that its grammar forbids.

SGLang advances a grammar over the emitted output. A round starts from copies of it, and advances
them over the particles' tails and their draft tokens; no copy outlives the round. So resampling,
retraction and changes of N need no handling here.
"""

import contextlib
import copy
import gc
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from http import HTTPStatus

import msgspec
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req

from sglang_smc.kv.transfer import to_device
from sglang_smc.rules.base import BatchTexts, LogitsRule
from sglang_smc.smc.edits import unpack
from sglang_smc.smc.population import Population
from sglang_smc.state.failures import end_request
from sglang_smc.state.ranks import tp_group
from sglang_smc.state.request import state_of
from sglang_smc.state.texts import shared_ids, tails_of

WORD = 32  # bits of a mask's words

SLOW_ROUND = 0.25
"""CPU seconds per round that one grammar may take."""

SLOW_TEXT = 0.005
"""CPU seconds per token of a sequence that a grammar may take: 1e-5 is usual, 1e-4 with a large
vocabulary. The larger of both bounds counts."""

_SLOW = (
    "The grammar (json_schema, regex, ebnf or structural_tag) took {seconds:.2f} s of a round, "
    "which all requests wait for: {each:.1f} ms for each of {num_texts} texts; allowed: "
    "{allowed:.0f} ms. It can read the same text in too many ways. Let no repetition repeat what "
    "itself repeats, as (a+)+ and (a{{1,50}}){{1,50}} do, and no rule begin and end with itself."
)
_STUCK = (
    "The grammar (json_schema, regex, ebnf or structural_tag) admits no text here: behind the "
    "{num_tokens} output tokens so far no token can follow that it allows, that the vocabulary has "
    "and that min_new_tokens and logit edits leave. Loosen the grammar, or leave those out."
)


def forked(grammar: BaseGrammarObject) -> BaseGrammarObject:
    """Return an independent copy of a grammar in the same state."""
    twin = copy.copy(grammar)
    if isinstance(twin, ReasonerGrammarObject):
        # Its state of the reasoning section is in lists, more of them in some releases.
        vars(twin).update({k: list(v) for k, v in vars(twin).items() if isinstance(v, list)})
        twin.grammar = None if twin.grammar is None else forked(twin.grammar)
    elif isinstance(twin, XGrammarGrammar):
        twin.matcher = twin.matcher.fork()
        twin.accepted_tokens = list(twin.accepted_tokens)
    else:
        raise TypeError(f"{type(grammar).__name__} is none of SGLang's xgrammar grammars")
    return twin


def stop_ids(grammar: BaseGrammarObject | None) -> frozenset[int]:
    """Return the tokens that can end a grammar's text."""
    if isinstance(grammar, ReasonerGrammarObject):
        return stop_ids(grammar.grammar)
    if isinstance(grammar, XGrammarGrammar):
        return frozenset(grammar.matcher.stop_token_ids)
    return frozenset()


class _Cost(msgspec.Struct):
    """The time that a round has spent on one request's grammar."""

    seconds: float = 0.0  # CPU time of this thread, without garbage collections
    num_texts: int = 0  # masks computed

    @property
    def is_slow(self) -> bool:
        """Return whether the request must end, since all others wait for it."""
        return self.seconds > max(SLOW_ROUND, SLOW_TEXT * self.num_texts)

    @property
    def complaint(self) -> str:
        each = 1000 * self.seconds / max(1, self.num_texts)
        most = 1000 * SLOW_TEXT
        return _SLOW.format(seconds=self.seconds, each=each, num_texts=self.num_texts, allowed=most)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Measure what is done within the block."""
        begun = time.thread_time()
        num_texts = _Text.num_made
        collects = gc.isenabled()
        gc.disable()  # a collection takes CPU time of whichever thread allocates
        try:
            yield
        finally:
            if collects:
                gc.enable()
        self.seconds += time.thread_time() - begun
        self.num_texts += _Text.num_made - num_texts


class _Text:
    """A sequence with the grammar state after it, and its continuations."""

    num_made = 0

    def __init__(self, grammar: BaseGrammarObject, num_words: int) -> None:
        _Text.num_made += 1
        self._grammar = grammar
        self._longer: dict[int, _Text | None] = {}
        self.has_ended = grammar.is_terminated()
        self.row = torch.full((1, num_words), -1, dtype=torch.int32)  # packed: allowed tokens
        if not self.has_ended:
            grammar.fill_vocab_mask(self.row, 0)

    def then(self, token: int) -> "_Text | None":
        """Return the sequence with one more token; None after an end, or for a forbidden token."""
        if token not in self._longer:
            self._longer[token] = self._grown(token)
        return self._longer[token]

    def _grown(self, token: int) -> "_Text | None":
        # xgrammar reads past its tables for a token beyond the tokenizer's, which is never allowed.
        if self.has_ended or not int(self.row[0, token // WORD]) >> token % WORD & 1:
            return None
        grammar = forked(self._grammar)
        grammar.accept_token(token)
        return _Text(grammar, self.row.shape[1])


class Grammar(LogitsRule):
    """The grammars of a batch, as masks over each particle's next token.

    Requests without a grammar, particles that have ended and particles of weight zero get no mask.
    """

    def __init__(self, texts: BatchTexts) -> None:
        reqs, population, vocab_size, device = texts
        _end_slow(reqs)
        self._reqs = reqs
        self._vocab_size = vocab_size
        self._device = device
        num_words = -(-vocab_size // WORD)
        self._anything = torch.full((1, num_words), -1, dtype=torch.int32)
        self._costs = [_Cost() for _ in reqs]
        for req, cost in zip(reqs, self._costs, strict=True):
            state_of(req).kept[_Cost] = cost
        self._texts: list[list[_Text | None]] = []
        for group, req in enumerate(reqs):
            with self._costs[group].counted():
                self._texts.append(_texts(req, _tails(req, population, group), num_words))
        self._columns = [self._rows()]  # [G, N, W] int32 each

    @classmethod
    def applies(cls, req: Req) -> bool:
        return req.grammar is not None

    def allowed(self, chains: torch.Tensor, first: int) -> torch.Tensor:
        self._walk(chains)
        packed = torch.stack(self._columns[first : chains.shape[2] + 1], dim=2)  # [G, N, C, W]
        return unpack(to_device(self._device, packed), self._vocab_size)

    def ends(
        self, ends: torch.Tensor, tokens: torch.Tensor, population: Population | None
    ) -> torch.Tensor:
        """Mark candidates that complete a grammar; see `LogitsRule.ends`.

        Mostly the model's own stop tokens end a sequence there already; not so with `ignore_eos`,
        which grammars do not take into account.
        """
        ends = ends.clone()
        for group, req in enumerate(self._reqs):
            if self.applies(req):
                with self._costs[group].counted():
                    _mark_ends(ends[group], req, tokens[group].tolist(), population, group)
        return ends

    def note_first(self, tokens: torch.Tensor, log_sums: torch.Tensor) -> None:
        """Note the tokens sampled at prefill; see `LogitsRule.note_first`.

        At prefill SGLang checks neither for the grammar's end nor for a missing continuation.
        """
        drawn = tokens.view(-1, 1, 1)
        ends = self.ends(torch.zeros_like(drawn, dtype=torch.bool), drawn, None)
        found = zip(tokens.tolist(), ends.flatten().tolist(), log_sums.tolist(), strict=True)
        for req, (token, is_end, log_sum) in zip(self._reqs, found, strict=True):
            if self.applies(req):
                state = state_of(req)
                ends_here = is_end and not state.open_token.is_open
                # Whether no token is allowed after the prompt, and the one that ends the output.
                state.kept[Grammar] = log_sum == -math.inf, token if ends_here else None

    @classmethod
    def end_at_first_token(cls, req: Req) -> None:
        """End a request at the token sampled at prefill, if `note_first` found an end there."""
        is_stuck, last = state_of(req).kept.pop(cls, (False, None))
        if is_stuck:
            del req.output_ids[-1:]  # arbitrary: no token was allowed
            cls.end_stuck(req)
        elif last is not None:
            req.to_finish = FINISH_MATCHED_TOKEN(matched=last)

    @classmethod
    def reread(cls, req: Req, num_dropped: int, tokens: list[int]) -> None:
        """Drop the last ``num_dropped`` output tokens from the matchers, and append ``tokens``."""
        if not (num_dropped and cls.applies(req)):
            return
        grammar = _grammar(req)
        grammar.rollback(num_dropped)
        for token in tokens:
            grammar.accept_token(token)

    @classmethod
    def release(cls, req: Req) -> None:
        """Release the matchers of a request that is about to end."""
        req.grammar = None

    @classmethod
    def end_stuck(cls, req: Req) -> None:
        """End a request that its grammar cannot continue."""
        cls.release(req)  # else SGLang advances it over a forbidden token
        message = _STUCK.format(num_tokens=len(shared_ids(req)))
        end_request(req, message, HTTPStatus.BAD_REQUEST)

    def _walk(self, chains: torch.Tensor) -> None:
        """Advance all sequences over the draft tokens since the last call."""
        for column in range(len(self._columns) - 1, chains.shape[2]):
            drawn = chains[:, :, column].tolist()
            for group, tokens in enumerate(drawn):
                with self._costs[group].counted():
                    both = zip(self._texts[group], tokens, strict=True)
                    self._texts[group] = [text and text.then(token) for text, token in both]
            self._columns.append(self._rows())

    def _rows(self) -> torch.Tensor:
        rows = [[text.row if text else self._anything for text in each] for each in self._texts]
        return torch.stack([torch.cat(each) for each in rows])


def _end_slow(reqs: list[Req]) -> None:
    """End requests with grammars that were too slow in the last round."""
    last = [state_of(req).kept.get(_Cost, _Cost()) for req in reqs]
    slow = _any_rank([cost.is_slow for cost in last])
    for req, cost, is_slow in zip(reqs, last, slow, strict=True):
        if is_slow and Grammar.applies(req):
            end_request(req, cost.complaint, HTTPStatus.BAD_REQUEST)
            Grammar.release(req)


def _any_rank(flags: list[bool]) -> list[bool]:
    """Return, by flag, whether any tensor-parallel rank sets it: all must end the same requests."""
    group = tp_group()
    if group is None:
        return flags
    found = torch.tensor(flags, dtype=torch.int32)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return found.bool().tolist()


def _grammar(req: Req) -> BaseGrammarObject:
    """Return the compiled grammar of a request that has one."""
    grammar = req.grammar
    assert grammar is not None and not isinstance(grammar, Future), "compiled before it is queued"
    return grammar


def _mark_ends(
    ends: torch.Tensor,
    req: Req,
    candidates: list[list[int]],
    population: Population | None,
    group: int,
) -> None:
    """Mark in ``ends`` ``[N, C]`` the candidates that end the text of a request's grammar."""
    stops = stop_ids(_grammar(req))
    known = ends.tolist()
    beyond = _tails(req, population, group, len(candidates))
    assert req.vocab_size is not None, "SGLang's scheduler sets it on each request"
    for particle, both in enumerate(zip(candidates, known, strict=True)):
        if any(token in stops and not end for token, end in zip(*both, strict=True)):
            (text,) = _texts(req, beyond[particle : particle + 1], -(-req.vocab_size // WORD))
            column = _ending_column(text, candidates[particle])
            if column is not None:
                ends[particle, column] = True


def _ending_column(text: _Text | None, tokens: list[int]) -> int | None:
    """Return the index of the token that ends the grammar's text, or None."""
    for column, token in enumerate(tokens):
        text = text and text.then(token)
        if text is not None and text.has_ended:
            return column
    return None


def _tails(
    req: Req, population: Population | None, group: int, num_particles: int = 1
) -> list[list[int] | None]:
    """Return each particle's tokens beyond the shared output; None if ended or of weight zero."""
    if population is None or not Grammar.applies(req):
        return [[]] * (num_particles if population is None else population.ended.shape[1])
    lives = (~population.ended[group] & (population.log_weights[group] > -torch.inf)).tolist()
    found = zip(tails_of(req, population, group), lives, strict=True)
    return [tail if alive else None for tail, alive in found]


def _texts(req: Req, beyond: list[list[int] | None], num_words: int) -> list[_Text | None]:
    """Return the sequences of a request's particles, shared where equal; None for no mask."""
    grammar = _emitted(req)
    found: dict[tuple[int, ...], _Text] = {}
    if grammar is not None:
        for tail in beyond:
            if tail is not None and tuple(tail) not in found:
                found[tuple(tail)] = _Text(_read(grammar, tail), num_words)
    return [None if tail is None else found.get(tuple(tail)) for tail in beyond]


def _read(grammar: BaseGrammarObject, tokens: list[int]) -> BaseGrammarObject:
    """Return a copy of a grammar advanced over allowed tokens."""
    twin = forked(grammar)
    for token in tokens:
        twin.accept_token(token)
    return twin


def _emitted(req: Req) -> BaseGrammarObject | None:
    """Return a copy of a request's grammar at its shared output; None where it has none."""
    if not Grammar.applies(req) or req.finished():
        return None
    grammar = forked(_grammar(req))
    if num_open := len(req.output_ids) - len(shared_ids(req)):
        grammar.rollback(num_open)  # SGLang has advanced it over the placeholder of an open token
    return None if grammar.is_terminated() else grammar
