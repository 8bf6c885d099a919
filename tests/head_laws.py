"""What heads draft, by transformers and the heads of `sglang_smc.tools.distill`, in float64.

Those of MTP layers are by transformers' layers of the target's own family.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sglang_smc.tools.distill.checkpoints import load_head, new_head

EAGLE3, HOT, DFLASH = "eagle3", "eagle3 of hot tokens", "dflash"
KINDS = (EAGLE3, HOT, DFLASH)


def make_head(
    kind: str, target: str, folder: Path, *, scale: float = 1.0, seed: int = 3, num_steps: int = 3
) -> str:
    """An untrained head; of hot tokens it has three of four."""
    given: dict[str, Any] = {"dtype": torch.float32, "scale": scale, "seed": seed}
    if kind == DFLASH:
        made = new_head("dflash", target, folder, num_layers=2, block_size=num_steps + 1, **given)
    else:
        vocab_size = AutoModelForCausalLM.from_pretrained(target).config.vocab_size
        hot = [token for token in range(vocab_size) if token % 4 != 2]
        made = new_head("eagle3", target, folder, hot_tokens=hot if kind == HOT else None, **given)
    return str(made)


class Draft:
    """The law of a head's drafts.

    Args:
        kind: of `KINDS`.
        target, folder: of the checkpoints.
        num_steps: K, the tokens that a round drafts.
    """

    def __init__(self, kind: str, target: str, folder: str, num_steps: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
        self.head: Any = load_head(folder, target).double().eval()
        self.is_block, self.num_steps = kind == DFLASH, num_steps

    def probs(self, text: list[int], anchor: int) -> torch.Tensor:
        """Of the K tokens behind ``text[anchor]``, ``[K, V]``; see `laws`."""
        return self.laws(torch.tensor([text]), torch.tensor([anchor]))[0]

    @torch.no_grad()
    def laws(self, texts: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Of the K tokens behind ``anchors`` ``[R]`` of ``texts`` ``[R, L]``, ``[R, K, V]``.

        A chain's, given those in the text. The target has read what stands before the anchor.
        """
        states = self.model(texts, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in self.head.layer_ids], -1)
        embed, columns = self.model.get_input_embeddings(), anchors.unsqueeze(1)
        if self.is_block:
            mask = embed(torch.tensor(self.head.mask_token_id))
            filled = self.head(embed(texts.gather(1, columns)), mask, features, columns)
            return self.model.lm_head(filled)[:, 0].softmax(-1)
        logits = self.head(embed(texts), features, columns, self.num_steps)[:, 0]
        probs = logits.new_zeros(*logits.shape[:2], len(self.model.lm_head.weight))
        return probs.index_copy(2, self.head.hot, logits.softmax(-1))


def add_mtp_layer(target: str, *, seed: int = 4, scale: float = 0.3) -> None:
    """Add a random MTP layer to a checkpoint; one of Qwen2 is MiMo's then."""
    folder = Path(target)
    config = json.loads((folder / "config.json").read_text())
    weights, last = load_file(folder / "model.safetensors"), config["num_hidden_layers"] - 1
    is_mimo, width = config["model_type"] == "qwen2", config["hidden_size"]
    prefix = "model.mtp_layers.0." if is_mimo else f"model.layers.{last + 1}."
    draw = torch.Generator().manual_seed(seed)
    like = {name: value for name, value in weights.items() if f"layers.{last}." in name}
    shapes = {name.partition(f"layers.{last}.")[2]: value.shape for name, value in like.items()}
    names = MIMO if is_mimo else NEXTN
    shapes |= {f"{name}.weight": (width,) for name in names.values()}
    shapes[f"{names['join']}.weight"] = (width, 2 * width)
    for name, shape in shapes.items():
        noise = scale * torch.randn(shape, generator=draw)
        weights[prefix + name] = noise + 1 if "norm" in name else noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    more = {"architectures": ["MiMoForCausalLM"]} if is_mimo else {}
    text = json.dumps(config | more | {"num_nextn_predict_layers": 1})
    (folder / "config.json").write_text(text)


#: Names of what an MTP layer has beside a decoder layer.
NEXTN = {"token": "enorm", "state": "hnorm", "join": "eh_proj", "last": "shared_head.norm"}
MIMO = {
    "token": "token_layernorm",
    "state": "hidden_layernorm",
    "join": "input_proj",
    "last": "final_layernorm",
}


class MTPDraft:
    """The law of drafts by the MTP layer of a checkpoint; see `Draft`."""

    def __init__(self, target: str, num_steps: int) -> None:
        options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, **options).eval()
        self.num_steps, self.is_mimo = num_steps, self.model.config.model_type == "qwen2"
        weights = load_file(Path(target, "model.safetensors"))
        count = self.model.config.num_hidden_layers
        prefix = "model.mtp_layers.0." if self.is_mimo else f"model.layers.{count}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if prefix in n}
        names = MIMO if self.is_mimo else NEXTN
        self.own = {part: own[f"{name}.weight"].double() for part, name in names.items()}
        if self.is_mimo:
            self.layer = type(self.model.model.layers[0])(self.model.config, 0).double()
            self.layer.load_state_dict(own, strict=False)
        else:  # as one layer more of the model
            longer = {**options, "num_hidden_layers": count + 1}
            if hasattr(self.model.config, "mlp_layer_types"):
                longer["mlp_layer_types"] = [*self.model.config.mlp_layer_types, "sparse"]
            whole: Any = AutoModelForCausalLM.from_pretrained(target, **longer).eval()
            self.layer = whole.model.layers[count]

    def _norm(self, part: str, values: torch.Tensor) -> torch.Tensor:
        squares = values.square().mean(-1, keepdim=True)
        return values * (squares + self.model.config.rms_norm_eps).rsqrt() * self.own[part]

    def _pairs(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Of tokens ``[R, L]`` and the states before them ``[R, L, H]``."""
        embedded = self.model.get_input_embeddings()(tokens)
        if self.is_mimo:  # of the pair at position 0
            embedded[:, 0] = 0.0
        parts = self._norm("token", embedded), self._norm("state", states)
        return torch.cat(parts[::-1] if self.is_mimo else parts, -1) @ self.own["join"].T

    @torch.no_grad()
    def laws(self, texts: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """As `Draft.laws`; the pair of x_{i + 1} and the state at i has position i."""
        states, row = self.model.model(texts).last_hidden_state, torch.arange(len(texts))
        before, found = states[:, :-1].clone(), []
        length = before.shape[1]
        places = torch.arange(length).unsqueeze(0)
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        for step in range(self.num_steps):
            pairs = self._pairs(texts[:, 1:], before)
            rotary = self.model.model.rotary_emb(pairs, places)
            given = {"position_embeddings": rotary, "attention_mask": mask}
            output = self.layer(pairs, **given)
            state = self._norm("last", output[row, anchors - 1 + step])  # [R, H]
            found.append(self.model.lm_head(state).softmax(-1))
            if step + 1 < self.num_steps:
                before[row, anchors + step] = state
        return torch.stack(found, 1)
