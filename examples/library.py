"""Sample from a Hugging Face model by SMC, with a smaller one as the draft, without SGLang.

    python examples/library.py
    python examples/library.py MODEL SMALLER_MODEL 'Why is the sky blue?'

Without arguments it takes the pair in bench/pair. The text is lossless: a sample of the target.
"""

import sys
from math import inf
from pathlib import Path

from sglang_smc.library import load
from sglang_smc.smc.deciding import VerifyTogether

PAIR = Path(__file__).resolve().parents[1] / "bench" / "pair"
QUESTION = "Sam has 12 caps. He buys 5 bags of 7. How many caps does Sam have now?"


def main() -> None:
    target, draft, question = sys.argv[1:] or (PAIR / "target", PAIR / "draft", QUESTION)
    rounds = load(
        target,
        draft,
        decider=VerifyTogether(),
        evidence_threshold=inf,  # verification alone decides
        temperature=0.7,
    )
    answer = rounds.run([{"role": "user", "content": question}], num_particles=4, seed=1)
    print(answer.text)
    print(f"{answer.tokens_per_pass:.2f} tokens a pass of the target")


if __name__ == "__main__":
    main()
