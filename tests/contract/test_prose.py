"""What a reader needs of the pages' prose, as far as a program can tell."""

import re
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: The catalogues of settings and of issues are looked up, and not read.
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
READ = [path for path in PAGES if path.name not in ("words.md", "reference.md")]
QUESTIONS = tomllib.loads((DOCS / "questions.toml").read_text())["question"]
MINUS = "\N{MINUS SIGN}"
NUMBER = re.compile(rf"(?<![\w.])[-+{MINUS}]?\d[\d,]*(?:\.\d+)?")
#: Numbers in these are names: releases, models, settings, formulas.
NAMES = re.compile(
    r"`[^`]*`|\d+\.\d+\.\d+|\b[A-Z]\w*-\d\w*"
    r"|\b[NKT\N{GREEK SMALL LETTER ALPHA}c] ?(?:=|≤|<|>) ?[\d.]+"
    r"|\b(?:Llama|Qwen|Gemma|GLM|SmolLM2|DeepSeek|Kimi|MiniMax|Mistral|Phi|Granite|OLMo)[\w.-]*"
    r"(?:(?:,? | to | and )[\d.]+\b)*|arXiv [\d.]+|HTTP \d+|\b[\d.]+B\b|FP8|int8|95 %"
)
#: Where a term is a word of plain English, too: what it looks like as a term.
AS_TERM = {
    "pass": r"\b(?:a|per|one|each|target|target's) pass\b",
    "weight": r"\bby weight\b|\bparticle's weight\b|\blog-weights?\b",
    "power": r"\b[Aa] power\b|\b[Pp]owers\b",
    "pair": r"\b(?:shipped|coder) pair\b",
    "head": r"\b(?:a|an EAGLE|EAGLE-3|EAGLE|published) heads?\b",
    "block": r"\b(?:DSpark|DFlash|of a) blocks?\b|\bblock heads?\b",
    "row": r"\b(?:nearly free|further|target's) rows?\b|\brows are (?:not )?(?:nearly )?free\b",
    "column": r"\bcolumns of\b|\bkept columns\b",
    "chain": r"\bchains?\b(?! of hosts)",
    "AR": r"\bAR\b",
    "ESS": r"\bESS\b",
}
MOST_NUMBERS = 3
MOST_COLUMNS = 7
MOST_SHARE = 0.03


def words() -> list[str]:
    """The terms that docs/words.md explains."""
    return re.findall(r"^### (.+)$", (DOCS / "words.md").read_text(), re.M)


def prose_of(text: str) -> str:
    """The text without code blocks, tables, comments, headings and pictures."""
    text = re.sub(r"```.*?```|<!-- made.*?<!-- end|<!--.*?-->", "", text, flags=re.S)
    kept = [line for line in text.splitlines() if not re.match(r"\s*\||#|!\[|    \S", line)]
    return "\n".join(kept)


def sentences_of(text: str) -> list[str]:
    """The sentences of a page, without its worked example, which is arithmetic."""
    text = re.sub(r"^## One round in numbers$.*?(?=^## )", "", text, flags=re.S | re.M)
    plain = re.sub(r"\]\([^)]*\)", "]", prose_of(text))
    parts = re.split(r"\n\s*\n|\n\s*(?:- |\d+\. )", plain)
    return [one for part in parts for one in re.split(r"(?<=[.!?:])[*)]*\s+", part) if one.strip()]


def section_of(page: str, heading: str) -> str:
    """The part of a page below a heading, up to the next of its level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", page, re.M)
    assert found is not None, heading
    rest = page[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one["asks"][:40])
def test_a_question_is_answered_where_it_says(question: dict[str, object]) -> None:
    """Red where a page was rewritten, and what a reader asks has no answer there any more."""
    page = (ROOT / str(question["page"])).read_text()
    found = " ".join(section_of(page, str(question["heading"])).split())
    assert [one for one in question["words"] if one not in found] == []  # type: ignore[attr-defined]


def test_there_are_fifteen_questions_of_three_readers() -> None:
    readers = [one["who"] for one in QUESTIONS]
    assert len(readers) == 15 and set(readers) == {"operator", "student", "engineer"}


def is_introduced(text: str, term: str) -> bool:
    """Whether the first use of a term is in a link, or in the italics or bold of an explanation.

    Or behind a link to its entry.
    """
    plain = rf"(?<![\w`/.#-]){re.escape(term)}s?(?![\w`/-])"
    first = re.search(AS_TERM.get(term, f"(?i:{plain})"), text)
    entry = text.find(f"words.md#{term.lower().replace(' ', '-')})")
    if first is None or 0 <= entry < first.start():
        return True
    link = re.compile(r"\[[^\]]*\]\([^)]*\)|(?<!\w)\*{1,2}[^*]+\*{1,2}", re.S)
    return any(one.start() <= first.start() < one.end() for one in link.finditer(text))


@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_a_term_is_explained_or_linked_at_its_first_use(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "``", prose_of(path.read_text()))
    assert [term for term in words() if not is_introduced(text, term)] == []


def numbers_in(text: str) -> set[str]:
    return set(NUMBER.findall(text.replace(MINUS, "-")))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_number_behind_a_link_stands_in_that_file(path: Path) -> None:
    lost = []
    for text, target in re.findall(r"\[([^\[\]]+)\]\(([^)#\s]+)", prose_of(path.read_text())):
        found = (path.parent / target).resolve()
        if "bench/results" not in target or found.suffix == ".png":
            continue
        shown = {one.lstrip("+-") for one in numbers_in(NAMES.sub("", text))}
        known = {one.lstrip("+-") for one in numbers_in(found.read_text())}
        known |= {f"{float(one.replace(',', '')):g}" for one in known}
        lost += [(target, one) for one in shown if one not in known]
    assert lost == []


def test_few_sentences_have_four_numbers() -> None:
    """Red where numbers take the place of an answer: of all pages, and of none too many."""
    counts = {
        path: [len(NUMBER.findall(NAMES.sub("", one))) for one in sentences_of(path.read_text())]
        for path in READ
    }
    dense = {path.name: [n for n in found if n > MOST_NUMBERS] for path, found in counts.items()}
    print({name: len(found) for name, found in dense.items() if found})
    assert sum(map(len, dense.values())) <= MOST_SHARE * sum(map(len, counts.values()))
    most = {path.name: max(2, MOST_SHARE * len(found)) for path, found in counts.items()}
    assert [name for name, found in dense.items() if len(found) > most[name]] == []


@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_a_table_has_few_columns(path: Path) -> None:
    heads = re.findall(r"^(\|.*)\|\n\| ?-", path.read_text(), re.M)
    assert [head for head in heads if head.count("|") > MOST_COLUMNS] == []
