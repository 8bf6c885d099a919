"""Compare steering with genlm-control's: one target and potential, in turns, on one machine.

    pip install --no-deps genlm-control==0.4.1 genlm-backend==0.3.1 genlm-grammar genlm-bytes \\
        arsenal graphviz json-stream json-stream-rs-tokenizer nltk bitsandbytes frozendict
    PYTHONPATH=.:bench .venv/bin/python bench/steering/genlm_control.py

genlm-control's particles draw each token from the target, by transformers; ours are verified
chains. Both resample at an ESS of half, and their Z-hat have one mean if both are right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from answers import COMMON, MAX_TOKENS, prompt_ids, tokenizer
from intervals import Interval, ratio
from pair.task import held_out
from results import provenance
from speed.grid import DRAFT, TARGET
from steering.run import DELIMITER, POTENTIALS, SMC, VERIFIED, drawn, number_of, steered
from steering.steps import Steps
from study import PAIR, PUBLISHED, bar, positive

from sglang_smc.potentials import Text

NUM_PARTICLES = 8
STEPS = Steps()
ARGS = Steps.Args(**POTENTIALS["steps"])


class Steered(NamedTuple):
    """The particles of one problem."""

    evidence: float  # Z-hat
    solved: float  # probability that a particle drawn by weight has the right number
    tokens: int  # of all particles
    seconds: float


def by_sglang(engine: Any, index: int) -> Steered:
    """Answer a problem by verified chains."""
    smc = steered(VERIFIED, "steps", NUM_PARTICLES).smc
    params = {"temperature": 1.0, "max_new_tokens": MAX_TOKENS, "sampling_seed": index}
    ids = prompt_ids(held_out(index))
    asked = {**params, "custom_params": {"smc": smc}}
    began = time.perf_counter()
    info = engine.generate(input_ids=ids, sampling_params=asked)["meta_info"]
    seconds = time.perf_counter() - began
    particles = info["spec_smc_particles"]
    texts = [tokenizer().decode(one["output_ids"], skip_special_tokens=True) for one in particles]
    solved = _solved(index, texts, [one["weight"] for one in particles])
    tokens = sum(len(one["output_ids"]) for one in particles)
    return Steered(float(np.exp(info["spec_smc_log_evidence"])), solved, tokens, seconds)


def by_genlm(llm: Any, critic: Any, index: int) -> Steered:
    """Answer a problem by genlm-control."""
    from genlm.control import direct_token_sampler

    llm.prompt_ids = prompt_ids(held_out(index))
    sampler = direct_token_sampler(llm)
    sizes = {"n_particles": NUM_PARTICLES, "ess_threshold": 0.5, "max_tokens": MAX_TOKENS}
    began = time.perf_counter()
    found = asyncio.run(sampler.smc(**sizes, critic=critic, resampling_method="systematic"))
    seconds = time.perf_counter() - began
    texts = [b"".join(context[:-1]).decode(errors="replace") for context in found.contexts]
    solved = _solved(index, texts, list(found.normalized_weights))
    tokens = sum(map(len, found.contexts))
    return Steered(float(np.exp(found.log_ml)), solved, tokens, seconds)


def _solved(index: int, texts: Sequence[str], weights: Sequence[float]) -> float:
    return drawn([number_of(text) for text in texts], weights, held_out(index).number)


def genlm() -> tuple[Any, Any]:
    """Return genlm-control's target, and `Steps` at each line's end as its potential."""
    from genlm.control import Potential, PromptedLLM

    # It waits for queries of other particles: for all of them, or 1 ms.
    own = {"batch_size": NUM_PARTICLES, "timeout": 0.001}
    loads = {"device_map": None, "torch_dtype": "float32"}
    llm = PromptedLLM.from_name(str(PAIR / TARGET), backend="hf", hf_opts=loads, **own)

    class Critic(Potential):
        async def complete(self, context: Sequence[bytes]) -> float:
            return STEPS.complete([_text(b"".join(context).decode(errors="replace"))])[0]

        async def prefix(self, context: Sequence[bytes]) -> float:
            lines, end, _ = b"".join(context).decode(errors="replace").rpartition(DELIMITER)
            return STEPS.prefix([_text(lines + end)])[0]

    return llm, Critic(llm.vocab)


def _text(output: str) -> Text:
    return Text((), (0,), ARGS, lambda _: output)


def table(found: dict[str, list[Steered]]) -> dict[str, dict[str, Interval]]:
    """Return the means of each system, and the differences of what has one mean in both."""
    rows: dict[str, dict[str, Interval]] = {}
    for name, each in found.items():
        evidence, solved, tokens, seconds = np.array(each, dtype=float).T
        rows[name] = {
            "Z-hat": ratio(evidence),
            "accuracy": ratio(solved),
            "tokens a second": ratio(tokens, seconds),
        }
    ours, theirs = (np.array(found[name], dtype=float) for name in ("sglang-smc", "genlm-control"))
    rows["ours - theirs"] = {
        key: ratio(ours[:, i] - theirs[:, i]) for i, key in enumerate(("Z-hat", "accuracy"))
    }
    return rows


def main() -> None:
    """Run the comparison and write its numbers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problems", type=positive, default=100, help="held-out problems, from 0")
    published = PUBLISHED / "steering" / "genlm_control.json"
    parser.add_argument("--output", type=Path, default=published)
    options = parser.parse_args()
    import sglang

    models = {"model_path": PAIR / TARGET, "speculative_draft_model_path": PAIR / DRAFT}
    settings = {**COMMON, **SMC, "speculative_smc_num_particles": NUM_PARTICLES}
    engine = sglang.Engine(**{key: str(path) for key, path in models.items()}, **settings)
    llm, critic = genlm()
    found: dict[str, list[Steered]] = {"sglang-smc": [], "genlm-control": []}
    with bar(total=options.problems, unit="problem") as progress:
        by_sglang(engine, 0)  # once before they count
        by_genlm(llm, critic, 0)
        for index in range(options.problems):
            found["sglang-smc"].append(by_sglang(engine, index))
            found["genlm-control"].append(by_genlm(llm, critic, index))
            progress.update()
    engine.shutdown()
    origin = provenance({"problems": options.problems, "num_particles": NUM_PARTICLES})
    rows = table(found)
    options.output.write_text(json.dumps({"rows": rows, "provenance": origin}, indent=1) + "\n")
    for name, cells in rows.items():
        print(name, {key: [round(x, 3) for x in cell[:3]] for key, cell in cells.items()})


if __name__ == "__main__":
    main()
