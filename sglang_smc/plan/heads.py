"""Heads that draft from the target's hidden states: their sizes, and the passes of a round.

Their embedding is the target's, whose rows are looked up and do not count. A head's own KV follows
the target's columns: once these are known it is made of the target's hidden states, in a pass that
is named ``follow``. The states themselves, as all activations, are left out of the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sglang_smc.plan import shapes
from sglang_smc.plan.blocks import Windows
from sglang_smc.plan.passes import LOGIT_BYTES, Pass, Rows, forward
from sglang_smc.plan.shapes import DFLASH, EAGLE3, ModelShape

#: Layers of the target that an EAGLE-3 head reads, and columns of a DFlash block, where a
#: configuration says nothing: as SGLang has it.
EAGLE3_STATES = 3
BLOCK_SIZE = 16
#: What newer blocks have besides; each is a further step after the pass, whose cost is not here.
NOT_PLANNED = ("projector_type", "conv_kernel_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class Head(ABC):
    """What both kinds have. Weights of ``fc`` are in 16 bits, as those of an LM head."""

    kind: ClassVar[str]

    layers: ModelShape
    num_states: int  # layers of the target that it reads, one beside the other, through ``fc``

    @property
    def weight_bytes(self) -> float:
        return self.layers.weight_bytes

    @property
    def fc_parameters(self) -> int:
        """From states of the target to one of its own."""
        return self.num_states * self.layers.hidden_size**2

    @property
    def entry_parameters(self) -> int:
        """What the first layer has beyond the others."""
        return 0

    @property
    def max_steps(self) -> int | None:
        """The most that K may be; None for any."""
        return None

    @abstractmethod
    def passes(self, target: ModelShape, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
        """Those named ``draft``, before the target's, and those named ``follow``, after it."""

    @property
    def num_parameters(self) -> int:
        """What the checkpoint brings: layers, ``fc``, and the LM head if it is its own."""
        return self.layers.num_parameters + self.entry_parameters + self.fc_parameters

    @property
    def streamed_bytes(self) -> float:
        """Its own weights that a pass of drafting reads."""
        return self.layers.streamed_bytes + self.entry_parameters * self.weight_bytes

    @property
    def resident_bytes(self) -> float:
        """Weights in the device's memory beside the target's."""
        return self.streamed_bytes + self.fc_parameters * self.layers.head_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return self.layers.kv_bytes_per_token

    def state_bytes(self, num_particles: int, num_steps: int) -> float:
        """Of the target's states that a request's round keeps: those read, of every column."""
        columns = num_particles * (num_steps + 1)
        return columns * self.num_states * self.layers.hidden_size * self.layers.head_bytes

    def require_fit(self, target: ModelShape, num_steps: int) -> None:
        """Raise ValueError for a target whose embedding it cannot take, and for too many steps."""
        mine, theirs = self.layers.hidden_size, target.hidden_size
        if mine != theirs:
            raise ValueError(
                f"The head's hidden size is {mine} and the target's {theirs}: it takes the "
                "target's embeddings and hidden states, so the two must agree. Choose the head "
                "that was trained for this target."
            )
        if self.max_steps is not None and num_steps > self.max_steps:
            raise ValueError(
                f"num_steps is {num_steps}, and the block was trained for {self.max_steps + 1} "
                f"columns, the last token's among them. Take at most {self.max_steps} steps."
            )


class Eagle3(Head):
    """An EAGLE-3 head: one small model a step, whose LM head has a vocabulary of its own.

    The first layer's queries, keys and values are made of an embedding and a state side by side.
    """

    kind: ClassVar = "eagle3"

    @property
    def entry_parameters(self) -> int:
        first = self.layers
        return first.hidden_size * first.head_dim * (first.num_heads + 2 * first.num_kv_heads)

    def passes(self, target: ModelShape, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
        """One over N rows for each of K drafts, and one over the target's N (K + 1) columns.

        The first draft starts from what ``fc`` made of the last column's states, others from the
        head's own. The columns go through the whole head, as in SGLang, but for the LM head.
        """
        self.require_fit(target, num_steps)
        found = []
        for step in range(num_steps):
            drafting = rows._replace(tail=rows.tail + step)
            found.append(
                self._through_entry(forward("draft", self.layers, drafting, 1, 1), rows.count)
            )
        columns = rows.count * (num_steps + 1)
        follow = forward("follow", self.layers, rows, num_steps + 1, 0)
        follow = self._through_entry(follow, columns)
        return (*found, follow.with_weights(self.fc_parameters, self.layers.head_bytes, columns))

    def _through_entry(self, one: Pass, num_rows: int) -> Pass:
        return one.with_weights(self.entry_parameters, self.weight_bytes, num_rows)


@dataclass(frozen=True)
class DFlash(Head):
    """A DFlash block: one pass over the last token and K masks, with the target's LM head.

    Its layers have no LM head: their ``vocab_size`` is 0.
    """

    kind: ClassVar = "dflash"
    block_size: int = BLOCK_SIZE

    @property
    def max_steps(self) -> int:
        """K: the first column is the last token's."""
        return self.block_size - 1

    @property
    def kv_parameters(self) -> int:
        """Weights that make keys and values, of all layers."""
        one = self.layers
        return 2 * one.num_layers * one.hidden_size * one.num_kv_heads * one.head_dim

    def passes(self, target: ModelShape, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
        """One over N (K + 1) columns, with logits of N K; then keys and values of the target's."""
        self.require_fit(target, num_steps)
        columns = rows.count * (num_steps + 1)
        return self._draft(target, rows, num_steps), self._follow(columns)

    def _draft(self, target: ModelShape, rows: Rows, num_steps: int) -> Pass:
        drafts = rows.count * num_steps
        one = forward("draft", self.layers, rows, num_steps + 1, 0)
        # Columns attend to those after them, too.
        unmasked = rows.count * num_steps * (num_steps + 1) / 2
        one = one._replace(
            flops=one.flops + self.layers.attention_flops * unmasked,
            logits=LOGIT_BYTES * target.vocab_size * drafts,
        )
        return one.with_weights(target.head_parameters, target.head_bytes, drafts)

    def _follow(self, columns: int) -> Pass:
        """Layers do not wait for each other here: keys and values are made of ``fc``'s states."""
        written = columns * self.kv_bytes_per_token
        one = Pass("follow", weights=0.0, kv=written, logits=0.0, flops=0.0, layers=1)
        one = one.with_weights(self.fc_parameters, self.layers.head_bytes, columns)
        return one.with_weights(self.kv_parameters, self.weight_bytes, columns)


def _of_eagle3(config: Mapping[str, Any]) -> Eagle3:
    _require(config, (*shapes.REQUIRED, "draft_vocab_size"), EAGLE3_NEEDS)
    target_size = config.get("target_hidden_size") or config["hidden_size"]
    if target_size != config["hidden_size"]:
        raise ValueError(
            f"The configuration's hidden_size is {config['hidden_size']} and its "
            f"target_hidden_size {target_size}. Only heads as wide as their target are planned for."
        )
    layers = shapes.dense(config, config["draft_vocab_size"], tied=True)
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    asked = config.get("num_aux_hidden_states") or (len(ids) if ids else EAGLE3_STATES)
    return Eagle3(layers, asked)


EAGLE3_NEEDS = (
    "An EAGLE-3 head's LM head has draft_vocab_size rows; where it covers every token of the "
    "target, write vocab_size there."
)
DFLASH_NEEDS = "A DFlash block's sizes are those of its own layers, not of the target's."


def _of_dflash(config: Mapping[str, Any]) -> DFlash:
    _require(config, shapes.REQUIRED, DFLASH_NEEDS)
    options = config.get("dflash_config") or {}
    beyond = [key for key in NOT_PLANNED if options.get(key) or config.get(key)]
    if beyond:
        raise ValueError(
            f"The configuration has {', '.join(beyond)}: more than one pass and the target's LM "
            "head. Planned for are blocks without."
        )
    layers = replace(shapes.dense(config, 0, tied=True), windows=_windows(config))
    ids = options.get("target_layer_ids") or config.get("target_layer_ids")
    size = options.get("block_size") or config.get("block_size") or BLOCK_SIZE
    return DFlash(layers, len(ids) if ids else layers.num_layers, size)


def _windows(config: Mapping[str, Any]) -> Windows | None:
    count = (config.get("layer_types") or []).count("sliding_attention")
    if not count:
        return None
    shapes.require_numbers(config, ["sliding_window"])
    return Windows(count, config["sliding_window"])


def _require(config: Mapping[str, Any], keys: Iterable[str], explained: str) -> None:
    try:
        shapes.require_numbers(config, keys)
    except ValueError as error:
        raise ValueError(f"{error} {explained}") from None


#: How a head is made of a configuration, by its architecture.
ARCHITECTURES = {EAGLE3: _of_eagle3, DFLASH: _of_dflash}


def _layers(count: int, mlp: int, vocab_size: int) -> ModelShape:
    return ModelShape(count, 4096, mlp, 32, 8, 128, vocab_size, tied_embeddings=True)


#: As published for Llama 3.1 8B and for Qwen3 8B; both fit any target of their hidden size.
BUILT_IN: dict[str, Head] = {
    "eagle3-8b": Eagle3(_layers(1, 14336, 32000), EAGLE3_STATES),
    "dflash-8b": DFlash(_layers(5, 12288, 0), 5),
}


def in_precision(head: Head, weight_bytes: float | None) -> Head:
    """The head with weights of so many bytes, or with its own at None."""
    return replace(head, layers=shapes.in_precision(head.layers, weight_bytes))
