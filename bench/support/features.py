"""Which features of SGLang run with SMC, and which with its own EAGLE-3, on the shipped pair.

A feature runs where greedy answers are those of SGLang without speculation. Flags have an engine
each; fields of requests share one.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from results import provenance
from speed.remote import EngineError, InvalidRequestError, running
from speed.runner import Clock, TimeUpError
from study import PUBLISHED, REPOSITORY, write_between
from support.engine import ENGINE, NEW_TOKENS, PATIENCE, prompts

from sglang_smc_tools.demo.serving import Launch

PAIR = REPOSITORY / "bench" / "pair"
HEAD = {"speculative_draft_model_path": str(PAIR / "eagle3"), "speculative_num_steps": 3}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "without": {},
    "EAGLE-3": HEAD
    | {
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 6,
    },
    "SMC": HEAD | {"speculative_algorithm": "SMC", "speculative_smc_num_particles": 3},
}
FLAGS: dict[str, dict[str, Any]] = {
    "`--page-size 16`": {"page_size": 16},
    "`--enable-hierarchical-cache`": {"enable_hierarchical_cache": True},
    "`--hicache-storage-backend file`": {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
    },
    "`--kv-cache-dtype fp8_e5m2`": {"kv_cache_dtype": "fp8_e5m2"},
    "`--enable-lora`": {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]},
    "`--tp-size 2`": {"tp_size": 2},
    "`--dp-size 2`": {"dp_size": 2},
    "`--dp-size 2 --tp-size 2`": {"dp_size": 2, "tp_size": 2},
    "`--enable-dp-attention`": {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True},
    "`--pp-size 2`": {"pp_size": 2},
    "`--enable-two-batch-overlap`": {"enable_two_batch_overlap": True},
    "`--enable-mixed-chunk`": {"enable_mixed_chunk": True, "chunked_prefill_size": 16},
    "`--disable-radix-cache`": {"disable_radix_cache": True},
    "`--enable-priority-scheduling`": {"enable_priority_scheduling": True},
    "`--enable-deterministic-inference`": {"enable_deterministic_inference": True},
    "`--enable-return-hidden-states`": {"enable_return_hidden_states": True},
}
REFUSED = "refused"
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
FIELDS: dict[str, dict[str, Any]] = {
    "log-probabilities": {"return_logprob": True, "top_logprobs_num": 3},
    "biases": {"sampling_params": {"logit_bias": {"7": 2.0}}},
    "JSON schemas": {"sampling_params": {"json_schema": SCHEMA}},
    "`stop_regex`": {"sampling_params": {"stop_regex": "[0-9]{2}"}},
    "input embeddings": {"input_embeds": [[0.1] * 256] * 3, "input_ids": None},
}


def run_features(folder: Path) -> dict[str, dict[str, str]]:
    """Return by feature and algorithm "yes", or why not."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, str]] = {}
    answers = {name: _fields(name, folder) for name in ALGORITHMS}
    for field in FIELDS:
        found[field] = _compared({name: answers[name][field] for name in ALGORITHMS})
    for feature, flags in FLAGS.items():
        of_each: dict[str, Any] = {name: _texts(name, folder, flags) for name in ALGORITHMS}
        found[feature] = _compared(of_each)
        print(feature, found[feature], flush=True)
    return found


def _compared(answers: dict[str, Any]) -> dict[str, str]:
    """Return what to say of each algorithm's answers; an error is a text itself."""
    expected = answers.pop("without")
    here = not isinstance(expected, str)
    return {name: _said(found, expected, here) for name, found in answers.items()}


def _said(found: Any, expected: Any, here: bool) -> str:
    """Return "yes", or why not."""
    if isinstance(found, str) and found.startswith(REFUSED):
        return found
    if here and not isinstance(found, str):
        return "yes" if found == expected else "other texts"
    return f"no: {found}" if here and "smc_cpu" not in found else "not here"


def _fields(algorithm: str, folder: Path) -> dict[str, Any]:
    """Return an engine's texts, or its error, by field of requests."""
    found: dict[str, Any] = {}
    with _engine(algorithm, folder, {}) as engine:
        for field, asked in FIELDS.items():
            try:
                found[field] = _ask(engine, asked)
            except InvalidRequestError:
                found[field] = f"{REFUSED}, HTTP 400"
    return found


def _texts(algorithm: str, folder: Path, flags: dict[str, Any]) -> Any:
    try:
        with _engine(algorithm, folder, flags) as engine:
            return _ask(engine, {})
    except (EngineError, TimeUpError) as error:
        log = (folder / "engine.log").read_text(errors="replace")
        refused = re.search(r"SMC cannot start.*?since (.+?)\.\s", log, re.DOTALL)
        return f"{REFUSED}: {refused[1]}" if refused else _sentence(error)


def _engine(algorithm: str, folder: Path, flags: dict[str, Any]) -> Any:
    model = {"model_path": str(PAIR / "target")}
    launch = Launch({**ENGINE, **model, **ALGORITHMS[algorithm], **flags})
    return running(launch, folder / "engine.log")


def _ask(engine: Any, asked: dict[str, Any]) -> list[list[int]]:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, **asked.get("sampling_params", {})}
    whole = {"input_ids": prompts(), **asked, "sampling_params": params}
    if whole["input_ids"] is None:
        del whole["input_ids"]
    with Clock(math.inf).at_most(PATIENCE):
        answers = engine.generate(**whole)
    answers = answers if isinstance(answers, list) else [answers]
    return [one["output_ids"] for one in answers]


def _sentence(error: Exception) -> str:
    """Return an error's own words, in a line."""
    return " ".join(str(error).replace("|", "/").split()) or type(error).__name__


RESULTS = PUBLISHED / "support" / "features.json"
PAGE = REPOSITORY / "docs" / "support.md"
MARKS = "<!-- features by bench/support -->", "<!-- end of features -->"


def items(found: dict[str, dict[str, str]]) -> str:
    """Return an item for all features with the same result."""
    alike: dict[tuple[str, str], list[str]] = {}
    for feature, by in found.items():
        alike.setdefault((by["EAGLE-3"], by["SMC"]), []).append(feature)
    told = (
        f"- {', '.join(names)}: EAGLE-3 {eagle}; SMC {smc}" for (eagle, smc), names in alike.items()
    )
    return "\n".join(told)


def publish(found: dict[str, dict[str, str]]) -> None:
    """Write the results and the table of docs/support.md."""
    told = {"provenance": provenance({}), "features": found}
    RESULTS.write_text(json.dumps(told, indent=1) + "\n")
    write_between(PAGE, MARKS, items(found))
