"""Make rounds of SMC speculative decoding of two Hugging Face models, without SGLang.

    rounds = load("HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")
    answer = rounds.run([{"role": "user", "content": "Why is the sky blue?"}], num_particles=8)
    answer.text, answer.weights, answer.log_evidence

transformers is imported where a model is loaded. docs/library.md teaches with it.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from sglang_smc.smc.round import Round


class CausalLM:
    """A causal language model of transformers, as a target and as a proposer.

    It reads whole texts: for studies of what SMC samples, not for speed.

    Args:
        name: of the hub, or a folder.
        options: of ``AutoModelForCausalLM.from_pretrained``.
    """

    def __init__(self, name: str | PathLike[str], **options: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(name, **options).eval()

    def next_logits(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[R, V]`` after texts; see `smc.round.Proposer`."""
        return self.chain_logits(texts, lengths, 1)[:, 0]

    @torch.no_grad()
    def chain_logits(
        self, texts: torch.Tensor, lengths: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        """Return the logits ``[R, C, V]`` behind the last tokens; see `smc.round.Target`."""
        logits = self.model(texts[:, : int(lengths.max())]).logits.float()  # [R, L, V]
        column = torch.arange(num_columns, device=texts.device)
        places = lengths.unsqueeze(1) - num_columns + column  # [R, C]
        rows = torch.arange(len(texts), device=texts.device).unsqueeze(1)
        return logits[rows, places]


class HubTokenizer:
    """A tokenizer of transformers; chats, as lists of messages, go through its template."""

    def __init__(self, name: str | PathLike[str]) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(name)

    def encode(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a text, or of a chat up to the assistant's turn."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt).input_ids
        text = self.tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def load(target: str | PathLike[str], draft: str | PathLike[str], **options: Any) -> Round:
    """Return rounds of two models of the hub, or of folders.

    Args:
        target: its samples are drawn; texts end with its tokenizer's end token.
        draft: a smaller model of the same vocabulary.
        options: of `Round`: ``decider``, ``num_steps``, ``temperature``, ``power`` and others.

    Raises ValueError where the models' vocabularies differ in size.
    """
    tokenizer = HubTokenizer(target)
    models = CausalLM(target), CausalLM(draft)
    sizes = [each.model.get_output_embeddings().weight.shape[0] for each in models]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{draft} has logits of {sizes[1]} tokens, and {target} of {sizes[0]}; allowed: equal "
            "vocabularies. Choose a draft of the target's family and size of vocabulary."
        )
    given = {"stop_tokens": (tokenizer.tokenizer.eos_token_id,), "tokenizer": tokenizer}
    return Round(*models, **given | options)
