"""Run the problems of a cell, and evaluate potentials on plain samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from answers import (
    COMMON,
    MAX_PROBLEMS,
    Answers,
    Asker,
    Reply,
    Request,
    prompt_ids,
    request,
    started,
)
from steering.grid import DRAFT, ITSELF, NUM_STEPS, POTENTIALS, SAMPLES, TARGET, TEMPERATURE, Cell
from steering.judge import Judge
from steering.steps import Steps
from study import PAIR, BenchError, Log, bar

from sglang_smc.potentials import Potential, Text

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


def settings(name: str) -> dict[str, Any]:
    """Return the keywords of `sgl.Engine` except the models."""
    return COMMON | (SMC if name.startswith("smc ") else {})


@contextlib.contextmanager
def running(name: str) -> Iterator[Asker]:
    """Start a model alone, or under SMC with both potentials, for the ``with`` block."""
    kind, _, model = name.partition(" ")
    models = (TARGET, TARGET) if model == ITSELF else (model, DRAFT)
    with started(settings(name), *(models if kind == "smc" else models[:1])) as asker:
        yield asker


@dataclass(frozen=True)
class Drawn:
    """The result of one request: a plain sample, or the particles of SMC."""

    index: int  # of the problem
    sample: int  # of the problem, from 0 on
    chosen: str  # the server's answer
    texts: list[str]
    weights: list[float]  # which sum to 1
    tokens: int  # of all texts
    passes: int  # of the model
    values: dict[str, float] = field(default_factory=dict)  # log phi, for plain samples


def request_of(cell: Cell, index: int, sample: int) -> Request:
    """Return the request of problem ``index`` for sample ``sample``, with its own seed."""
    return request(index, index + MAX_PROBLEMS * sample, TEMPERATURE, cell.smc)


def drawn(cell: Cell, answers: Answers[Drawn], asker: Asker) -> Iterator[Drawn]:
    """Run the missing requests, one sample of each problem at a time: replies name the problem."""
    for sample, group in groupby(answers.missing(), key=lambda pair: pair[0]):
        requests = [request_of(cell, index, sample) for _, index in group]
        for reply in asker.ask(requests):
            yield _steered(reply) if cell.smc else _plain(reply, sample)


def _plain(reply: Reply, sample: int) -> Drawn:
    tokens = reply.meta_info["completion_tokens"]
    return Drawn(reply.index, sample, reply.text, [reply.text], [1.0], tokens, passes=tokens)


def _steered(reply: Reply) -> Drawn:
    info = reply.meta_info
    particles = info.get("spec_smc_particles")
    if not particles:
        raise BenchError(f"Problem {reply.index} came without particles: {info}")
    return Drawn(
        index=reply.index,
        sample=0,
        chosen=reply.text,
        texts=[_decode(one["output_ids"]) for one in particles],
        weights=[one["weight"] for one in particles],
        tokens=sum(len(one["output_ids"]) for one in particles),
        passes=info["spec_verify_ct"],
    )


# --- Values of plain samples, for choices among them


@dataclass(frozen=True)
class Values:
    """The potentials' values of plain samples on disk."""

    log: Log

    def of(self, answers: Sequence[Drawn]) -> list[Drawn]:
        """Return the samples that have values, with them."""
        known = {(one["index"], one["sample"]): one["values"] for one in self.log.read()}
        there = [one for one in answers if (one.index, one.sample) in known]
        return [replace(one, values=known[one.index, one.sample]) for one in there]

    def missing(self, answers: Sequence[Drawn]) -> list[Drawn]:
        """Return the samples without values."""
        known = {(one.index, one.sample) for one in self.of(answers)}
        return [one for one in answers if (one.index, one.sample) not in known]


#: Opened potentials by name.
Potentials = Mapping[str, Potential]


def shipped() -> Potentials:
    """Open the two potentials of this study."""
    found: dict[str, Potential] = {"steps": Steps(), "judge": Judge()}
    for potential in found.values():
        potential.open()
    return found


def value(
    todo: Sequence[tuple[Cell, list[Drawn], Values]], opened: Callable[[], Potentials]
) -> None:
    """Evaluate the potentials on plain samples without values."""
    total = sum(len(some) for _, some, _ in todo)
    if not total:
        return
    potentials = opened()
    with bar(total=total, unit="sample", desc="values of samples") as progress:
        for _, some, values in todo:
            with values.log.writing() as write:
                for start in range(0, len(some), _AT_ONCE):
                    few = some[start : start + _AT_ONCE]
                    for one, found in zip(few, values_of(few, potentials), strict=True):
                        write({"index": one.index, "sample": one.sample, "values": found})
                    progress.update(len(few))


def values_of(some: Sequence[Drawn], potentials: Potentials) -> list[dict[str, float]]:
    """Return each potential's value of each sample."""
    columns = {
        name: potential.complete([_text(one, name, potential) for one in some])
        for name, potential in potentials.items()
    }
    return [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]


def _text(one: Drawn, name: str, potential: Potential) -> Text:
    """Return a sample as the text that a server passes to potentials."""
    args = potential.Args(**POTENTIALS[name])
    ids = _tokenizer()(one.chosen)["input_ids"]
    return Text(prompt_ids(_tokenizer(), one.index), ids, args, _decode)


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    """Return the pair's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PAIR / "target")


def _decode(ids: Sequence[int]) -> str:
    return _tokenizer().decode(list(ids), skip_special_tokens=True)
