"""Counts launches of a filtered row, and the bytes that they move: ``count_bytes.py``.

Top-k 20 and top-p 0.95 at temperature 0.7, of 128,256 tokens; in Triton's interpreter. It prints a
table of Markdown, of a row that 40 tokens share and of one that thousands do: KB in sectors of 32
bytes that a launch's programs read, each program a sector once, and that they write.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections import Counter
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor

from sglang_smc.ops.triton_ops import TRITON

VOCAB_SIZE = 128_256
SECTOR = 32
HEAD = """| kernel | launches | read, KB | written, KB |
| --- | ---: | ---: | ---: |"""


class Traffic:
    """Notes what kernels read and write while they are interpreted."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._seen: set[int] = set()  # sectors that this program has read

    def begin(self, name: str) -> None:
        self.launches.append(name)

    def begin_program(self) -> None:
        self._seen = set()

    def note_read(self, addresses: np.ndarray) -> None:
        sectors = set(np.unique(addresses // SECTOR).tolist()) - self._seen
        self._seen |= sectors
        self.read[self.launches[-1]] += SECTOR * len(sectors)

    def note_written(self, addresses: np.ndarray) -> None:
        self.written[self.launches[-1]] += SECTOR * len(np.unique(addresses // SECTOR))


def listen(traffic: Traffic) -> None:
    """Tell ``traffic`` of every launch, program, load and store from now on."""
    launch = GridExecutor.__call__
    builder = interpreter.InterpreterBuilder
    set_place = builder.set_grid_idx
    load = builder.create_masked_load
    store = builder.create_masked_store

    def launched(self: Any, *args: Any, **options: Any) -> Any:
        traffic.begin(self.fn.__name__)
        return launch(self, *args, **options)

    def begun(self: Any, *place: int) -> None:
        traffic.begin_program()
        set_place(self, *place)

    def loaded(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        traffic.note_read(pointers.data[mask.data])
        return load(self, pointers, mask, *rest, **more)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.note_written(pointers.data[mask.data])
        return store(self, pointers, value, mask, *rest)

    GridExecutor.__call__ = launched
    builder.set_grid_idx = begun
    builder.create_masked_load = loaded
    builder.create_masked_store = stored


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(1, VOCAB_SIZE, generator=generator)
    peaked = 3 * flat
    peaked[0, :: VOCAB_SIZE // 40] += 12
    temperature, top_p, min_p = (torch.tensor([value]) for value in (0.7, 0.95, 0.0))
    np.seterr(all="ignore")
    traffic = Traffic()
    listen(traffic)
    for kind, row, top_k in (("peaked", peaked, 20), ("flat", flat, VOCAB_SIZE)):
        traffic.__init__()
        filters = torch.tensor([top_k]), top_p, min_p
        law = TRITON.distribution.of(row.unsqueeze(0), temperature, filters=filters)
        law.sample(torch.tensor([0.5], dtype=torch.float64))
        print(f"\n{kind}:\n\n{HEAD}")
        for name, count in Counter(traffic.launches).items():
            moved = f"{traffic.read[name] / 1000:,.1f} | {traffic.written[name] / 1000:,.1f}"
            print(f"| `{name}` | {count} | {moved} |")
        total = f"{traffic.read.total() / 1000:,.0f} | {traffic.written.total() / 1000:,.0f}"
        print(f"| all | {len(traffic.launches)} | {total} |")


if __name__ == "__main__":
    main()
