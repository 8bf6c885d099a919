"""What heads draft, by transformers and the heads of `sglang_smc_tools.distill`, in float64.

Those of MTP layers are by transformers' layers of the target's own family.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from block_laws import (
    SIZES2,
    Correcting,
    Selecting,
    Walking,
    markov_head,
    trained_mask,
    with_gru,
    with_lattice,
    with_layer,
    with_selector,
)
from published_drafts import as_speculators, read, write
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_smc_tools.distill.checkpoints import load_head, new_head

EAGLE3 = "eagle3"
HOT = "eagle3 of hot tokens"
APART = "an MTP layer apart"
DFLASH = "dflash"
DSPARK = "dspark"
GATED = "dspark, gated"
PART = "dspark of hot tokens, with states"
DFLASH2 = "dflash2"
DOMINO = "domino"
LILICORR = "lilicorr"
BLOCKS = (DFLASH, DFLASH2, DOMINO, LILICORR, DSPARK, GATED, PART)
KINDS = (EAGLE3, HOT, APART, *BLOCKS)
DERIVED = (
    DFLASH2,
    DOMINO,
    LILICORR,
    GATED,
    PART,
)  # from a head that training knows, in `whole` beside
NARROW = (HOT, DFLASH2, LILICORR, PART)  # which give some tokens no mass
RANK = 8  # of Markov heads


def make_head(kind: str, target: str, folder: Path) -> str:
    """An untrained head for K = 3; those of hot tokens are as `speculators` saves them."""
    given: dict[str, Any] = {"dtype": torch.float32, "scale": 1.0, "seed": 3}
    if kind == DFLASH:
        made = new_head("dflash", target, folder, num_layers=2, block_size=4, **given)
    elif kind == DOMINO:
        whole = new_head("dflash", target, folder.with_name("whole"), **SIZES2, **given)
        config, weights = read(whole)
        write(whole, config | {"sample_from_anchor": True}, weights)  # as labels are shifted
        made = write(folder, *with_gru(config, weights))
    elif kind == DFLASH2:
        whole = new_head("dflash", target, folder.with_name("whole"), **SIZES2, **given)
        made = write(folder, *with_selector(*read(whole)))
        torch.save(trained_mask(folder), folder / "mask_embedding.pt")
    elif kind == LILICORR:
        whole = new_head("dflash", target, folder.with_name("whole"), **SIZES2, **given)
        made = write(folder, *with_lattice(*read(whole)))
    elif kind in (DSPARK, GATED):
        sizes = {"num_layers": 2, "block_size": 3, "markov_rank": RANK}
        place = folder if kind == DSPARK else folder.with_name("whole")
        made = new_head("dspark", target, place, **sizes, **given)
        if kind == GATED:
            made = write(folder, *with_layer(*read(made), "gated"))
    elif kind == APART:
        made = new_head("mtp", target, folder, **given)
    elif kind == EAGLE3:
        made = new_head("eagle3", target, folder, **given)
    else:
        vocab_size = AutoConfig.from_pretrained(target).vocab_size
        hot = torch.tensor([token for token in range(vocab_size) if token % 4 != 2])
        made = (of_hot if kind == HOT else of_part)(target, folder, hot, given)
    return str(made)


def of_hot(target: str, folder: Path, hot: torch.Tensor, given: dict[str, Any]) -> str:
    """An EAGLE-3 head, with an embedding that is the target's."""
    whole = folder.with_name("whole")
    config, weights = read(new_head("eagle3", target, whole, hot_tokens=hot.tolist(), **given))
    weights = {name.replace("midlayer.", "layers.0."): one for name, one in weights.items()}
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
    return write(folder, as_speculators(config), weights)


def of_part(target: str, folder: Path, hot: torch.Tensor, given: dict[str, Any]) -> str:
    """A DSpark head whose masks alone draft, with an LM head of its own, and states of chains."""
    sizes = {"num_layers": 2, "block_size": 4, "markov_rank": RANK}
    whole = new_head("dspark", target, folder.with_name("whole"), **sizes, **given)
    config, weights = read(whole)
    config["sample_from_anchor"] = False
    write(whole, config, weights)
    own = torch.randn(len(hot), config["hidden_size"], generator=torch.Generator().manual_seed(6))
    weights |= {"lm_head.weight": own / config["hidden_size"] ** 0.5}
    weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][hot]
    weights["d2t"] = hot - torch.arange(len(hot))
    config, weights = with_layer(config, weights, "rnn")
    return write(folder, as_speculators(config, draft_vocab_size=len(hot)), weights)


class Draft:
    """The law of a head's drafts.

    Args:
        kind: of `KINDS`.
        target, folder: of the checkpoints.
        num_steps: K, the tokens that a round drafts.
    """

    def __init__(self, kind: str, target: str, folder: str, num_steps: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
        whole = str(Path(folder).with_name("whole")) if kind in DERIVED else folder
        self.head: Any = load_head(whole, target).double().eval()
        self.kind = kind
        self.num_steps = num_steps
        self.own = read(Path(folder))[1] if kind == PART else {}
        self.markov = markov_head(Path(folder)) if kind in (GATED, PART) else None
        self.correcting = Correcting(self.model, Path(folder)) if kind == DOMINO else None
        self.selecting = Selecting(self.head, Path(folder)) if kind == DFLASH2 else None
        walks = kind == LILICORR
        self.walking = Walking(self.model, self.head, Path(folder)) if walks else None

    @torch.no_grad()
    def laws(self, texts: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Of the K tokens behind ``anchors`` ``[R]`` of ``texts`` ``[R, L]``, ``[R, K, V]``.

        A chain's, given those in the text. The target has read what stands before the anchor.
        """
        states = self.model(texts, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in self.head.layer_ids], -1)
        embed = self.model.get_input_embeddings()
        columns = anchors.unsqueeze(1)
        if self.kind in BLOCKS:
            mask = embed(torch.tensor(self.head.mask_token_id))
            if self.selecting is not None:
                mask = self.selecting.mask
            filled = self.head(embed(texts.gather(1, columns)), mask, features, columns)
            before = texts.gather(1, columns + torch.arange(self.num_steps))
            given = {"prev_token_ids": before, "hidden_states": filled[:, 0]}
            added = None if self.markov is None else self.markov.block_bias(**given)
            if self.kind == PART:
                hot = self.own["d2t"] + torch.arange(len(self.own["d2t"]))
                logits = filled[:, 0] @ self.own["lm_head.weight"].double().T + added
                probs = logits.new_zeros(*logits.shape[:2], len(embed.weight))
                return probs.index_copy(2, hot, logits.softmax(-1))
            logits = self.model.lm_head(filled)[:, 0]
            if self.selecting is not None:
                return self.selecting.laws(logits, filled[:, 0], before)
            if self.walking is not None:
                known = features[torch.arange(len(texts)), anchors - 1]
                return self.walking.laws(logits, filled[:, 0], before, known)
            if self.correcting is not None:
                return self.correcting.laws(logits, filled[:, 0], before)
            if self.kind == DSPARK:
                logits = logits + self.head.bias(before)
            elif added is not None:
                logits = logits + added
            return logits.softmax(-1)
        logits = self.head(embed(texts), features, columns, self.num_steps)[:, 0]
        if self.kind == APART:
            return self.model.lm_head(logits).softmax(-1)
        probs = logits.new_zeros(*logits.shape[:2], len(self.model.lm_head.weight))
        return probs.index_copy(2, self.head.hot, logits.softmax(-1))


class Layout(NamedTuple):
    """How a family's checkpoints hold an MTP layer, and how it joins a token and a state."""

    prefix: str  # of its weights, by the number of the target's layers
    inner: str  # behind that, of its decoder layer
    token: str
    state: str
    join: str
    last: str  # norm
    token_first: bool = True
    offset: float = 0.0  # of norms' weights

    def prefix_of(self, config: Any) -> str:
        return self.prefix.format(config.num_hidden_layers)


NEXTN = Layout("model.layers.{}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = Layout(
    "model.mtp_layers.0.",
    "",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    token_first=False,
)
QWEN = Layout(
    "mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", offset=1.0
)
LAYOUTS = {"qwen2": MIMO, "qwen3_5_text": QWEN, "qwen3_5_moe_text": QWEN}


def add_mtp_layer(target: str) -> None:
    """Add a random MTP layer to a checkpoint; one of Qwen2 is MiMo's then."""
    folder = Path(target)
    config = AutoConfig.from_pretrained(target)
    family = config.model_type
    width = config.hidden_size
    layout = LAYOUTS.get(family, NEXTN)
    last = f"layers.{config.num_hidden_layers - 1}."
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(4)
    like = {name: value for name, value in weights.items() if last in name}
    shapes = {layout.inner + name.partition(last)[2]: value.shape for name, value in like.items()}
    parts = layout.token, layout.state, layout.join, layout.last
    shapes |= {f"{name}.weight": (width,) for name in parts}
    shapes[f"{layout.join}.weight"] = (width, 2 * width)
    for name, shape in shapes.items():
        noise = 0.3 * torch.randn(shape, generator=draw)
        weights[layout.prefix_of(config) + name] = (
            noise + 1 - layout.offset if "norm" in name else noise
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    more = {"mtp_num_hidden_layers" if layout is QWEN else "num_nextn_predict_layers": 1}
    if layout is MIMO:
        more["architectures"] = ["MiMoForCausalLM"]
    (folder / "config.json").write_text(json.dumps(told | more))


OPTIONS: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}


def left_out(length: int, window: int | None, sink: int = 0) -> torch.Tensor:
    """Which keys each of so many queries does not attend to, ``[L, L]`` bool.

    Args:
        window: the keys that it does attend to, its own included; None for all before it.
        sink: first keys, at any distance.
    """
    key = torch.arange(length)
    behind = key.unsqueeze(1) - key
    return (behind < 0) | ((behind >= (window or length)) & (key >= sink))


class PairDraft:
    """The law of drafts over pairs of a token and the state before it; see `Draft`."""

    def __init__(self, target: str, num_steps: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, **OPTIONS).eval()
        self.num_steps = num_steps

    def states(self, texts: torch.Tensor) -> torch.Tensor:
        """What the target gives out at each token ``[R, L, H]``."""
        return self.model.model(texts).last_hidden_state

    def run(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Own states and logits of tokens ``[R, L]`` and the states before them ``[R, L, H]``."""
        raise NotImplementedError

    @torch.no_grad()
    def laws(self, texts: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """As `Draft.laws`; the pair of x_{i + 1} and the state at i has position i."""
        before = self.states(texts)[:, :-1].clone()
        found = []
        row = torch.arange(len(texts))
        for step in range(self.num_steps):
            own, logits = self.run(texts[:, 1:], before)
            found.append(logits[row, anchors - 1 + step].softmax(-1))
            if step + 1 < self.num_steps:
                before[row, anchors + step] = own[row, anchors - 1 + step]
        return torch.stack(found, 1)


class MTPDraft(PairDraft):
    """The law of drafts by the MTP layer of a checkpoint.

    Args:
        limit: of its attention, as `left_out` takes it.
    """

    def __init__(
        self, target: str, num_steps: int, limit: tuple[int | None, int] = (None, 0)
    ) -> None:
        super().__init__(target, num_steps)
        self.limit = limit
        self.config = self.model.config
        options = dict(OPTIONS)
        self.layout = layout = LAYOUTS.get(self.config.model_type, NEXTN)
        config = self.config
        count = self.config.num_hidden_layers
        weights = load_file(Path(target, "model.safetensors"))
        prefix = layout.prefix_of(config)
        parts = ("token", "state", "join", "last")
        names = {part: f"{prefix}{getattr(layout, part)}.weight" for part in parts}
        self.own = {part: weights[name].double() for part, name in names.items()}
        # The decoder layer, as one more of the model.
        longer: dict[str, Any] = {"num_hidden_layers": count + 1}
        for kinds in ("layer_types", "mlp_layer_types"):
            if getattr(config, kinds, None):
                longer[kinds] = [*getattr(config, kinds), getattr(config, kinds)[-1]]
        own = f"model.layers.{count}."
        renamed = {n.replace(prefix + layout.inner, own): w for n, w in weights.items()}
        options["config"] = AutoConfig.from_pretrained(target, **longer)
        whole: Any
        whole, loaded = type(self.model).from_pretrained(
            None, state_dict=renamed, output_loading_info=True, **options
        )
        assert not loaded["missing_keys"]
        self.layer = whole.eval().model.layers[count]

    def _norm(self, part: str, values: torch.Tensor) -> torch.Tensor:
        squares = values.square().mean(-1, keepdim=True)
        weight = self.own[part] + self.layout.offset
        return values * (squares + self.config.rms_norm_eps).rsqrt() * weight

    def _pairs(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Of tokens ``[R, L]`` and the states before them ``[R, L, H]``."""
        embedded = self.model.get_input_embeddings()(tokens)
        if not self.layout.token_first:  # MiMo, of the pair at position 0
            embedded[:, 0] = 0.0
        parts = self._norm("token", embedded), self._norm("state", states)
        parts = parts if self.layout.token_first else parts[::-1]
        return torch.cat(parts, -1) @ self.own["join"].T

    def run(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = self._pairs(tokens, before)
        length = tokens.shape[1]
        mask = torch.zeros(length, length, dtype=torch.float64)
        mask = mask.masked_fill(left_out(length, *self.limit), -torch.inf)[None, None]
        rotary = self.model.model.rotary_emb(pairs, torch.arange(length).unsqueeze(0))
        output = self.layer(pairs, position_embeddings=rotary, attention_mask=mask)
        state = self._norm("last", output)
        return state, self.model.lm_head(state)
