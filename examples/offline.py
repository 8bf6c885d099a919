"""SMC inside a Python program, without a server: `sgl.Engine`.

    python examples/offline.py
    python examples/offline.py --target MODEL --draft SMALLER_MODEL 'Why is the sky blue?'

Without arguments it takes the pair in bench/pair, and runs on a CPU in a minute. First it streams
one answer; then it asks for all answers at once, in each mode, and shows what they say of
themselves.
"""

import argparse
from pathlib import Path

import sglang as sgl

PAIR = Path(__file__).resolve().parents[1] / "bench" / "pair"
QUESTIONS = (
    "Sam has 12 caps. He buys 5 bags of 7. How many caps does Sam have now?",
    "Ann has 7 pens. A trick makes it 4 times as many. How many pens does Ann have now?",
)
SAMPLING = {"temperature": 0.7, "max_new_tokens": 128, "sampling_seed": 1}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--draft", default=str(PAIR / "draft"))
    return parser.parse_args()


def main() -> None:
    given = arguments()
    engine = sgl.Engine(
        model_path=given.target,
        speculative_algorithm="SMC",
        speculative_draft_model_path=given.draft,
        speculative_num_steps=8,
        speculative_smc_num_particles=8,
        log_level="error",
    )
    chats = [[{"role": "user", "content": question}] for question in given.questions]
    template = engine.tokenizer_manager.tokenizer.apply_chat_template
    prompts = [template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    shown = 0
    for chunk in engine.generate(prompts[0], SAMPLING, stream=True):
        print(chunk["text"][shown:], end="", flush=True)
        shown = len(chunk["text"])
    for mode in ("smc", "auto", "exact"):
        chosen = SAMPLING | {"custom_params": {"smc": {"mode": mode}}}
        print(f"\n--- {mode}")
        for answer in engine.generate(prompts, chosen):
            told = {k: v for k, v in answer["meta_info"].items() if k.startswith("spec_smc_")}
            print(answer["text"], told, sep="\n")
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes, which read this file again
    main()
