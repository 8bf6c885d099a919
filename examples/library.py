"""SMC speculative decoding of two Hugging Face models, without SGLang: round after round.

    python examples/library.py
    python examples/library.py MODEL SMALLER_MODEL 'Why is the sky blue?'

Without arguments it takes the pair in bench/pair. The text is lossless: a sample of the target.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_smc.smc.deciding import VerifyTogether
from sglang_smc.smc.round import Round

PAIR = Path(__file__).resolve().parents[1] / "bench" / "pair"
QUESTION = "Sam has 12 caps. He buys 5 bags of 7. How many caps does Sam have now?"


class Model:
    """A causal language model, as a target and as a proposer."""

    def __init__(self, path: str | Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()

    def next_logits(self, texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.chain_logits(texts, lengths, 1)[:, 0]

    @torch.no_grad()
    def chain_logits(self, texts: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        logits = self.model(texts[:, : int(lengths.max())]).logits.float()  # [N, L, V]
        columns = lengths.unsqueeze(1) - count + torch.arange(count)  # [N, C]
        return logits[torch.arange(len(texts)).unsqueeze(1), columns]


def main() -> None:
    target, draft, question = sys.argv[1:] or (PAIR / "target", PAIR / "draft", QUESTION)
    tokenizer = AutoTokenizer.from_pretrained(target)
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    rounds = Round(
        Model(target),
        Model(draft),
        VerifyTogether(),
        evidence_threshold=torch.inf,  # verification alone decides
        temperature=0.7,
        stop_tokens=(tokenizer.eos_token_id,),
    )
    state, seeds = rounds.begin(prompt, num_particles=4), torch.tensor([1])
    while not state.population.ended.all():
        state, decision = rounds.step(state, seeds)
        length = int(state.population.lengths[0, 0])
        print(int(decision.num_columns), tokenizer.decode(state.population.tokens[0, 0, :length]))


if __name__ == "__main__":
    main()
