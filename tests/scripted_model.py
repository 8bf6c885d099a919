"""A model that says its words in their order: the text of a test, spoken by a real engine.

A Llama whose layers add nothing, so that the next token follows from the last one alone: word i + 1
comes after word i, and the end of the text after the last word.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, START = "<pad>", "<eos>", "<start>"
# Each message's words, and then the word that the model goes on from.
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}" + START


def make_scripted_model(path: Path, words: list[str], *, certainty: float) -> str:
    """Save a model that answers each chat with ``words``, each with a space behind it.

    Args:
        words: no two alike.
        certainty: the logit of the right next word; all others have 0.
    """
    vocabulary = [PAD, EOS, START, *(word + " " for word in words)]
    size = len(vocabulary)
    hidden = 16 * -(-size // 16)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        after = [*range(3, size), 1]  # of START and each word
        # The last norm makes a word's one entry the root of the width.
        model.lm_head.weight[after, range(2, size)] = certainty / hidden**0.5
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    _tokenizer(vocabulary).save_pretrained(path)
    return str(path)


def _tokenizer(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
        chat_template=CHAT_TEMPLATE,
    )
