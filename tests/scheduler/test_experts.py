"""The experts that tokens were routed to in rounds are those of a prefill of the same text."""

from collections.abc import Callable
from pathlib import Path

import torch
from in_process import SMC, Server
from model_families import make_model
from tiny_models import smc_arguments


def test_experts_of_rounds_are_those_of_prefill(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """Red where a row's experts are stored at another's slot, or a draft's in their place."""
    target, draft = (make_model(tmp_path / f"{seed}", "qwen3_moe", seed) for seed in range(2))
    settings = {"num_particles": 3, "num_steps": 3, "max_lag": 16, "chunked_prefill_size": 8}
    arguments = smc_arguments(target, draft, enable_return_routed_experts=True, **settings)
    server = start(**arguments, overlap=True)
    asked = [
        {
            "input_ids": [5 + seed, *range(2, 12)],
            "return_routed_experts": seed != 5,
            "sampling_params": {
                "max_new_tokens": 12,
                "ignore_eos": True,
                "sampling_seed": seed,
                "custom_params": {"smc": SMC[seed % len(SMC)]},
            },
        }
        for seed in range(8)
    ]
    replies = [server.send(**one) for one in asked]
    server.run_until(lambda: len(replies[1].output_ids) > 2)
    server.retract(replies[0], replies[1])
    server.finish()
    assert replies[0].num_retractions == 1
    for one, reply in zip(asked, replies, strict=True):
        text = [*one["input_ids"], *reply.output_ids]
        server.flush()
        again = {"input_ids": text, "sampling_params": {"max_new_tokens": 1}}
        expected = server.generate(return_routed_experts=True, **again).meta["routed_experts"]
        if not one["return_routed_experts"]:
            assert "routed_experts" not in reply.meta
            continue
        assert reply.meta["routed_experts"].shape == (len(text) - 1, 2, 2)
        assert torch.equal(reply.meta["routed_experts"], expected[:-1])
        assert expected.unique().tolist() == [0, 1, 2, 3]
