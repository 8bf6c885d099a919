"""Describe the drafts, and compute the bytes that passes of models move, and their operations.

A pass reads its weights once (of experts those that its tokens visit), reads and writes KV, and
writes and reads its logits; it takes as long as the slower of its traffic and its arithmetic.

A draft is a language model, an EAGLE-3 head, a DFlash block, or n-gram matches. A head drafts from
the target's hidden states, and its embedding is the target's. Its own KV covers the target's
columns: once these are known it is computed from their hidden states, in a pass named ``follow``.
The hidden states themselves, like all activations, are left out of the bytes. N-gram matches need
no pass, weights or KV; the host's lookup takes microseconds, which are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sglang_smc.tools.plan import shapes
from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.shapes import Config, ModelShape, Source

MODEL, EAGLE3, DFLASH, NGRAM = KINDS = ("model", "eagle3", "dflash", "ngram")
BESIDE = "ngram+"
DEFAULT_STEPS = (4, 8, 16)
#: SGLang's defaults where a configuration sets none: layers of the target that an EAGLE-3 head
#: reads, and columns of a DFlash block, the last token's among them.
EAGLE3_STATES = 3
BLOCK_SIZE = 16
#: Features of newer blocks; each adds a step after the pass; its cost is not modelled.
NOT_PLANNED = ("projector_type", "conv_kernel_size", "selector_rank", "selector_top_k")
NO_LAYERS = ModelShape(0, 0, 0, 0, 0, 0, 0, tied_embeddings=True)


#: Logits are written in float32 and read once, to draw from and score them.
LOGIT_BYTES = 2 * 4


class Pass(NamedTuple):
    """A forward pass: its bytes by kind, and its operations."""

    name: str  # decode, draft, verify, or follow: a head's pass over the target's columns
    weights: float
    kv: float
    logits: float
    flops: float
    layers: int  # run sequentially

    def with_weights(self, parameters: int, num_bytes: float, rows: int) -> Pass:
        """Return the pass with a further matrix of ``num_bytes`` a weight, for ``rows`` rows."""
        return self._replace(
            weights=self.weights + parameters * num_bytes,
            flops=self.flops + 2 * parameters * rows,
        )

    @property
    def bytes(self) -> float:
        return self.weights + self.kv + self.logits

    def seconds(self, device: Device) -> float:
        return max(self.bytes / device.bandwidth, self.flops / device.flops)

    def bound(self, device: Device) -> str:
        """Return the limit of the work: ``memory`` or ``compute``."""
        memory = self.bytes / device.bandwidth >= self.flops / device.flops
        return "memory" if memory else "compute"


class Round(NamedTuple):
    """Passes that run sequentially."""

    passes: tuple[Pass, ...]

    @property
    def bytes(self) -> float:
        return sum(one.bytes for one in self.passes)

    @property
    def flops(self) -> float:
        return sum(one.flops for one in self.passes)

    @property
    def layers(self) -> int:
        """Return the sequential layers; each adds kernel launches, which no bound counts."""
        return sum(one.layers for one in self.passes)

    @property
    def traffic(self) -> dict[str, float]:
        """Return the bytes by kind: ``weights``, ``kv`` and ``logits``."""
        kinds = ("weights", "kv", "logits")
        return {kind: sum(getattr(one, kind) for one in self.passes) for kind in kinds}

    def seconds(self, device: Device) -> float:
        return sum(self.seconds_by_pass(device).values())

    def seconds_by_pass(self, device: Device) -> dict[str, float]:
        """Return the seconds of all passes of a name, e.g. ``draft`` and ``verify``."""
        found: dict[str, float] = {}
        for one in self.passes:
            found[one.name] = found.get(one.name, 0.0) + one.seconds(device)
        return found

    def bound(self, device: Device) -> str:
        """Return ``memory`` or ``compute``, or, if passes differ, the limit of each by name."""
        limits: dict[str, dict[str, None]] = {}  # in order, without repetition
        for one in self.passes:
            limits.setdefault(one.name, {})[one.bound(device)] = None
        found = {name: "/".join(of_name) for name, of_name in limits.items()}
        values = set(found.values())
        return values.pop() if len(values) == 1 else ", ".join(f"{n} {v}" for n, v in found.items())


class Rows(NamedTuple):
    """The sequences that one pass continues: ``batch`` requests of ``num_particles`` each.

    The particles of a request share ``context`` tokens, and each has a ``tail`` of its own, all in
    the KV cache already. A ``shared_prefix`` is read once per request, not once per particle.
    """

    batch: int
    num_particles: int
    context: float
    tail: float
    shared_prefix: bool

    @property
    def count(self) -> int:
        return self.batch * self.num_particles


def forward(name: str, shape: ModelShape, rows: Rows, num_tokens: int, num_logits: int) -> Pass:
    """Return a pass over ``num_tokens`` new tokens per row, with logits of the last ``num_logits``.

    Without logits the LM head is not read.
    """
    logits = rows.count * num_logits
    # Each new token attends to all tokens before it, and to itself.
    seen = shape.seen(rows.context)
    keys = num_tokens * (seen + rows.tail) + num_tokens * (num_tokens + 1) / 2
    flops = (
        2 * shape.active_parameters * rows.count * num_tokens
        + shape.attention_flops * rows.count * keys
        + 2 * shape.head_parameters * logits
    )
    states = 0.0
    if shape.states is not None:  # advanced over the kept last columns, then the new
        turns = 1 if num_tokens == 1 else 2
        states = 2 * turns * rows.count * shape.states.bytes
        flops += turns * rows.count * num_tokens * shape.states.flops
    prefixes = rows.batch if rows.shared_prefix else rows.count
    tokens = prefixes * seen + rows.count * (rows.tail + num_tokens)
    return Pass(
        name,
        weights=shape.bytes_read(rows.count * num_tokens, with_head=num_logits > 0),
        kv=tokens * shape.kv_bytes_per_token + states,
        logits=LOGIT_BYTES * shape.vocab_size * logits,
        flops=flops,
        layers=shape.num_layers,
    )


# --- Drafts


@dataclass(frozen=True)
class Draft:
    """A draft. Weights of a head's ``fc`` are in 16 bits, as those of an LM head."""

    kind: str  # one of `KINDS`
    layers: ModelShape = NO_LAYERS  # of n-gram matches: the draft model beside them, if any
    num_states: int = 0  # layers of the target whose concatenated hidden states ``fc`` reads
    max_steps: int | None = None  # the largest K; None for any

    @property
    def is_head(self) -> bool:
        return self.kind in (EAGLE3, DFLASH)

    @property
    def default_steps(self) -> tuple[int, ...]:
        """Return the candidates for K that are within a head's block."""
        most = self.max_steps
        within = tuple(steps for steps in DEFAULT_STEPS if most is None or steps <= most)
        return within or (most or 1,)

    @property
    def weight_bytes(self) -> float | None:
        """Return the bytes per weight; None without a model."""
        return self.layers.weight_bytes if self.layers.num_layers else None

    @property
    def fc_parameters(self) -> int:
        """Return the weights of ``fc``, from the target's hidden states to one of the head's."""
        return self.num_states * self.layers.hidden_size**2

    @property
    def entry_parameters(self) -> int:
        """Return the weights that the first layer has beyond the others.

        EAGLE-3 computes queries, keys and values from an embedding and a hidden state.
        """
        one = self.layers
        projected = one.head_dim * (one.num_heads + 2 * one.num_kv_heads)
        return one.hidden_size * projected if self.kind == EAGLE3 else 0

    @property
    def num_parameters(self) -> int:
        """Return the checkpoint's weights: layers, ``fc``, and the LM head if it has its own."""
        return self.layers.num_parameters + self.entry_parameters + self.fc_parameters

    @property
    def streamed_bytes(self) -> float:
        """Return the bytes of the draft's own weights that a drafting pass reads."""
        return self.layers.streamed_bytes + self.entry_parameters * self.layers.weight_bytes

    @property
    def resident_bytes(self) -> float:
        """Return the bytes of weights in the device's memory beside the target's."""
        more = self.entry_parameters * self.layers.weight_bytes
        return self.layers.resident_bytes + more + self.fc_parameters * self.layers.head_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return self.layers.kv_bytes_per_token

    def state_bytes(self, num_particles: int, num_steps: int) -> float:
        """Return the bytes of the target's hidden states that a request's round keeps.

        They are kept from the target's pass to the head's next.
        """
        columns = num_particles * (num_steps + 1)
        return columns * self.num_states * self.layers.hidden_size * self.layers.head_bytes

    def on_devices(self, count: int) -> Draft:
        """Return the draft on ``count`` devices that split every pass."""
        return replace(self, layers=self.layers.on_devices(count))

    def require_fit(self, target: ModelShape, num_steps: int) -> None:
        """Raise ValueError unless a head has the target's hidden size and enough columns."""
        mine, theirs = self.layers.hidden_size, target.hidden_size
        if self.is_head and mine != theirs:
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

    def passes(self, target: ModelShape, rows: Rows, num_steps: int) -> tuple[list[Pass], ...]:
        """Return a round's passes before the target's, ``draft``, and those after it, ``follow``.

        Raises ValueError if the draft does not fit the target, or cannot draft K tokens.
        """
        self.require_fit(target, num_steps)
        if self.kind == EAGLE3:
            return self._of_eagle3(rows, num_steps)
        if self.kind == DFLASH:
            return self._of_dflash(target, rows, num_steps)
        return (self._of_model(rows, num_steps) if self.layers.num_layers else []), []

    def _of_model(self, rows: Rows, num_steps: int) -> list[Pass]:
        """Return one pass per step; the first reads two tokens.

        They are the last round's last draft token, not yet in the draft model's KV, and the bonus
        token.
        """
        found = []
        for num_tokens in (2, *[1] * (num_steps - 1)):
            found.append(forward("draft", self.layers, rows, num_tokens, 1))
            rows = rows._replace(tail=rows.tail + num_tokens)
        return found

    def _of_eagle3(self, rows: Rows, num_steps: int) -> tuple[list[Pass], list[Pass]]:
        """Return a pass over N rows for each of K drafts, and one over N (K + 1) target columns.

        The first draft reads ``fc``'s output for the last column, later ones the head's own
        states. The columns pass through the whole head except for the LM head, as in SGLang.
        """
        entry = self.entry_parameters, self.layers.weight_bytes
        found = []
        for step in range(num_steps):
            drafting = rows._replace(tail=rows.tail + step)
            one = forward("draft", self.layers, drafting, 1, 1)
            found.append(one.with_weights(*entry, rows.count))
        columns = rows.count * (num_steps + 1)
        follow = forward("follow", self.layers, rows, num_steps + 1, 0)
        follow = follow.with_weights(*entry, columns)
        fc = self.fc_parameters, self.layers.head_bytes
        return found, [follow.with_weights(*fc, columns)]

    def _of_dflash(
        self, target: ModelShape, rows: Rows, num_steps: int
    ) -> tuple[list[Pass], list[Pass]]:
        """Return a pass over the last token and K masks, and one over the target's columns.

        The first has N K rows of logits by the target's LM head; attention is bidirectional within
        the block. The layers of the second are independent and count as one.
        """
        drafts, columns = rows.count * num_steps, rows.count * (num_steps + 1)
        unmasked = drafts * (num_steps + 1) / 2
        draft = forward("draft", self.layers, rows, num_steps + 1, 0)
        draft = draft._replace(
            flops=draft.flops + self.layers.attention_flops * unmasked,
            logits=LOGIT_BYTES * target.vocab_size * drafts,
        ).with_weights(target.head_parameters, target.head_bytes, drafts)
        one = self.layers
        keys_and_values = 2 * one.num_layers * one.hidden_size * one.num_kv_heads * one.head_dim
        written = columns * self.kv_bytes_per_token
        follow = Pass("follow", weights=0.0, kv=written, logits=0.0, flops=0.0, layers=1)
        follow = follow.with_weights(self.fc_parameters, one.head_bytes, columns)
        return [draft], [follow.with_weights(keys_and_values, one.weight_bytes, columns)]


def _read_eagle3(config: Config) -> Draft:
    needs = (
        "An EAGLE-3 head's LM head has draft_vocab_size rows; where it covers every token of the "
        "target, write vocab_size there."
    )
    layers = _layers_of(config, "draft_vocab_size", needs)
    target_size = config.get("target_hidden_size") or layers.hidden_size
    if target_size != layers.hidden_size:
        raise ValueError(
            f"The configuration's hidden_size is {layers.hidden_size} and its target_hidden_size "
            f"{target_size}. Only heads as wide as their target are planned for."
        )
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    asked = config.get("num_aux_hidden_states") or (len(ids) if ids else EAGLE3_STATES)
    return Draft(EAGLE3, layers, asked)


def _read_dflash(config: Config) -> Draft:
    needs = "A DFlash block's sizes are those of its own layers, not of the target's."
    layers = _layers_of(config, None, needs)  # without an LM head
    options = {**config, **(config.get("dflash_config") or {})}
    beyond = [key for key in NOT_PLANNED if options.get(key)]
    if beyond:
        raise ValueError(
            f"The configuration has {', '.join(beyond)}: more than one pass and the target's LM "
            "head. Planned for are blocks without."
        )
    windowed = (config.get("layer_types") or []).count("sliding_attention")
    if windowed:
        (window,) = shapes.numbers_of(config, "sliding_window")
        layers = replace(layers, windowed_layers=windowed, window=window)
    ids = options.get("target_layer_ids")
    num_states = len(ids) if ids else layers.num_layers
    return Draft(DFLASH, layers, num_states, (options.get("block_size") or BLOCK_SIZE) - 1)


def _layers_of(config: Config, vocab_key: str | None, needs: str) -> ModelShape:
    try:
        return shapes.dense(config, vocab_key, tied=True)
    except ValueError as error:
        raise ValueError(f"{error} {needs}") from None


#: Parsers of head configurations, by architecture.
HEADS = {shapes.EAGLE3: _read_eagle3, shapes.DFLASH: _read_dflash}


def _layers(count: int, mlp: int, vocab_size: int) -> ModelShape:
    return ModelShape(count, 4096, mlp, 32, 8, 128, vocab_size, tied_embeddings=True)


#: As published for Llama 3.1 8B and for Qwen3 8B; both fit any target of their hidden size.
BUILT_IN: Mapping[str, Any] = {
    "eagle3-8b": Draft(EAGLE3, _layers(1, 14336, 32000), EAGLE3_STATES),
    "dflash-8b": Draft(DFLASH, _layers(5, 12288, 0), 5, BLOCK_SIZE - 1),
    **{name: Draft(MODEL, shape) for name, shape in shapes.BUILT_IN.items()},
    NGRAM: Draft(NGRAM),
}
#: Names that `from_config` resolves.
NAMES = (*shapes.BUILT_IN, *(name for name in BUILT_IN if name not in shapes.BUILT_IN))


def is_name(source: str) -> bool:
    """Return whether ``source`` names a draft without a path."""
    return source.lower().removeprefix(BESIDE) in BUILT_IN


def from_config(source: Source, weight_bytes: float | None = None) -> Draft:
    """Return the draft, with ``weight_bytes`` used like `shapes.from_config`.

    ``source`` is a ``config.json`` of a model or a head, its folder, its contents, one of `NAMES`,
    or ``ngram+`` followed by any of these that is a model.

    Raises ValueError for unsupported configurations.
    """
    if isinstance(source, str) and source.lower().startswith(BESIDE):
        draft = from_config(source[len(BESIDE) :], weight_bytes)
        if draft.kind != MODEL:
            raise ValueError(
                f"n-gram matches go alone ({NGRAM}) or beside a draft model "
                f"({BESIDE}llama-3.2-1b); given is {draft.kind}."
            )
        return replace(draft, kind=NGRAM)
    draft = shapes.built_in(source, BUILT_IN)
    if draft is None:
        config = shapes.contents(source, NAMES)
        parse = HEADS.get(shapes.architecture(config))
        draft = parse(config) if parse else Draft(MODEL, shapes.from_config(config))
    return replace(draft, layers=draft.layers.in_precision(weight_bytes))


def lowest_precision(target: ModelShape, *drafts: Draft) -> float:
    """Return the fewest bytes per weight of all models; its FLOP/s bound each of them."""
    found = (draft.weight_bytes for draft in drafts)
    return min([target.weight_bytes, *(one for one in found if one is not None)])
