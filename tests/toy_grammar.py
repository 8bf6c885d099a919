"""Grammars over the letters of `toy_laws`, and the two laws that they make of p.

SGLang's grammar objects carry them, and xgrammar decides; the laws here know them by Python's `re`.
"""

import itertools
import re
from collections.abc import Callable

from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from toy_laws import EOS, LENGTH, VOCAB, Text
from toy_worker import Language
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

LETTERS = "ab"
_COMPILER = GrammarCompiler(TokenizerInfo([*LETTERS, "</s>"], stop_token_ids=[EOS]))


def maker(regex: str) -> Callable[[], XGrammarGrammar]:
    """Makes one grammar for each request, as SGLang does."""
    compiled = _COMPILER.compile_regex(regex)
    return lambda: XGrammarGrammar(GrammarMatcher(compiled), VOCAB, compiled, None, regex)


def local_law(language: Language, regex: str) -> dict[Text, float]:
    """Each token from p within what may come next: what a mask alone makes."""
    return _walked(language, regex, renormalised=True)


def potential(language: Language, regex: str) -> dict[Text, float]:
    """p of each legal text; the sum is the chance that a text of p is legal."""
    return _walked(language, regex, renormalised=False)


def conditional_law(language: Language, regex: str) -> dict[Text, float]:
    """p, given that the text is legal."""
    masses = potential(language, regex)
    total = sum(masses.values())
    return {text: mass / total for text, mass in masses.items()}


def _walked(language: Language, regex: str, *, renormalised: bool) -> dict[Text, float]:
    legal = _legal_texts(regex)
    prefixes = {text[:length] for text in legal for length in range(LENGTH + 1)}
    found = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0.0)
    for text in legal:
        mass = 1.0
        for position, token in enumerate(text):
            before = text[:position]
            if EOS in before:
                break
            p = language.after(before).double().softmax(-1)
            mass *= float(p[token])
            if renormalised:
                mass /= sum(float(p[t]) for t in range(VOCAB) if (*before, t) in prefixes)
        found[text] = mass
    return found


def _legal_texts(regex: str) -> list[Text]:
    """Whole texts, filled up with EOS, and those that the length limit cuts short."""
    pattern, longest = re.compile(regex), LENGTH + 3
    words = [
        "".join(word)
        for length in range(longest + 1)
        for word in itertools.product(LETTERS, repeat=length)
        if pattern.fullmatch("".join(word))
    ]
    spelled = ([LETTERS.index(letter) for letter in word] for word in words)
    return sorted({tuple([*letters, *[EOS] * LENGTH][:LENGTH]) for letters in spelled})
