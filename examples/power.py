"""Ask a running SMC server for a power of its target: all particles, their weights, and their vote.

    python -m sglang.launch_server --speculative-algorithm SMC \\
        --model-path bench/pair/target --speculative-draft-model-path bench/pair/draft
    python examples/power.py
    python examples/power.py --power 2 --resampling-method chopthin --vote 'How many ...?'

The last is a consensus of particles, as in Chopthin Consensus Power Sampling, without its ramp of
powers. docs/powers.md says when which helps.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable

import openai

QUESTION = "Sam has 12 caps. He buys 5 bags of 7. How many caps does Sam have now?"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--url", default="http://localhost:30000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--power", type=float, default=4.0)
    parser.add_argument("--particles", type=int, help="at most the server's, which is the default")
    parser.add_argument("--resampling-method", default="systematic")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vote", action="store_true", help="answer by the vote, not by a draw")
    return parser.parse_args()


def conclusion(text: str) -> str:
    """Return what a text is counted for: its last number, or its last line."""
    numbers = re.findall(r"-?\d+(?:[.,]\d+)*", text)
    return numbers[-1] if numbers else text.strip().rpartition("\n")[2]


def vote(particles: Iterable[dict]) -> Counter:
    """Return the weight of all particles that come to each conclusion."""
    shares: Counter = Counter()
    for particle in particles:
        shares[conclusion(particle["text"])] += particle["weight"]
    return shares


def main() -> None:
    given = arguments()
    smc = {
        "mode": "smc",
        "power": given.power,
        "resampling_method": given.resampling_method,
        "return_particles": True,
    }
    if given.particles is not None:
        smc["num_particles"] = given.particles
    client = openai.OpenAI(base_url=given.url, api_key=given.api_key)
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": given.question}],
        temperature=1.0,
        max_tokens=given.max_tokens,
        seed=given.seed,
        extra_body={"custom_params": {"smc": smc}},
    )
    choice = answer.choices[0]
    particles = choice.model_extra["meta_info"]["spec_smc_particles"]
    for particle in sorted(particles, key=lambda one: -one["weight"]):
        print(f"{particle['weight']:.3f}  {conclusion(particle['text'])}")
    shares = vote(particles)
    winner, share = shares.most_common(1)[0]
    print(f"vote: {winner} ({share:.0%} of the weight)")
    voted = [one for one in particles if conclusion(one["text"]) == winner]
    heaviest = max(voted, key=lambda one: one["weight"])
    print(heaviest["text"] if given.vote else choice.message.content)


if __name__ == "__main__":
    main()
