"""Grammars and potentials over the letters of `toy_laws`, and the laws that they make of p.

SGLang's grammar objects carry them, and xgrammar decides; the laws here know them by Python's `re`.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence

import msgspec
import torch
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from toy_laws import EOS, LENGTH, VOCAB, Text, law, law_by, next_law
from toy_worker import Language
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from sglang_smc.potentials import Potential
from sglang_smc.potentials import Text as Asked
from sglang_smc.potentials.runner import PotentialRunner

LETTERS = "ab"
END = "</s>"


def maker(
    regex: str, words: Sequence[str] = (*LETTERS, END), vocab_size: int = 0
) -> Callable[[], XGrammarGrammar]:
    """Makes one grammar for each request, as SGLang does."""
    width = max(vocab_size, len(words))
    ends = [words.index(END)]
    known = TokenizerInfo([*words], vocab_size=width, stop_token_ids=ends)
    compiled = GrammarCompiler(known).compile_regex(regex)
    return lambda: XGrammarGrammar(GrammarMatcher(compiled), width, compiled, None, regex)


def local_law(language: Language, regex: str) -> dict[Text, float]:
    """Each token from p within what may come next: what a mask alone makes."""
    prefixes = {text[:length] for text in _legal_texts(regex) for length in range(1, LENGTH + 1)}

    def masked(before: Text) -> torch.Tensor:
        is_legal = torch.tensor([(*before, token) in prefixes for token in range(VOCAB)])
        p = next_law(language, before) * is_legal
        return p / p.sum()

    return law_by(masked)


def potential(language: Language, regex: str) -> dict[Text, float]:
    """p of each legal text; the sum is the chance that a text of p is legal."""
    legal = _legal_texts(regex)
    return {text: mass * (text in legal) for text, mass in law(language).items()}


def _legal_texts(regex: str) -> set[Text]:
    """Whole texts, filled up with EOS, and those that the length limit cuts short."""
    pattern = re.compile(regex)
    longest = LENGTH + 3
    words = [
        "".join(word)
        for length in range(longest + 1)
        for word in itertools.product(LETTERS, repeat=length)
        if pattern.fullmatch("".join(word))
    ]
    spelled = ([LETTERS.index(letter) for letter in word] for word in words)
    return {tuple([*letters, *[EOS] * LENGTH][:LENGTH]) for letters in spelled}


class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much each "b" counts."""

    weight: float = 0.8


class Letters(Potential):
    """phi = exp(weight * number of "b"), and 0 of what begins with "aab".

    Of beginnings it says something else, which must not matter. It notes what it is asked.
    """

    Args = Args

    def __init__(self) -> None:
        self.asked: list[tuple[bool, list[str]]] = []

    def complete(self, texts: Sequence[Asked]) -> list[float]:
        self.asked.append((True, [text.output for text in texts]))
        return [log_phi(text.output, text.args.weight) for text in texts]

    def prefix(self, texts: Sequence[Asked]) -> list[float]:
        self.asked.append((False, [text.output for text in texts]))
        assert all(text.prompt == "ba" for text in texts)
        return [
            -math.inf if text.output.startswith("aab") else 0.3 * text.output.count("ba")
            for text in texts
        ]


def log_phi(output: str, weight: float = 0.8) -> float:
    return -math.inf if output.startswith("aab") else weight * output.count("b")


def runners(**potentials: Potential) -> dict[str, PotentialRunner]:
    """Return their runners, as a server has them."""
    return {name: PotentialRunner(name, phi, 60.0) for name, phi in potentials.items()}


def times_phi(masses: dict[Text, float], phi: Callable[[str], float]) -> dict[Text, float]:
    """Masses of texts times exp of ``phi`` of what they read."""
    return {text: mass * math.exp(phi(read(text))) for text, mass in masses.items()}


def read(text: Text) -> str:
    """A text, filled up with ends, as its tokenizer has it."""
    length = text.index(EOS) + 1 if EOS in text else len(text)
    return "".join("ab."[token] for token in text[:length])
