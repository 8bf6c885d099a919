"""Compare steering by potentials with choices among as many plain samples.

    make steering                                        # everything, resumable at any point
    .venv/bin/python bench/steering --list               # lists the cells
    .venv/bin/python bench/steering --only 'smc-target-*' # a part of it
    .venv/bin/python bench/steering --problems 20        # a quick run, in another --output-dir

The shipped pair answers held-out problems. A rule that checks each step of arithmetic, and the
trained reward model, score lines and answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from answers import COMMON, MAX_PROBLEMS, Asker, Reply, Start, Study, prompt_ids, request
from results import Report
from steering.grid import (
    DRAFT,
    ITSELF,
    NUM_STEPS,
    PARTICLES,
    POTENTIALS,
    SAMPLES,
    TARGET,
    TEMPERATURE,
    Cell,
    cells,
)
from steering.judge import Judge
from steering.report import MARKS, Drawn, Row, markdown, rows_of, shown, summaries
from steering.steps import Steps
from study import PAIR, REPOSITORY, BenchError, Log, bar, digest, positive, write_between

from sglang_smc.potentials import Potential, Text

PAGE = REPOSITORY / "docs" / "potentials.md"
_AT_ONCE = 64  # number of samples with values stored together
SMC: dict[str, Any] = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": NUM_STEPS,
    "speculative_smc_num_particles": SAMPLES,
    "speculative_smc_potential": ["steps=steering.steps:Steps", "judge=steering.judge:Judge"],
    # On two shared cores a batch may take long.
    "speculative_smc_potential_timeout": 60.0,
    # Twice the particles of the fidelity study share its KV pool.
    "max_running_requests": 16,
}
#: Opened potentials by name.
Potentials = Mapping[str, Potential]


def shipped() -> Potentials:
    """Open the two potentials of this study."""
    found: dict[str, Potential] = {"steps": Steps(), "judge": Judge()}
    for potential in found.values():
        potential.open()
    return found


def note(origin: Mapping[str, Any]) -> str:
    """Return the text above the tables."""
    last = origin["settings"]["problems"] - 1
    return (
        f"The shipped pair, temperature {TEMPERATURE:g}, held-out problems 0 to "
        f"{last}; on {origin['hardware']}, {origin['date'][:10]}. In brackets "
        "95 % intervals (Wilson). `steps` is the rule that checks arithmetic, `judge` the trained "
        "reward model; SMC asks them at each line's end. The same N plain samples serve all that "
        "choose among samples, the same N particles all that choose among particles. Tokens are "
        "of all texts there are in the end."
    )


@lru_cache
def code_of(potential: str) -> str:
    """Return the fingerprint of a potential's code and model."""
    paths = [Path(__file__).with_name(f"{potential}.py")]
    if potential == "judge":
        paths += [*(PAIR / "reward").iterdir(), PAIR / "reward_texts.py"]
    return digest(paths)


class Steering(Study[Cell, Drawn]):
    """The study.

    Args:
        opened: returns the opened potentials, which evaluate plain samples.
    """

    name = "steering"
    about = "Accuracy with potentials, beside votes and choices among as many plain samples."
    kind = Drawn
    report = Report("steering", Row, markdown)
    note = staticmethod(note)

    def __init__(
        self,
        options: argparse.Namespace,
        start: Start | None = None,
        opened: Callable[[], Potentials] = shipped,
    ) -> None:
        self._opened = opened
        super().__init__(options, start)

    @classmethod
    def parser(cls) -> argparse.ArgumentParser:
        made = super().parser()
        sizes = {"type": positive, "nargs": "+", "default": list(PARTICLES), "metavar": "N"}
        made.add_argument("--particles", choices=PARTICLES, help="numbers of particles", **sizes)
        return made

    def grid(self) -> list[Cell]:
        return cells(self.options.particles)

    def engine(self, name: str) -> dict[str, Any]:
        return COMMON | (SMC if name.startswith("smc ") else {})

    def models(self, name: str) -> tuple[str, str | None]:
        """Return a model alone, or under SMC the target and what drafts for it."""
        kind, _, model = name.partition(" ")
        models = (TARGET, TARGET) if model == ITSELF else (model, DRAFT)
        return models if kind == "smc" else (models[0], None)

    def identity(self, cell: Cell) -> dict[str, Any]:
        """Return what a cell's answers depend on; plain samples are stock SGLang's."""
        found = super().identity(cell)
        if cell.potential:
            return found | {"potential": code_of(cell.potential)}
        return {name: value for name, value in found.items() if name != "plugin"}

    def ask(self, cell: Cell, asker: Asker) -> Iterator[Drawn]:
        """Run the missing requests, one sample of each problem at a time, with its own seed."""
        for sample, group in groupby(self.missing(cell), key=lambda pair: pair[0]):
            seed = MAX_PROBLEMS * sample
            requests = [request(i, i + seed, TEMPERATURE, cell.smc) for _, i in group]
            for reply in asker.ask(requests):
                yield _steered(reply) if cell.smc else _plain(reply, sample)

    def remarks_on(self, cell: Cell) -> Log | None:
        """Return the file of potentials' values of plain samples, for choices among them."""
        if cell.potential:
            return None
        potentials = {name: code_of(name) for name in POTENTIALS}
        return Log(self.path("values", cell), {**self.identity(cell), "potentials": potentials})

    def evaluate(self, todo: Sequence[tuple[Cell, list[Drawn], Log]]) -> None:
        total = sum(len(some) for _, some, _ in todo)
        if not total:
            return
        potentials = self._opened()
        with bar(total=total, unit="sample", desc="values of samples") as progress:
            for _, some, log in todo:
                with log.writing() as write:
                    for start in range(0, len(some), _AT_ONCE):
                        few = some[start : start + _AT_ONCE]
                        for one, found in zip(few, values_of(few, potentials), strict=True):
                            write({"index": one.index, "sample": one.sample, "values": found})
                        progress.update(len(few))

    def rows(self) -> list[Row]:
        found = {}
        for cell in self.complete():
            found[cell] = self.read(cell)
            if cell in self.remarks:
                values = self.remarks_of(cell)
                found[cell] = [
                    replace(one, values=values[self.key_of(one)]["values"]) for one in found[cell]
                ]
        return rows_of(found)

    def publish(self) -> None:
        """Copy the results to bench/results, and the tables to the page."""
        super().publish()
        rows = self.report.read(self.options.output_dir)
        write_between(PAGE, MARKS, summaries(shown(rows)))


def _plain(reply: Reply, sample: int) -> Drawn:
    tokens = reply.meta_info["completion_tokens"]
    return Drawn(reply.index, sample, [reply.text], [1.0], tokens, passes=tokens)


def _steered(reply: Reply) -> Drawn:
    info = reply.meta_info
    particles = info.get("spec_smc_particles")
    if not particles:
        raise BenchError(f"Problem {reply.index} came without particles: {info}")
    return Drawn(
        index=reply.index,
        sample=0,
        texts=[_decode(one["output_ids"]) for one in particles],
        weights=[one["weight"] for one in particles],
        tokens=sum(len(one["output_ids"]) for one in particles),
        passes=info["spec_verify_ct"],
    )


def values_of(some: Sequence[Drawn], potentials: Potentials) -> list[dict[str, float]]:
    """Return each potential's value of each sample, a text as servers pass it to potentials."""
    found: list[dict[str, float]] = [{} for _ in some]
    asked = [prompt_ids(_tokenizer(), one.index) for one in some]
    outputs = [_tokenizer()(one.texts[0])["input_ids"] for one in some]
    for name, potential in potentials.items():
        args = potential.Args(**POTENTIALS[name])
        pairs = zip(asked, outputs, strict=True)
        values = potential.complete([Text(*pair, args, _decode) for pair in pairs])
        for one, value in zip(found, values, strict=True):
            one[name] = value
    return found


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    """Return the pair's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PAIR / "target")


def _decode(ids: Sequence[int]) -> str:
    return _tokenizer().decode(list(ids), skip_special_tokens=True)
