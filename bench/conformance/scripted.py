"""Make a model that thinks, calls a tool, and speaks, word by word as it was told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD = "<pad>"
EOS = "<eos>"
START = "<start>"
THOUGHT_BEGINS = "<think>"
THOUGHT_ENDS = "</think>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}" + START
REASONING = ["it", "is", "about", "the", "weather"]
ARGUMENTS = {"city": "Paris", "days": 3}
CALL = ["<tool_call>", '{"name":', '"forecast",', '"arguments":', '{"city":', '"Paris",']
CALL += ['"days":', "3}}", "</tool_call>"]
WORDS = [THOUGHT_BEGINS, *REASONING, THOUGHT_ENDS, "I", "look", *CALL]
PARAMETERS = {"city": {"type": "string"}, "days": {"type": "integer"}}
FORECAST = {"name": "forecast", "parameters": {"type": "object", "properties": PARAMETERS}}
TOOL = {"type": "function", "function": FORECAST}
#: What a grammar of JSON may need beside the words.
LETTERS = [*'{}[]":,0123456789abcdefghijklmnopqrstuvwxyz', "\n"]
WIDTH = 64


def token_of(word: str) -> str:
    """Return a word with its space; marks of a thought stand as SGLang's parsers look them up."""
    return word if word in (THOUGHT_BEGINS, THOUGHT_ENDS) else f"{word} "


def thinking_model(folder: Path, certainty: float) -> str:
    """Save a model that says `WORDS`, see `make_scripted_model`.

    Letters, which nothing makes likely, are what a grammar can still choose.
    """
    said = list(map(token_of, WORDS))
    return make_scripted_model(folder, said, certainty=certainty, others=LETTERS)


def make_scripted_model(
    folder: Path, said: Sequence[str], *, certainty: float, others: Sequence[str] = ()
) -> str:
    """Save a Llama that answers each chat with the same tokens, no two alike; return its folder.

    Its layers add nothing, so that the next token follows from the last one alone.

    Args:
        said: its tokens, behind `START`.
        certainty: the logit of the right next token; all others have 0.
        others: further tokens of the vocabulary.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = [PAD, EOS, START, *said, *others]
    size = len(vocabulary)
    hidden = WIDTH * -(-size // WIDTH)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        end = 3 + len(said)
        follows = [*range(3, end), 1]  # of START and each token
        # The last norm makes a token's one entry the root of the width.
        model.lm_head.weight[follows, range(2, end)] = certainty / hidden**0.5
    model.save_pretrained(folder)
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": PAD}
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special
    )
    made.save_pretrained(folder)
    return str(folder)


def processor() -> str:
    """Return SGLang's thinking-budget processor for this model's tokens."""
    from sglang.srt.sampling.custom_logit_processor import ThinkingBudgetLogitProcessor

    ids = [PAD, EOS, START, *WORDS]

    class Budget(ThinkingBudgetLogitProcessor):
        THINKING_START_TOKEN_ID = ids.index(THOUGHT_BEGINS)
        THINKING_END_TOKEN_ID = ids.index(THOUGHT_ENDS)
        NEW_LINE_TOKEN_ID = len(ids) + LETTERS.index("\n")

    return Budget.to_str()
