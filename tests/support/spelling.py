"""Tiny models that spell, grammars for them, and who tells what is legal.

The tokenizer is the shipped pair's, which gets "yes" and "no" as tokens: those that a reranker
answers. The vocabulary is larger, as that of many models is.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.checks.structure import PERSON, is_person
from tiny_models import make_tiny_model
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

PAIR = Path(__file__).parents[2] / "bench" / "pair"
TOKENIZER = PAIR / "target"
VOCAB = 540

#: By such words in its template SGLang knows a model as a reranker.
RERANKER = """{# The answer can only be "yes" or "no". #}"""

_TAG = {"type": "tag", "begin": "<call>", "end": "</call>"}
_TAG["content"] = {"type": "json_schema", "json_schema": PERSON}  # type: ignore[assignment]

# Each with random letters of a random model an answer of a few dozen tokens at most.
GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"[a-c]{2,4}-\d{2}(é|ß)?"},
    "json_schema": {"json_schema": json.dumps(PERSON)},
    "ebnf": {"ebnf": 'root ::= ("yes" | "no") (" " [x-z])? "!"'},
    "structural_tag": {"structural_tag": json.dumps({"type": "structural_tag", "format": _TAG})},
}


def spelling_model(path: Path, seed: int) -> str:
    made = make_tiny_model(path, vocab_size=VOCAB, scale=0.3, seed=seed)
    tokenizer().save_pretrained(path)
    return made


def tokenizer() -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(TOKENIZER)
    known = json.loads(found.backend_tokenizer.to_str())
    for word in ("yes", "no"):
        first, *others = found.tokenize(word)
        for piece in others:
            known["model"]["merges"].append([first, piece])
            first += piece
            known["model"]["vocab"][first] = len(known["model"]["vocab"])
    found._tokenizer = Tokenizer.from_str(json.dumps(known))
    found.chat_template += RERANKER
    return found


def _is_call(text: str) -> bool:
    inner = re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)
    return inner is not None and is_person(inner[1])


IS_LEGAL: dict[str, Callable[[str], bool]] = {
    "regex": lambda text: re.fullmatch(GRAMMARS["regex"]["regex"], text) is not None,
    "json_schema": is_person,
    "ebnf": lambda text: re.fullmatch(r"(yes|no)( [x-z])?!", text) is not None,
    "structural_tag": _is_call,
}
