"""Measure tokens a target pass on real text: SGLang's own speculative decoding, and each mode.

    make real                                                   # everything, resumable at any point
    .venv/bin/python bench/real --list                          # lists the cells
    .venv/bin/python bench/real --only 'coder-exact-*-t0.7'     # a part of it
    .venv/bin/python bench/real --problems 14 --publish         # what is complete there

The models are those of `make real-models`, the prompts Spec-Bench's, and the frame is that of
`bench/fidelity`. Rows are those that the target reads in a pass, equal ones counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import answers
import numpy as np
from answers import Reply, Study, kept_of
from fidelity.scoring import AnswerScores, load, score, scorer
from intervals import Interval, kl_at_least, paired_ratio_of_ratios, ratio, watched_tilt
from real.prompts import NAMES, SPEC_BENCH, PromptSource, kind_of, others, prompts
from results import (
    Report,
    by_temperature,
    interval_cell,
    markdown_table,
    number_cell,
    table,
    tokens_a_pass,
    tokens_and_passes,
)
from study import PUBLISHED, BenchError, Log, bar, code_fingerprint, copy

from sglang_smc_tools.real.models import CACHE, checkpoint, origin

# --- Cells


class RealPair(NamedTuple):
    """A target and its draft, by their names in `sglang_smc_tools.real.models`."""

    target: str
    draft: str | None = None


#: Heads that `distill` makes for the small target (bench/README.md), in the cache beside it, and
#: their passes in a round of K = 5: a block's one; heads also read what was accepted.
HEADS = {"smollm2-eagle3": 6, "smollm2-mtp": 6, "smollm2-dspark": 1}
PAIRS = {
    "coder": RealPair("coder-1.5b", "coder-0.5b"),
    "smollm2": RealPair("smollm2"),
    **{name: RealPair("smollm2", name) for name in HEADS},
}
HEAD = "model.safetensors"
KINDS = "answers", "scores"  # folders of results that are published
TEMPERATURES = (0.7, 1.0, 0.0, 0.3)
MAX_TOKENS = 96
#: Settings of all engines. The models are in bfloat16, as are most that are served.
COMMON: dict[str, Any] = answers.COMMON | {
    "dtype": "bfloat16",
    "max_running_requests": 14,  # two of each kind
    "context_length": 1024,
    "max_total_tokens": 24_576,
}
SMC = "SMC"
PLAIN = "plain decoding"
MATCHES = "n-grams"
NUM_PARTICLES = 8
MOST_STEPS = 23
#: Trees of at most 72 rows, by SGLang's topk, steps and tokens; a chain has one branch.
STANDALONE = {
    "SGLang chain of 8": (1, 8, 9),
    "SGLang chain of 23": (1, 23, 24),
    "SGLang tree 8 / 8 / 72": (8, 8, 72),
    "SGLang tree 4 / 17 / 72": (4, 17, 72),
}
#: Of an EAGLE-3 head, of as many rows as `OF_HEADS`.
EAGLE = {"SGLang tree 8 / 5 / 48": (8, 5, 48)}
TREES = STANDALONE | EAGLE
NGRAM = "SGLang n-grams"
NGRAM_TOKENS = 12
#: N and K, of at most 72 rows.
EXACT = ((1, 8), (8, 8), (4, 17), (3, 23))
OF_HEADS = ((1, 5), (8, 5))
USUAL = (8, 8)


@dataclass(frozen=True)
class RealCell(answers.Cell):
    """A setting at a temperature.

    Args:
        rows: what the target reads in a pass.
        draft_passes: one after another, before it.
    """

    pair: str = ""
    rows: int = 0
    draft_passes: int = 0

    @property
    def slug(self) -> str:
        return f"{self.pair}-{super().slug.replace('/', '').replace('--', '-')}"


def cells() -> list[RealCell]:
    """Return all settings at each temperature, grouped by engine."""
    found = [one for t in TEMPERATURES for name in PAIRS for one in _cells(name, t)]
    return sorted(found, key=lambda cell: (list(PAIRS).index(cell.pair), cell.engine))


def _cells(pair: str, temperature: float) -> Iterator[RealCell]:
    def stock(label: str, rows: int, draft_passes: int) -> RealCell:
        engine = f"{pair} {label}"
        sizes = {"rows": rows, "draft_passes": draft_passes}
        return RealCell(label, engine, temperature, pair=pair, **sizes)

    def smc(label: str, size: tuple[int, int], engine: str = SMC, **asked: Any) -> RealCell:
        n, k = size
        return RealCell(
            label=f"{label} N={n} K={k}",
            engine=f"{pair} {engine}",
            temperature=temperature,
            smc={"num_particles": n, "num_steps": k, **asked},
            pair=pair,
            rows=n * (k + 1),
            draft_passes=0 if engine == MATCHES else HEADS.get(pair, k),
        )

    if pair in HEADS:
        yield from (smc("exact", size, mode="exact") for size in OF_HEADS)
        if pair.endswith("eagle3"):
            yield from (stock(label, rows, k) for label, (_, k, rows) in EAGLE.items())
        return
    yield stock(NGRAM, NGRAM_TOKENS, 0)
    yield smc("exact by n-grams", USUAL, MATCHES, mode="exact")
    if PAIRS[pair].draft is None:
        return
    yield from (stock(label, rows, k) for label, (_, k, rows) in STANDALONE.items())
    yield from (smc("exact", size, mode="exact") for size in EXACT)
    if temperature:  # at 0 all modes are one
        paper = {"mode": "smc", "resample_at": "block", "evidence_threshold": 0.0}
        yield smc("auto", USUAL, mode="auto")
        yield smc("default", USUAL)
        yield smc("paper", USUAL, **paper)


def settings(engine: str) -> dict[str, Any]:
    """Return the keywords of an engine except the models."""
    pair, _, name = engine.partition(" ")
    if name in TREES:
        topk, steps, tokens = TREES[name]
        return COMMON | {
            "speculative_algorithm": "EAGLE3" if pair in HEADS else "STANDALONE",
            "speculative_eagle_topk": topk,
            "speculative_num_steps": steps,
            "speculative_num_draft_tokens": tokens,
        }
    if name == PLAIN:
        return COMMON
    if name == NGRAM:
        return COMMON | {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": NGRAM_TOKENS,
        }
    found = COMMON | {
        "speculative_algorithm": "SMC",
        "speculative_num_steps": OF_HEADS[-1][1] if pair in HEADS else MOST_STEPS,
        "speculative_smc_num_particles": NUM_PARTICLES,
    }
    if name == MATCHES:
        found |= {"speculative_smc_ngram_matches": True, "speculative_smc_mode": "exact"}
        found["speculative_smc_adaptive"] = "off"
    return found


# --- Answers and rows


@dataclass(frozen=True)
class Yielded:
    """What an answer took."""

    index: int  # of the prompt in `real.prompts`
    info: dict[str, Any]
    output_ids: list[int]  # including EOS
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class PlainScores(AnswerScores):
    """The scores of the answer to a prompt by its pair's plain models."""

    index: int


#: What is stored of `answers.kept_of`; the files are published.
KEPT = ("completion_tokens", "spec_verify_ct", "spec_smc_tilt", "spec_smc_tilt_information")


@dataclass(frozen=True, kw_only=True)
class RealRow:
    """A line of the table; None where a number does not apply."""

    pair: str
    label: str  # without the temperature
    temperature: float
    rows: int
    draft_passes: int
    tokens_per_pass: Interval
    to_best_tree: Interval | None  # ratio to SGLang's best STANDALONE, on the same prompts
    chat: float | None
    code: float | None
    maths: float | None
    summaries: float | None
    translation: float | None
    questions: float | None
    retrieval: float | None
    server_tilt: Interval | None
    tilt: Interval | None  # these three by the plain models
    innovation: Interval | None  # nats a token
    kl_at_least: Interval | None  # nats an answer
    plugin: str  # fingerprint of the code that answered


def rows_of(
    found: Mapping[RealCell, Sequence[Yielded]],
    plugin: Callable[[RealCell], str],
    scores: Callable[[RealCell], Sequence[PlainScores]],
) -> list[RealRow]:
    """Return a row for each cell that has answers."""
    return [
        _row(cell, some, best_tree(cell, found), scores(cell), plugin(cell))
        for cell, some in found.items()
    ]


def best_tree(
    cell: RealCell, found: Mapping[RealCell, Sequence[Yielded]]
) -> Sequence[Yielded] | None:
    """Return the answers of SGLang's own draft-model setting with the most tokens a pass."""
    like = (cell.pair, cell.temperature)
    trees = [
        some
        for one, some in found.items()
        if one.label in TREES and (one.pair, one.temperature) == like
    ]
    return max(trees, key=lambda some: tokens_a_pass(infos(some)).mean, default=None)


def infos(found: Sequence[Yielded]) -> list[dict[str, Any]]:
    """Return the counters of answers."""
    return [one.info for one in found]


def _row(
    cell: RealCell,
    found: Sequence[Yielded],
    tree: Sequence[Yielded] | None,
    scores: Sequence[PlainScores],
    plugin: str,
) -> RealRow:
    kinds = {kind: [one for one in found if kind_of(one.index) == kind] for kind in NAMES}
    sums = np.array([(one.tilt, one.information, one.innovation) for one in scores]).T  # [3, n]
    sizes = np.array([len(one.log_ratios) for one in scores])
    return RealRow(
        pair=cell.pair,
        label=cell.label,
        temperature=cell.temperature,
        rows=cell.rows,
        draft_passes=cell.draft_passes,
        tokens_per_pass=tokens_a_pass(infos(found)),
        to_best_tree=tree and paired_ratio_of_ratios(_sums(found), _sums(tree)),
        server_tilt=watched_tilt(infos(found)),
        tilt=ratio(sums[0], sums[1]) if scores else None,
        innovation=ratio(sums[2], sizes) if scores else None,
        kl_at_least=kl_at_least([np.array(one.log_ratios) for one in scores]) if scores else None,
        plugin=plugin,
        **{kind: tokens_a_pass(infos(some)).mean for kind, some in kinds.items()},
    )


def _sums(found: Sequence[Yielded]) -> tuple[np.ndarray, np.ndarray]:
    """Return each answer's tokens after the first and target passes, ``[n]``, by prompt."""
    return tokens_and_passes(infos(sorted(found, key=lambda one: one.index)))


COLUMNS: dict[str, Callable[[RealRow], str]] = {
    "": lambda row: row.label,
    "rows": lambda row: f"{row.rows}",
    "draft passes": lambda row: f"{row.draft_passes}",
    "tokens / target pass": lambda row: interval_cell(row.tokens_per_pass, ".2f"),
    "times SGLang's best tree": lambda row: interval_cell(row.to_best_tree, ".2f"),
    **{kind: lambda row, kind=kind: number_cell(getattr(row, kind), ".1f") for kind in NAMES},
    "the server's own tilt": lambda row: interval_cell(row.server_tilt, "+.2f"),
    "tilt": lambda row: interval_cell(row.tilt, "+.2f"),
    "innovation, nats / token": lambda row: interval_cell(row.innovation, "+.3f"),
    "KL, nats an answer, at least": lambda row: interval_cell(row.kl_at_least, ".2f"),
}


def markdown(rows: Sequence[RealRow], note: str) -> str:
    """Return a table for each pair, and for each of its temperatures."""
    parts = [note]
    for pair in dict.fromkeys(row.pair for row in rows):
        at = by_temperature(row for row in rows if row.pair == pair)
        parts.append(f"**{pair}, tokens a target pass**\n\n{_summary(at)}")
        for title, here in at.items():
            parts.append(f"**{pair}, {title.lower()}**\n\n{table(COLUMNS, here)}")
    return "\n\n".join(parts) + "\n"


def _summary(at: Mapping[str, Sequence[RealRow]]) -> str:
    """Return a table with a line for each setting, and a column for each temperature."""
    labels = dict.fromkeys(row.label for here in at.values() for row in here)
    tokens = [{row.label: row.tokens_per_pass.mean for row in here} for here in at.values()]
    lines = [[name, *(number_cell(of.get(name), ".2f") for of in tokens)] for name in labels]
    return markdown_table(["", *at], lines)


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    told = origin["settings"]
    models = "; ".join(
        f"{one['model']} ({one['quantisation']}, SHA-256 {one['sha256'][:12]})"
        for one in told["models"]
    )
    return (
        f"{models}; dequantized to bfloat16. The first {told['problems']} prompts of Spec-Bench, "
        f"its kinds in turn, at most {told['max_new_tokens']} tokens an answer; on "
        f"{origin['hardware']}, {origin['date'][:10]}. In brackets 95 % intervals, over answers. "
        "Rows: what the target reads in a pass, equal ones counted. SGLang's best tree is the one "
        "with the most tokens, of at most 72 rows, on the same prompts; trees are topk / steps / "
        "tokens. The server's own tilt, and by the plain models in float32 tilt, innovation and "
        "KL, are 0 for the target's distribution."
    )


# --- The study


class RealStudy(Study[RealCell, Yielded]):
    """A study of real models; results of cells that are not selected are those of the code named.

    Attributes:
        source: of the prompts.
    """

    source: ClassVar[PromptSource] = SPEC_BENCH

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        made = super().parser()
        default = CACHE / cls.source.name
        where = cls.source.where
        made.add_argument("--prompts", type=Path, default=default, help=where)
        return made

    def __init__(self, options: argparse.Namespace) -> None:
        for kind in KINDS:
            published = PUBLISHED / self.name / kind
            if published.exists() and not (options.output_dir / kind).exists():
                shutil.copytree(published, options.output_dir / kind)
        super().__init__(options)

    def engine(self, name: str) -> dict[str, Any]:
        return settings(name)

    def pair(self, engine: str) -> RealPair:
        """Return the models of an engine, the draft where it has one."""
        name, _, kind = engine.partition(" ")
        target, draft = PAIRS[name]
        return RealPair(target, None if kind in (PLAIN, NGRAM, MATCHES) else draft)

    def models(self, name: str) -> tuple[str, str | None]:
        target, draft = self.pair(name)
        return str(checkpoint(target)), draft and str(_folder(draft))

    def fingerprint(self) -> dict[str, Any]:
        return code_fingerprint() | {"prompts": self.source.sha256}

    def identity(self, cell: RealCell) -> dict[str, Any]:
        models = [_origin(name) for name in self.pair(cell.engine) if name]
        return super().identity(cell) | {"plugin": self.plugin(cell), "models": models}

    def prompt(self, cell: RealCell, index: int) -> list[int]:
        target = PAIRS[cell.pair].target
        return _prompts(target, self.options.prompts, self.options.problems)[index]

    def flushes(self, cell: RealCell) -> bool:
        """Keep the prompts' KV from cell to cell, but no text for n-gram matches."""
        return "n-grams" in cell.engine

    def stored(self, cell: RealCell, reply: Reply, sample: int) -> Yielded:
        info = kept_of(reply.meta_info)
        counters = {key: info[key] for key in KEPT if key in info}
        return Yielded(reply.index, counters, reply.output_ids, sample)

    def publish(self) -> None:
        """Copy what is complete, and all answers, from which the study goes on elsewhere."""
        folder = PUBLISHED / self.name
        self.report.publish(self.options.output_dir, folder)
        for kind in KINDS:
            copy((self.options.output_dir / kind).glob("*.jsonl"), folder / kind)

    def settings(self) -> dict[str, Any]:
        pairs = (self.pair(cell.engine) for cell in self.cells)
        used = dict.fromkeys(name for pair in pairs for name in pair if name)
        return super().settings() | {"models": list(map(_origin, used))}


class Real(RealStudy):
    """The study of tokens a target pass, and of the distance from the target."""

    name = "real"
    about = "Tokens per target pass on real text, of SGLang's own settings and of all modes."
    problems = 28
    max_tokens = MAX_TOKENS
    kind = Yielded
    report = Report("real", RealRow, markdown)
    note = staticmethod(note)

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        made = super().parser()
        score = "score stored answers of draft models by the plain models; ask for none"
        made.add_argument("--score", action="store_true", help=score)
        told = "write prompts that are not measured there, for heads to learn from, and stop"
        made.add_argument("--training-prompts", type=Path, metavar="FILE", help=told)
        return made

    def run(self) -> None:
        options = self.options
        if options.training_prompts is None:
            return super().run()
        left = others(options.prompts, tokenizer("smollm2"), type(self).problems)
        lines = [{"messages": [{"role": "user", "content": text}]} for text in left]
        options.training_prompts.write_text("".join(json.dumps(one) + "\n" for one in lines))

    def grid(self) -> list[RealCell]:
        return cells()

    def plugin(self, cell: RealCell) -> str:
        score = self.options.score  # of answers of any code
        there = Log(self.path(cell), {}).header() if score else {}
        return there.get("plugin") or super().plugin(cell)

    def _answer(self) -> None:
        return self._score() if self.options.score else super()._answer()

    def rows(self) -> list[RealRow]:
        return rows_of(self.complete(), self.plugin, self.scores)

    def scores(self, cell: RealCell) -> list[PlainScores]:
        """Return the stored scores of a cell's answers, if all of these have some."""
        log = self._scores_of(cell)
        indices = [one.index for one in self.read(cell)]
        found = {one["index"]: PlainScores(**one) for one in log.read()} if log.fits else {}
        return [found[index] for index in indices] if found.keys() >= set(indices) else []

    def _scores_of(self, cell: RealCell) -> Log:
        identity = self.answers[cell].header() | scorer()
        return Log(self.options.output_dir / "scores" / f"{cell.slug}.jsonl", identity)

    def _score(self) -> None:
        drafted = [cell for cell in self.selected if cell.pair not in HEADS and cell.draft_passes]
        answers = [(cell, one) for cell in drafted for one in self.read(cell)]
        for cell, one in bar(iterable=answers, desc="scoring", unit="answer"):
            log = self._scores_of(cell)
            if one.index not in {entry["index"] for entry in log.read()}:
                models = load(*map(_folder, filter(None, self.pair(cell.engine))))
                prompt = self.prompt(cell, one.index)
                scores = score(prompt, one.output_ids, cell.temperature, models)
                with log.writing() as write:
                    write(asdict(scores) | {"index": one.index})


def _folder(name: str) -> Path:
    """Return the folder of a model or head; raise ScriptError or BenchError unless it is there."""
    if name not in HEADS:
        return checkpoint(name)
    if not (CACHE / name / HEAD).exists():
        raise BenchError(f"{CACHE / name} is not there. Train it as bench/README.md says.")
    return CACHE / name


def _origin(name: str) -> dict[str, str]:
    """Return the provenance of a model or head."""
    if name not in HEADS:
        return origin(name)
    weights = CACHE / name / HEAD
    digest = sha256(weights.read_bytes()).hexdigest() if weights.exists() else ""
    return {"model": name, "sha256": digest, "quantisation": "trained for this table"}


@lru_cache
def tokenizer(target: str) -> Any:
    """Return a target's tokenizer."""
    from transformers import AutoTokenizer  # slow to import

    return AutoTokenizer.from_pretrained(checkpoint(target))


@lru_cache
def _prompts(target: str, path: Path, count: int) -> list[list[int]]:
    """Return the prompts in a target's chat template."""
    return prompts(path, tokenizer(target), count)


main = Real.main
