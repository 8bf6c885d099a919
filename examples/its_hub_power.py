"""A power of the target as an algorithm of its_hub: one request, where others send one a step.

    pip install 'its_hub[lm]'
    python examples/its_hub_power.py 'Sam has 12 caps. He buys 5 bags of 7. How many now?'

The budget is the number of particles, which vote with their weights. A server runs as
examples/power.py says.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai
from its_hub.api import AbstractScalingAlgorithm, AbstractScalingResult, ChatMessages


def last_number(text: str) -> str:
    """Return the last number of a text, or all of it."""
    numbers = re.findall(r"-?\d+(?:[.,]\d+)*", text)
    return numbers[-1] if numbers else text.strip()


@dataclass
class PowerResult(AbstractScalingResult):
    """All particles as responses, with their weights."""

    responses: list[dict]
    weights: list[float]
    selected_index: int

    @property
    def the_one(self) -> dict:
        return self.responses[self.selected_index]


class PowerSampling(AbstractScalingAlgorithm):
    """Sample whole texts from a power of the target, and let the particles vote.

    Args:
        power: alpha of p^alpha.
        projection: what of a text the particles vote on.
        smc: further keys of `custom_params["smc"]`, as potentials.
    """

    def __init__(
        self, power: float = 4.0, projection: Callable[[str], Any] = last_number, **smc: Any
    ) -> None:
        self.projection = projection
        self.smc = {"mode": "smc", "power": power, "return_particles": True, **smc}

    async def ainfer(
        self,
        lm: Any,
        prompt_or_messages: Any,
        budget: int,
        return_response_only: bool = True,
        tools: list[dict] | None = None,
        tool_choice: str | dict | None = None,
    ) -> dict | PowerResult:
        """Answer with ``budget`` particles of one request, at most the server's own number.

        Args:
            lm: an `OpenAICompatibleLanguageModel` of a server with SMC.

        Raises ValueError for tools.
        """
        if tools or tool_choice:
            raise ValueError(
                "Tools are given; allowed: none. Ask without, or by another algorithm."
            )
        messages = ChatMessages.from_prompt_or_messages(prompt_or_messages).to_chat_messages()
        async with openai.AsyncOpenAI(base_url=lm.endpoint, api_key=lm.api_key) as client:
            answer = await client.chat.completions.create(
                model=lm.model_name,
                messages=[message.to_dict() for message in messages],  # pyright: ignore
                temperature=1.0 if lm.temperature is None else lm.temperature,
                max_completion_tokens=lm.max_completion_tokens,
                extra_body={"custom_params": {"smc": {**self.smc, "num_particles": budget}}},
            )
        (choice,) = answer.choices
        assert choice.model_extra is not None, "SGLang's fields are there"
        result = self._voted(choice.model_extra["meta_info"]["spec_smc_particles"])
        return result.the_one if return_response_only else result

    def _voted(self, particles: list[dict]) -> PowerResult:
        weights = [particle["weight"] for particle in particles]
        voted = [self.projection(particle["text"]) for particle in particles]
        shares: Counter = Counter()
        for value, weight in zip(voted, weights, strict=True):
            shares[value] += weight
        ranks = [(shares[value], weight) for value, weight in zip(voted, weights, strict=True)]
        responses = [{"role": "assistant", "content": one["text"]} for one in particles]
        return PowerResult(responses, weights, ranks.index(max(ranks)))


def main() -> None:
    from its_hub import OpenAICompatibleLanguageModel

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:30000/v1")
    parser.add_argument("--budget", type=int, default=8)
    given = parser.parse_args()
    lm = OpenAICompatibleLanguageModel(given.url, "none", "default", max_completion_tokens=256)
    result = PowerSampling().infer(lm, given.question, given.budget, return_response_only=False)
    for weight, response in zip(result.weights, result.responses, strict=True):
        print(f"{weight:.3f}  {last_number(response['content'])}")
    print(result.the_one["content"])


if __name__ == "__main__":
    main()
