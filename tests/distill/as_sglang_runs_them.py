"""Loads heads into SGLang's own classes, and compares what they say with what training saw.

    python as_sglang_runs_them.py TARGET EAGLE3 EAGLE3_OF_SOME_TOKENS DFLASH

A process of its own, since it makes SGLang's process-wide state. Of SGLang the attention alone is
replaced, which asks for a server's KV pool: by torch's, over keys and values that are kept here.
Prints JSON by folder: the largest difference of states or logits, and what was not loaded.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from sglang_smc.tools.distill.checkpoints import DFLASH, load_head, read_settings
from sglang_smc.tools.distill.teacher import Lesson, Teacher, Text, collate, load_model
from sglang_smc.upstream import IS_NEWER

ANCHOR, DEPTH = 12, 4
IDS = [2 + (7 * i) % 20 for i in range(ANCHOR + DEPTH + 2)]
Found = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """In place of `RadixAttention`: all columns that were given, or with those of a block."""

    def __init__(self, replaced: Any, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = replaced.tp_q_head_num, replaced.tp_k_head_num
        self.size, self.causal = replaced.qk_head_dim, causal
        self.kept = [torch.zeros(self.kv_heads, 0, self.size) for _ in "kv"]

    def by_head(self, flat: torch.Tensor, heads: int) -> torch.Tensor:
        return flat.view(-1, heads, self.size).transpose(0, 1)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        new = [self.by_head(part, self.kv_heads) for part in (k, v)]
        keys, values = (torch.cat(both, 1) for both in zip(self.kept, new, strict=True))
        queries, before = self.by_head(q, self.heads), self.kept[0].shape[1]
        if self.causal:
            self.kept = [keys, values]
        seen = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool)
        seen = seen.tril(before) if self.causal else seen
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        return found.transpose(0, 1).flatten(1)


def begin(target: str, head: str) -> None:
    """What a scheduler of one rank does before it loads a model."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=target,
        device="cpu",
        dtype="float32",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=head,
    )
    if IS_NEWER:
        from sglang.srt.runtime_context import SpawnRanks, publish

        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"file://{tempfile.mkdtemp()}/rendezvous",
    )
    parallel_state.initialize_model_parallel()


def loaded(folder: str) -> tuple[Any, list[str]]:
    """SGLang's model with the folder's weights, and the parameters that got none."""
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    config = AutoConfig.from_pretrained(folder)
    kind = DFlashDraftModel if config.architectures == [DFLASH] else LlamaForCausalLMEagle3
    model = kind(config)
    for weight in model.parameters():
        weight.data.fill_(float("nan"))
    model.load_weights(load_file(Path(folder) / "model.safetensors").items())
    # SGLang pads a vocabulary; what is behind it is never read.
    bare = [name for name, weight in model.named_parameters() if bool(weight[:1].isnan().any())]
    return model, bare


def eagle3(folder: str, target: str, teacher: Teacher, lesson: Lesson) -> tuple[Found, list[str]]:
    """Logits of `DEPTH` columns: ours, and SGLang's, a pass over the text and one for each more."""
    model, bare = loaded(folder)
    head, embedded = load_head(folder, target), teacher.embed(lesson.batch.ids)
    ours = head(embedded, lesson.features, torch.tensor([[ANCHOR]]), DEPTH)[0, 0]
    hot = model.get_hot_token_id()
    assert head.hot.tolist() == (list(range(24)) if hot is None else hot.tolist())
    model.set_embed(teacher.model.get_input_embeddings().weight)
    layer = model.model.layers[0].self_attn
    layer.attn = Attention(layer.attn, causal=True)
    ids, states = lesson.batch.ids[0], lesson.features[0, :ANCHOR]
    pieces = [(1, ANCHOR + 1), *((ANCHOR + step, ANCHOR + step + 1) for step in range(1, DEPTH))]
    theirs = []
    for first, end in pieces:
        batch = SimpleNamespace(
            spec_info=SimpleNamespace(hidden_states=states),
            mm_input_embeds=None,
            forward_mode=SimpleNamespace(is_extend=lambda: False),
        )
        normed, (own,) = model.model(ids[first:end], torch.arange(first - 1, end - 1), batch)
        theirs.append(model.lm_head.weight[: len(head.hot)] @ normed[-1])
        states = own[-1:]
    return (ours, torch.stack(theirs)), bare


def dflash(folder: str, target: str, teacher: Teacher, lesson: Lesson) -> tuple[Found, list[str]]:
    """Normed states of a block's masks: ours, and SGLang's."""
    model, bare = loaded(folder)
    head, embedded = load_head(folder, target), teacher.embed(lesson.batch.ids)
    mask = teacher.embed(torch.tensor(head.mask_token_id))
    anchors = torch.tensor([[ANCHOR]])
    ours = head(embedded[:, [ANCHOR]], mask, lesson.features, anchors)[0, 0]
    context = model.project_target_hidden(lesson.features[0, :ANCHOR])
    for layer in model.layers:
        attention = layer.self_attn
        keys, values = attention.kv_proj_only(context)
        keys = attention.apply_k_rope(torch.arange(ANCHOR), attention.apply_k_norm(keys))
        ahead = Attention(attention.attn, causal=False)
        ahead.kept = [ahead.by_head(part, ahead.kv_heads) for part in (keys, values)]
        attention.attn = ahead
    block = torch.cat([embedded[0, [ANCHOR]], mask.expand(head.block_size - 1, -1)])
    places = torch.arange(ANCHOR, ANCHOR + head.block_size)
    theirs = model(None, places, SimpleNamespace(), input_embeds=block).hidden_states
    return (ours, theirs[1:]), bare


@torch.no_grad()
def main(target: str, *folders: str) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    begin(target, folders[0])
    teacher = Teacher(load_model(target, torch.float32, torch.device("cpu")), 1.0)
    batch = collate([Text(IDS, 2)], torch.device("cpu"))
    found = {}
    for folder in folders:
        is_block = read_settings(folder)["architectures"] == [DFLASH]
        lesson = teacher.teach(batch, (0, 2))
        run = dflash if is_block else eagle3
        (ours, theirs), bare = run(folder, target, teacher, lesson)
        found[folder] = {"difference": float((ours - theirs).abs().max()), "bare": bare}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
