"""Parts of block heads beside their layers: random ones in checkpoints, and what they compute.

By the classes of `speculators` and of torch, in float64.
"""

from pathlib import Path
from typing import Any

import torch
from published_drafts import read
from torch import nn

from sglang_smc.drafts.reading import expected

Checkpoint = tuple[dict[str, Any], dict[str, torch.Tensor]]


def with_layer(config: dict[str, Any], weights: dict[str, torch.Tensor], markov: str) -> Checkpoint:
    """The Markov head gets the layer that it has where it is ``gated``, or an ``rnn``."""
    width = config["hidden_size"]
    rank = config["markov_rank"]
    layers = {"gated": ("gate_proj", rank, rank), "rnn": ("joint_proj", 3 * rank, 2 * rank)}
    name, rows, inputs = layers[markov]
    draw = torch.Generator().manual_seed(7)
    own = {"weight": torch.randn(rows, width + inputs, generator=draw) / 4}
    own["bias"] = torch.randn(rows, generator=draw)
    weights |= {f"markov_head.{name}.{part}": tensor for part, tensor in own.items()}
    return config | {"markov_head_type": markov}, weights


def markov_head(folder: Path) -> Any:
    """A checkpoint's Markov head by the class of `speculators`, in float64."""
    from speculators.models.dspark.model_definitions import MarkovHead

    config, weights = read(folder)
    part = "transformer_layer_config"
    prefix = "markov_head."
    own = {name.removeprefix(prefix): w for name, w in weights.items() if prefix in name}
    made = MarkovHead(
        verifier_vocab_size=len(own["markov_w1.weight"]),
        draft_vocab_size=len(own["markov_w2.weight"]),
        markov_rank=config["markov_rank"],
        hidden_size=config.get(part, config)["hidden_size"],
        head_type=config["markov_head_type"],
    )
    made.load_state_dict(own)
    return made.double().eval()


SIZES2 = {"num_layers": 2, "block_size": 4}
SELECTOR = {"selector_rank": 6, "selector_top_k": 12, "conv_kernel_size": 3, "conv_group_size": 8}
WINDOW = 9  # of the first layer, a row's own position among them


def with_selector(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """A DFlash head gets what DFlash2 has beside: convolutions, a selector, and a window."""
    width = config["hidden_size"]
    vocab_size = config["vocab_size"]
    taps = SELECTOR["conv_kernel_size"]
    rank = SELECTOR["selector_rank"]
    rows = 2 * taps * width // SELECTOR["conv_group_size"]
    draw = torch.Generator().manual_seed(8)
    part = "candidate_selector."
    shapes: dict[str, tuple[int, ...]] = {f"{part}hidden_projection.weight": (rank, width)}
    shapes |= {
        f"{part}{side}_codebook": (vocab_size, rank) for side in ("predecessor", "successor")
    }
    for layer in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{name}.base_kernel"] = (2, taps, width)
            shapes[f"layers.{layer}.{name}.kernel_projection.weight"] = (rows, width)
    weights |= {name: torch.randn(shape, generator=draw) / 2 for name, shape in shapes.items()}
    more = {"output_multiplier": 1.5, "final_logit_softcapping": 20.0}
    windows = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "is_causal": False,
    }
    named = {"architectures": ["DFlash2DraftModel"], **windows}
    return config | named | {"dflash_config": config["dflash_config"] | SELECTOR | more}, weights


def trained_mask(folder: Path) -> dict[str, Any]:
    config, _ = read(folder)
    embedding = torch.randn(config["hidden_size"], generator=torch.Generator().manual_seed(9))
    return {"embedding": embedding, "mask_token_id": config["dflash_config"]["mask_token_id"]}


class Convolved(nn.Module):
    """A layer of a block with convolutions around attention and MLP, and a window, if any."""

    def __init__(self, layer: Any, own: dict[str, torch.Tensor], window: int | None) -> None:
        from speculators.models.dflash2.model_definitions import GroupedDynamicCausalConv

        super().__init__()
        self.layer = layer
        self.self_attn = layer.self_attn
        self.window = window
        sizes = {
            "block_size": SIZES2["block_size"],
            "kernel_size": SELECTOR["conv_kernel_size"],
            "group_size": SELECTOR["conv_group_size"],
        }
        self.attention_conv, self.mlp_conv = (
            GroupedDynamicCausalConv(layer.hidden_size, **sizes) for _ in range(2)
        )
        self.load_state_dict(own, strict=False)

    def forward(self, hidden: torch.Tensor, seen: torch.Tensor, **given: Any) -> torch.Tensor:
        if self.window is not None:
            seen = self.windowed(seen)
        layer = self.layer
        rows, kernel = self.attention_conv.prepare(layer.input_layernorm(hidden))
        rows = layer.self_attn(rows, attention_mask=seen, **given)[0]
        hidden = hidden + self.attention_conv.finish(rows, kernel)
        rows, kernel = self.mlp_conv.prepare(layer.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.finish(layer.mlp(rows), kernel)

    def windowed(self, seen: torch.Tensor) -> torch.Tensor:
        """Of what rows attend to, ``[B, 1, S, L + S]`` of a text and a block behind its anchor."""
        text, block = seen.split([seen.shape[3] - seen.shape[2], seen.shape[2]], 3)
        place = text.sum(3, keepdim=True) + torch.arange(seen.shape[2]).unsqueeze(1)
        is_near = torch.arange(text.shape[3]) > place - self.window
        return torch.cat([text & is_near, block], 3)


class Selecting:
    """What a DFlash2 checkpoint adds to its DFlash ``head``, whose layers are convolved then."""

    def __init__(self, head: Any, folder: Path) -> None:
        from speculators.models.dflash2.model_definitions import CandidateSelector

        config, weights = read(folder)
        for number, layer in enumerate(head.layers):
            part = f"layers.{number}."
            own = {name.removeprefix(part): w for name, w in weights.items() if part in name}
            is_near = config["layer_types"][number] == "sliding_attention"
            head.layers[number] = Convolved(layer, own, WINDOW if is_near else None).double()
        self.selector = CandidateSelector(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            rank=SELECTOR["selector_rank"],
            top_k=SELECTOR["selector_top_k"],
        )
        part = "candidate_selector."
        self.selector.load_state_dict(
            {name.removeprefix(part): w for name, w in weights.items() if part in name}
        )
        self.selector.double()
        block = config["dflash_config"]
        self.factor = block.get("output_multiplier", 1.0)
        self.cap = block.get("final_logit_softcapping", torch.inf)
        self.mask = trained_mask(folder)["embedding"].double()

    def laws(
        self, logits: torch.Tensor, states: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """``[R, K, V]`` of tokens behind those ``before`` them ``[R, K]``."""
        unary = self.factor * logits
        if self.cap < torch.inf:
            unary = self.cap * torch.tanh(unary / self.cap)
        ids, scores = self.selector.select(unary, states, before)
        return torch.zeros_like(logits).scatter(2, ids, scores.softmax(-1))


def with_gru(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """A DFlash head gets what Domino has beside; its labels are shifted by one."""
    width = config["hidden_size"]
    rows = config["vocab_size"]
    state = 10
    middle = 14
    draw = torch.Generator().manual_seed(10)
    shapes = {
        "prefix_gru.weight_ih_l0": (3 * state, width),
        "prefix_gru.weight_hh_l0": (3 * state, state),
        "embed_proj.0.weight": (middle, width + state),
        "embed_proj.2.weight": (rows, middle),
    }
    weights |= {name: torch.randn(shape, generator=draw) / 2 for name, shape in shapes.items()}
    sizes = {"gru_hidden_dim": state, "emb_dim": middle, "pure_draft_prefix_len": 1}
    own = {"projector_type": "domino", "shift_label": True, **sizes}
    return config | {"dflash_config": config["dflash_config"] | own}, weights


class Correcting:
    """What a Domino checkpoint adds to its block's logits, by a whole GRU over each beginning."""

    def __init__(self, model: Any, folder: Path) -> None:
        _, weights = read(folder)
        self.embed = model.get_input_embeddings()
        rows, width = weights["prefix_gru.weight_ih_l0"].shape
        middle = "embed_proj.2.weight"
        self.gru = nn.GRU(width, rows // 3, bias=False, batch_first=True).double()
        part = "prefix_gru."
        self.gru.load_state_dict(
            {name.removeprefix(part): w for name, w in weights.items() if part in name}
        )
        self.into = weights["embed_proj.0.weight"].double()
        self.out_of = weights[middle].double()

    def laws(
        self, logits: torch.Tensor, states: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """``[R, K, V]`` of tokens behind those ``before`` them ``[R, K]``, of a block of K + 1."""
        found = [logits[:, 0]]
        for step in range(1, before.shape[1]):
            _, carried = self.gru(self.embed(before[:, : step + 1]))
            both = torch.cat([states[:, step], carried[0]], 1)
            added = nn.functional.silu(both @ self.into.T) @ self.out_of.T
            found.append(logits[:, step] + added)
        return torch.stack(found, 1).softmax(-1)


LATTICE = {"candidate_topk": 8, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
LATTICE |= {"mlp_ratio": 1.5, "factor_dim": 6, "vector_eps": 1e-6, "logit_scale": 15.0}


def with_lattice(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Checkpoint:
    """A DFlash head gets what LiLiCorr has beside: a transformer over candidates."""
    own = {f"lilicorr_{name}": value for name, value in LATTICE.items()}
    told = config | {"architectures": ["LiLiCorrDraftModel"]}
    told["dflash_config"] = config["dflash_config"] | own
    draw = torch.Generator().manual_seed(11)
    for name, shape in (expected(told) or {}).items():
        if name.startswith("lilicorr."):
            weights[name] = torch.randn(shape, generator=draw) / 2
    return told, weights


class Walking:
    """What a LiLiCorr checkpoint makes of its block's logits, by torch's own layers."""

    def __init__(self, model: Any, head: Any, folder: Path) -> None:
        config, weights = read(folder)
        self.embed = model.get_input_embeddings()
        self.head = head
        self.eps = config["rms_norm_eps"]
        self.rows = config["block_size"] - 1
        part = "lilicorr."
        self.own = {n.removeprefix(part): w.double() for n, w in weights.items() if part in n}
        self.layers = []
        for number in range(LATTICE["num_layers"]):
            part = f"layers.{number}.attn."
            attend = nn.MultiheadAttention(LATTICE["hidden_size"], 2, batch_first=True).double()
            own = {n.removeprefix(part): w for n, w in self.own.items() if part in n}
            attend.load_state_dict(own)
            self.layers.append(attend)

    def linear(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(values, self.own[f"{name}.weight"], self.own[f"{name}.bias"])

    def mlp(self, name: str, values: torch.Tensor) -> torch.Tensor:
        up = nn.functional.silu(self.linear(f"{name}.up_proj", values))
        return self.linear(f"{name}.down_proj", up)

    def norm(self, name: str, values: torch.Tensor) -> torch.Tensor:
        weight = self.own[f"{name}.weight"]
        return nn.functional.rms_norm(values, weight.shape, weight, self.eps)

    def unit(self, name: str, values: torch.Tensor) -> torch.Tensor:
        found = self.linear(name, values)
        return found / found.norm(dim=-1, keepdim=True)

    def lattice(
        self, log_probs: torch.Tensor, ids: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """The last layer's outputs ``[R, K, c, h]`` for candidates."""
        size = ids.shape[0]
        count = ids.shape[2]
        rank = torch.arange(count, dtype=torch.float64).expand_as(log_probs)
        gap = log_probs - log_probs.amax(2, keepdim=True)
        shown = torch.stack([log_probs, log_probs.exp(), gap, rank / (count - 1), rank == 0], 3)
        normed = nn.functional.layer_norm(
            shown, (5,), self.own["feature_norm.weight"], self.own["feature_norm.bias"]
        )
        hidden = self.linear("token_proj", self.embed(ids)) + self.mlp("feature_mlp", normed)
        hidden = hidden + self.linear("pass_hidden_proj", states).unsqueeze(2)
        hidden = hidden + self.own["slot_embedding"][0] + self.own["rank_embedding"][0]
        hidden = hidden.flatten(1, 2)
        heads = []
        for head in range(LATTICE["num_heads"]):
            lines = [
                [
                    self.own["relative_slot_bias"][head, i - j + self.rows]
                    + (i == j) * self.own["same_slot_bias"][head]
                    for j in range(self.rows)
                ]
                for i in range(self.rows)
            ]
            rows = torch.tensor(lines, dtype=torch.float64)
            heads.append(rows.repeat_interleave(count, 0).repeat_interleave(count, 1))
        bias = torch.stack(heads).repeat(size, 1, 1)  # [R * heads, K * c, K * c]
        for number, attend in enumerate(self.layers):
            read = self.norm(f"layers.{number}.attn_norm", hidden)
            hidden = hidden + attend(read, read, read, attn_mask=bias, need_weights=False)[0]
            read = self.norm(f"layers.{number}.mlp_norm", hidden)
            hidden = hidden + self.mlp(f"layers.{number}.mlp", read)
        return self.norm("output_norm", hidden).unflatten(1, ids.shape[1:])

    def laws(
        self,
        logits: torch.Tensor,
        states: torch.Tensor,
        before: torch.Tensor,
        features: torch.Tensor,
    ) -> torch.Tensor:
        """``[R, K, V]`` of tokens behind those ``before`` them ``[R, K]``.

        ``features`` ``[R, F]`` are the target's before the block.
        """
        whole = logits.log_softmax(2)
        log_probs, ids = whole.topk(LATTICE["candidate_topk"])
        hidden = self.lattice(log_probs, ids, states)
        text = self.head.hidden_norm(self.head.fc(features))
        text = self.norm("anchor_norm", self.linear("context_proj", text))
        shown = text[:, None, None].expand_as(hidden)
        both = torch.cat([hidden, shown, hidden * shown], 3)
        factors = nn.functional.silu(self.linear("factor_input_proj", both))
        into = self.unit("in_head", factors)
        out_of = self.unit("out_head", factors)
        earlier = [self.unit("anchor_out_head", text)]
        for step in range(1, ids.shape[1]):
            place = (ids[:, step - 1] == before[:, step, None]).long().argmax(1)
            earlier.append(out_of[torch.arange(len(ids)), step - 1, place])
        scores = torch.einsum("rkcd,rkd->rkc", into, torch.stack(earlier, 1))
        probs = (LATTICE["logit_scale"] * scores).softmax(2)
        return torch.zeros_like(logits).scatter(2, ids, probs)
