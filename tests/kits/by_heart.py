"""A model pair that has learned the answers to the kits' prompts by heart, and nothing else.

SGLang's kits ask for the capital of France to see that a server works, and so for a model that
knows it. Training this one takes seconds. What the kits test stays what it was: a wrong slot,
mask or weight gives another text.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kits.kit_prompts import FILLER, lessons

SPECIAL = ["<|pad|>", "<|user|>", "<|eos|>", "<|assistant|>"]
MARKUP = ["<think>", "</think>"]  # stays in the text, for parsers
EOS = 2  # one of those that the matched-stop kit takes for an end
# The logprob kit's prompts are the ids up to 1,999. Only the first of them are ever written.
VOCAB_SIZE = 2048
EPOCHS = 80
IGNORED = -100
NOISE = 0.2  # of the spread of each matrix: a few of the words then differ
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] }}<|eos|>{% else %}<|user|>{{ message['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def make_pair(folder: Path, max_positions: int) -> tuple[str, str]:
    """Train a target; its draft is the same with noise on all weights. Returns their folders."""
    tokenizer = make_tokenizer([question + answer for question, answer in lessons()])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = learn(tokenizer, max_positions)
        for name in ("target", "draft"):
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
            for weight in model.parameters():
                weight.data += NOISE * weight.data.std() * torch.randn_like(weight)
    return str(folder / "target"), str(folder / "draft")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that every text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, FILLER], trainer)
    tokenizer.add_tokens(MARKUP)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def learn(tokenizer: PreTrainedTokenizerFast, max_positions: int) -> LlamaForCausalLM:
    """Train until every answer token is all but certain."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=EPOCHS)
    batches = make_batches(tokenizer)
    for _ in range(EPOCHS):
        if max([train(model, optimizer, *batch) for batch in batches]) < 0.1:
            return model
        schedule.step()
    raise RuntimeError("some answer is not learned")


def train(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """One step; the -log p of the answer token that was least expected."""
    asked = labels[:, 1:] != IGNORED
    logits = model(ids).logits[:, :-1][asked]  # [A, V]
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][asked], reduction="none")
    optimizer.zero_grad()
    loss.mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.max().item()


def make_batches(tokenizer: PreTrainedTokenizerFast) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels ``[B, T]`` of lessons of about one length; those of questions are ignored."""
    rows = []
    for question, answer in lessons():
        asked = tokenizer.encode(question)
        said = tokenizer.encode(answer)
        said += [] if answer.endswith("...") else [EOS]
        rows.append((asked + said, [IGNORED] * len(asked) + said))
    rows.sort(key=lambda row: len(row[0]))

    def padded(columns: Sequence[list[int]], value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(one) for one in columns], True, value)

    some = (zip(*rows[first : first + 8], strict=True) for first in range(0, len(rows), 8))
    return [(padded(ids, 0), padded(labels, IGNORED)) for ids, labels in some]
