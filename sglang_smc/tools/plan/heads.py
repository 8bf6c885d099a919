"""Describe heads that draft from the target's hidden states: sizes, and the passes of a round.

Their embedding is the target's; looked-up rows do not count. A head's own KV covers the target's
columns: once these are known it is computed from the target's hidden states, in a pass named
``follow``. The hidden states themselves, like all activations, are left out of the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sglang_smc.tools.plan import shapes
from sglang_smc.tools.plan.blocks import Windows
from sglang_smc.tools.plan.passes import LOGIT_BYTES, Pass, Rows, forward
from sglang_smc.tools.plan.shapes import DFLASH, EAGLE3, ModelShape

#: SGLang's defaults where a configuration sets none: layers of the target that an EAGLE-3 head
#: reads, and columns of a DFlash block.
EAGLE3_STATES = 3
BLOCK_SIZE = 16
#: Features of newer blocks; each adds a step after the pass; its cost is not modelled.
NOT_PLANNED = ("projector_type", "conv_kernel_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class Head(ABC):
    """A head that drafts. Weights of ``fc`` are in 16 bits, as those of an LM head."""

    kind: ClassVar[str]

    layers: ModelShape
    num_states: int  # layers of the target; ``fc`` reads their concatenated hidden states

    @property
    def weight_bytes(self) -> float:
        return self.layers.weight_bytes

    @property
    def fc_parameters(self) -> int:
        """Return the weights of ``fc``, from the target's hidden states to one of the head's."""
        return self.num_states * self.layers.hidden_size**2

    @property
    def entry_parameters(self) -> int:
        """Return the weights that the first layer has beyond the others."""
        return 0

    @property
    def max_steps(self) -> int | None:
        """Return the largest K; None for any."""
        return None

    @abstractmethod
    def passes(self, target: ModelShape, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
        """Return the passes named ``draft``, before the target's, and ``follow``, after it."""

    @property
    def num_parameters(self) -> int:
        """Return the checkpoint's weights: layers, ``fc``, and the LM head if it has its own."""
        return self.layers.num_parameters + self.entry_parameters + self.fc_parameters

    @property
    def streamed_bytes(self) -> float:
        """Return the bytes of the head's own weights that a drafting pass reads."""
        return self.layers.streamed_bytes + self.entry_parameters * self.weight_bytes

    @property
    def resident_bytes(self) -> float:
        """Return the bytes of weights in the device's memory beside the target's."""
        return self.streamed_bytes + self.fc_parameters * self.layers.head_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return self.layers.kv_bytes_per_token

    def state_bytes(self, num_particles: int, num_steps: int) -> float:
        """Return the bytes of the target's hidden states that a request's round keeps."""
        columns = num_particles * (num_steps + 1)
        return columns * self.num_states * self.layers.hidden_size * self.layers.head_bytes

    def require_fit(self, target: ModelShape, num_steps: int) -> None:
        """Raise ValueError unless the head has the target's hidden size and enough columns."""
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
    """An EAGLE-3 head: one small model a step, with an LM head of its own vocabulary.

    The first layer's queries, keys and values are computed from an embedding and a hidden state,
    concatenated.
    """

    kind: ClassVar = "eagle3"

    @property
    def entry_parameters(self) -> int:
        first = self.layers
        return first.hidden_size * first.head_dim * (first.num_heads + 2 * first.num_kv_heads)

    def passes(self, target: ModelShape, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
        """Return a pass over N rows for each of K drafts, and one over N (K + 1) target columns.

        The first draft reads ``fc``'s output for the last column, later ones the head's own
        states. The columns pass through the whole head except for the LM head, as in SGLang.
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
        """Return the largest K: the first column is the last token's."""
        return self.block_size - 1

    @property
    def kv_parameters(self) -> int:
        """Return the weights of the key and value projections of all layers."""
        one = self.layers
        return 2 * one.num_layers * one.hidden_size * one.num_kv_heads * one.head_dim

    def passes(self, target: ModelShape, rows: Rows, num_steps: int) -> tuple[Pass, ...]:
        """Return the drafting pass, with N K rows of logits, and the target columns' pass."""
        self.require_fit(target, num_steps)
        columns = rows.count * (num_steps + 1)
        return self._draft(target, rows, num_steps), self._follow(columns)

    def _draft(self, target: ModelShape, rows: Rows, num_steps: int) -> Pass:
        drafts = rows.count * num_steps
        one = forward("draft", self.layers, rows, num_steps + 1, 0)
        # Attention is bidirectional within the block.
        unmasked = rows.count * num_steps * (num_steps + 1) / 2
        one = one._replace(
            flops=one.flops + self.layers.attention_flops * unmasked,
            logits=LOGIT_BYTES * target.vocab_size * drafts,
        )
        return one.with_weights(target.head_parameters, target.head_bytes, drafts)

    def _follow(self, columns: int) -> Pass:
        """Return the target columns' pass; its layers are independent and count as one."""
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


#: Parsers of head configurations, by architecture.
ARCHITECTURES = {EAGLE3: _of_eagle3, DFLASH: _of_dflash}


def _layers(count: int, mlp: int, vocab_size: int) -> ModelShape:
    return ModelShape(count, 4096, mlp, 32, 8, 128, vocab_size, tied_embeddings=True)


#: As published for Llama 3.1 8B and for Qwen3 8B; both fit any target of their hidden size.
BUILT_IN: dict[str, Head] = {
    "eagle3-8b": Eagle3(_layers(1, 14336, 32000), EAGLE3_STATES),
    "dflash-8b": DFlash(_layers(5, 12288, 0), 5),
}


def in_precision(head: Head, weight_bytes: float | None) -> Head:
    """Return the head with weights of ``weight_bytes``, or with its own for None."""
    return replace(head, layers=shapes.in_precision(head.layers, weight_bytes))
