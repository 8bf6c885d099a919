"""Ask the cells' problems, skipping what is on disk, and show how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from fidelity.measure import MAX_PROBLEMS, MAX_TOKENS, Reply, Request, Start, prompt_ids
from pair.task import held_out
from steering.grid import POTENTIALS, TEMPERATURE, Cell
from steering.judge import Judge
from steering.steps import Steps
from steering.store import Drawn, Pool, Valued
from study import PAIR, BenchError, bar

from sglang_smc.potentials import Potential, Text

_AT_ONCE = 64  # samples whose values are kept together


def request(cell: Cell, index: int, sample: int) -> Request:
    """Problem ``index`` for the ``sample``-th time, with a seed of its own."""
    params: dict[str, Any] = {
        "temperature": TEMPERATURE,
        "max_new_tokens": MAX_TOKENS,
        "sampling_seed": index + MAX_PROBLEMS * sample,
    }
    if cell.smc is not None:
        params["custom_params"] = {"smc": cell.smc}
    return Request(index, held_out(index), params)


class Values:
    """What potentials say of plain samples, for choices among them."""

    def __init__(self, potentials: Mapping[str, Potential]) -> None:
        self._potentials = potentials

    @classmethod
    def shipped(cls) -> Values:
        """The two of this study, opened."""
        found: dict[str, Potential] = {"steps": Steps(), "judge": Judge()}
        for potential in found.values():
            potential.open()
        return cls(found)

    def of(self, some: Sequence[Drawn]) -> list[dict[str, float]]:
        """By the names of potentials, of each sample."""
        columns = {
            name: potential.complete([self._text(one, name, potential) for one in some])
            for name, potential in self._potentials.items()
        }
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def _text(self, one: Drawn, name: str, potential: Potential) -> Text:
        """As a server would give it."""
        args = potential.Args(**POTENTIALS[name])
        ids = _tokenizer()(one.chosen)["input_ids"]
        return Text(prompt_ids(_tokenizer(), one.index), ids, args, _decode)


def value(todo: Sequence[Valued], values: Callable[[], Values]) -> None:
    """Ask potentials about all plain samples that they have not been asked about."""
    missing = [(valued, valued.missing()) for valued in todo]
    total = sum(len(some) for _, some in missing)
    if not total:
        return
    opened = values()
    with bar(total=total, unit="sample", desc="values of samples") as progress:
        for valued, some in missing:
            with valued.log.writing() as write:
                for start in range(0, len(some), _AT_ONCE):
                    few = some[start : start + _AT_ONCE]
                    for one, found in zip(few, opened.of(few), strict=True):
                        write({"index": one.index, "sample": one.sample, "values": found})
                    progress.update(len(few))


def measure(todo: Sequence[tuple[Cell, Pool]], start: Start) -> None:
    """Complete all cells, starting each engine that is needed once."""
    open_cells = [(cell, pool) for cell, pool in todo if pool.missing()]
    total = sum(len(pool.missing()) for _, pool in open_cells)
    with bar(total=total, unit="answer", disable=not open_cells) as progress:
        for engine, group in groupby(open_cells, key=lambda pair: pair[0].engine):
            progress.set_description_str(f"starting the engine: {engine}")
            with start(engine) as asker:
                for cell, pool in group:
                    progress.set_description_str(cell.slug)
                    with pool.writing() as write:
                        for drawn in _asked(cell, pool, asker):
                            write(drawn)
                            progress.update()


def _asked(cell: Cell, pool: Pool, asker: Any) -> Iterator[Drawn]:
    """What is missing, one sample of each problem after the other: replies name the problem."""
    for sample, group in groupby(pool.missing(), key=lambda pair: pair[0]):
        requests = [request(cell, index, sample) for _, index in group]
        for reply in asker.ask(requests):
            yield _steered(reply) if cell.smc else _plain(reply, sample)


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    """The pair's one."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PAIR / "target")


def _decode(ids: Sequence[int]) -> str:
    return _tokenizer().decode(list(ids), skip_special_tokens=True)


def _plain(reply: Reply, sample: int) -> Drawn:
    tokens = reply.meta_info["completion_tokens"]
    return Drawn(
        index=reply.index,
        sample=sample,
        chosen=reply.text,
        texts=[reply.text],
        weights=[1.0],
        tokens=tokens,
        passes=tokens,
    )


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
