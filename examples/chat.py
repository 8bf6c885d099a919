"""Chat with a running SMC server through openai-python: each answer is streamed.

    python -m sglang.launch_server --speculative-algorithm SMC ...
    python examples/chat.py --mode exact
    python examples/chat.py 'Why is the sky blue?'        # one question, then the end

SMC sends what all particles agree on, so that a chunk may bring several tokens.
"""

import argparse
import sys
from collections.abc import Iterable

import openai


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", help="without any: read from the terminal")
    parser.add_argument("--url", default="http://localhost:30000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--mode", default="smc", choices=("smc", "exact", "auto"))
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=256)
    return parser.parse_args()


def typed() -> Iterable[str]:
    print("Ask; an empty line ends.", file=sys.stderr)
    return iter(lambda: input("> ").strip(), "")


def main() -> None:
    given = arguments()
    client = openai.OpenAI(base_url=given.url, api_key=given.api_key)
    messages: list = []
    for question in given.questions or typed():
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model="default",
            messages=messages,
            stream=True,
            temperature=given.temperature,
            max_tokens=given.max_tokens,
            extra_body={"custom_params": {"smc": {"mode": given.mode}}},
        )
        answer = ""
        for chunk in stream:
            piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            print(piece, end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
