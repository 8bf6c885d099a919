"""Try one family: save random weights, start an engine, compare texts with transformers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dummies import word_tokenizer
from speed.grid import Launch
from speed.measure import STOP_SECONDS
from speed.remote import EngineError, running
from speed.runner import Clock, TimeUpError
from support.families import EOS, FAMILIES, VOCAB, Family

MODES = ("smc", "exact", "mixed", "auto")
LENGTHS = (1, 7, 16, 45)
NEW_TOKENS = 25  # one from prefill, and rounds of K + 1
PATIENCE = 300.0  # seconds per engine
LONGEST_NOTE = 200
ENGINE: dict[str, Any] = {
    "random_seed": 0,
    "device": "cpu",
    "dtype": "float32",
    "skip_server_warmup": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "context_length": 256,
    "log_level": "error",
}
SMC: dict[str, Any] = {
    "speculative_algorithm": "SMC",
    "speculative_num_steps": 3,
    "speculative_smc_num_particles": 3,
    "speculative_smc_max_lag": 16,
}


class Trial(NamedTuple):
    """The outcome of a family, as target and as draft."""

    family: str
    target: str  # run, refused, not here or failed
    draft: str
    note: str = ""


def save(family: Family, folder: Path) -> str:
    """Save a random checkpoint of the family, or only its config if transformers has no class."""
    folder.mkdir(parents=True, exist_ok=True)
    if family.bare:
        config = {"model_type": family.model_type, "vocab_size": VOCAB, **family.config}
        config["architectures"] = [family.architecture]
        (folder / "config.json").write_text(json.dumps(config))
    else:
        _save_weights(family, folder)
    word_tokenizer(VOCAB).save_pretrained(folder)
    return str(folder)


def _save_weights(family: Family, folder: Path) -> None:
    """Save what transformers makes of the configuration, spelled as published checkpoints are."""
    import transformers
    from safetensors.torch import load_file, save_file

    whole: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": EOS}
    if "text_config" not in family.config:
        whole |= {"vocab_size": VOCAB, "initializer_range": 0.2, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family.model_type, **{**whole, **family.config})
    torch.manual_seed(0)
    model = getattr(transformers, family.head).from_config(config).float()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    if family.architecture is not None:
        saved["architectures"] = [family.architecture]
    interval = family.config.get("text_config", family.config).get("full_attention_interval")
    if interval is not None:
        saved.get("text_config", saved)["full_attention_interval"] = interval
    (folder / "config.json").write_text(json.dumps(saved))
    if family.renamed is not None:
        file = folder / "model.safetensors"
        weights = {k.replace(*family.renamed): weight for k, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, VOCAB - 8) for _ in range(length)] for length in LENGTHS]


def try_family(family: Family, folder: Path) -> Trial:
    """Try a family; where it fails with SMC, the outcome is also of SGLang without."""
    log = folder / "engine.log"
    try:
        path = save(family, folder / "model")
        return _with_smc(family, path, folder, log)
    except Exception as error:
        try:
            _answers(log, [None], model_path=str(folder / "model"), **dict(family.flags))
        except EngineError as of_sglang:
            return Trial(family.name, "not here", "not here", str(of_sglang)[:LONGEST_NOTE])
        return Trial(family.name, "failed", "failed", str(error)[:LONGEST_NOTE])


def _with_smc(family: Family, path: str, folder: Path, log: Path) -> Trial:
    """Start a server in which the family drafts for itself, and compare greedy texts in all modes.

    The texts must equal those of transformers, or else those of SGLang without SMC: the two differ
    for some families. If the draft is the target, mode exact must keep every drafted token. If the
    family is refused only as a draft, a Llama drafts.
    """
    flags = {"model_path": path, **SMC, **dict(family.flags)}
    try:
        answers = _answers(log, MODES, speculative_draft_model_path=path, **flags)
        kept = all(one["meta_info"]["spec_accept_rate"] == 1 for one in answers["exact"])
        draft, note = "run" if kept else "failed", ""
    except EngineError:
        reasons = _reasons(log.read_text(errors="replace"))
        if not reasons:  # no refusal by SMC
            raise
        if "--model-path" in reasons:
            return Trial(family.name, "refused", "refused", reasons["--model-path"])
        llama = save(FAMILIES[0], folder / "llama")
        answers = _answers(log, MODES, speculative_draft_model_path=llama, **flags)
        draft, note = "refused", f"as a draft: {reasons['--speculative-draft-model-path']}"
    texts = {mode: [one["output_ids"] for one in found] for mode, found in answers.items()}
    expected = _transformers(family, path)
    if any(text != expected for text in texts.values()):
        plain = [one["output_ids"] for one in _answers(log, [None], model_path=path)[None]]
        wrong = [str(mode) for mode, text in texts.items() if text != plain]
        if wrong:
            note = f"other texts than plain decoding: {', '.join(wrong)}"
            return Trial(family.name, "failed", draft, note)
        note = "the text of plain SGLang, which is not that of transformers"
    return Trial(family.name, "run", draft, note)


def _reasons(message: str) -> dict[str, str]:
    """Return the first part of the reasons why models are refused, by flag."""
    lines = [line.removeprefix("  - ") for line in message.splitlines()]
    told = [line.partition(" has ") for line in lines if line.startswith("--") and " has " in line]
    return {
        flag.split()[0]: reason.partition(";")[0].partition(", which")[0]
        for flag, _, reason in told
    }


def _answers(
    log: Path, modes: Sequence[str | None], **arguments: Any
) -> dict[str | None, list[Any]]:
    """Return an engine's greedy answers by mode, None for requests without SMC."""
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    found, launch = {}, Launch({**ENGINE, **arguments}, {})
    try:
        with Clock(math.inf).at_most(PATIENCE), running(launch, log, STOP_SECONDS) as engine:
            for mode in modes:
                asked = params | ({"custom_params": {"smc": {"mode": mode}}} if mode else {})
                question = {"input_ids": prompts(), "sampling_params": asked}
                told = engine.exchange({"generate": question})
                if "refused" in told:
                    raise EngineError(told["refused"])
                found[mode] = told["answers"]
    except TimeUpError as error:
        raise EngineError("it did not answer") from error
    return found


def _transformers(family: Family, path: str) -> list[list[int]]:
    """Return greedy continuations with eager attention: faster kernels leave out logit caps."""
    import transformers

    head = getattr(transformers, family.head)
    model = head.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    texts = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        for _ in range(NEW_TOKENS):
            chosen = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, chosen], 1)
        texts.append(ids[0, len(prompt) :].tolist())
    return texts
