"""Try one family: save random weights, start an engine, compare texts with transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dummies import word_tokenizer
from support.families import EOS, FAMILIES, VOCAB, Family

MODES = ("smc", "exact", "mixed", "auto")
LENGTHS = (1, 7, 16, 45)
NEW_TOKENS = 25  # one from prefill, and rounds of K + 1
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
    import transformers

    whole: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": EOS}
    if "text_config" not in family.config:
        whole |= {"vocab_size": VOCAB, "initializer_range": 0.2, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family.model_type, **{**whole, **family.config})
    torch.manual_seed(0)
    model = getattr(transformers, family.head).from_config(config).float()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    _say_as_published(family, folder / "config.json")
    if family.renamed is not None:
        _rename(folder / "model.safetensors", *family.renamed)


def _rename(file: Path, old: str, new: str) -> None:
    """Rename weights to the names of published checkpoints."""
    from safetensors.torch import load_file, save_file

    weights = {name.replace(old, new): weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _say_as_published(family: Family, file: Path) -> None:
    """Add configuration keys that published checkpoints have and transformers does not save."""
    saved = json.loads(file.read_text())
    if family.architecture is not None:
        saved["architectures"] = [family.architecture]
    interval = family.config.get("text_config", family.config).get("full_attention_interval")
    if interval is not None:
        saved.get("text_config", saved)["full_attention_interval"] = interval
    file.write_text(json.dumps(saved))


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, VOCAB - 8) for _ in range(length)] for length in LENGTHS]


def try_family(family: Family, folder: Path) -> Trial:
    """Start a server in which the family drafts for itself, and compare greedy texts in all modes.

    The texts must equal those of transformers, or else those of SGLang without SMC: the two differ
    for some families. If the draft is the target, mode exact must keep every drafted token. If the
    family is refused only as a draft, a Llama drafts.
    """
    path = save(family, folder / "model")
    try:
        texts, kept = _with_smc(family, path, path)
        draft, note = "run" if kept else "failed", ""
    except ValueError as error:
        reasons = _reasons(str(error))
        if not reasons:  # no refusal by SMC
            raise
        if "--model-path" in reasons:
            return Trial(family.name, "refused", "refused", reasons["--model-path"])
        texts, _ = _with_smc(family, path, save(FAMILIES[0], folder / "llama"))
        draft, note = "refused", f"as a draft: {reasons['--speculative-draft-model-path']}"
    if any(text != _transformers(family, path) for text in texts.values()):
        plain = _texts(_engine(model_path=path), {})
        wrong = [mode for mode, text in texts.items() if text != plain]
        if wrong:
            note = f"other texts than plain decoding: {', '.join(wrong)}"
            return Trial(family.name, "failed", draft, note)
        note = "the text of plain SGLang, which is not that of transformers"
    return Trial(family.name, "run", draft, note)


def try_plain(family: Family, folder: Path) -> Trial:
    """Run the family without SMC: a failure there is not SMC's."""
    _texts(_engine(model_path=save(family, folder / "plain"), **dict(family.flags)), {})
    return Trial(family.name, "failed", "failed")


def _reasons(message: str) -> dict[str, str]:
    """Return the reasons why models are refused, by flag."""
    lines = [line.removeprefix("  - ") for line in message.splitlines()]
    told = [line for line in lines if line.startswith("--") and " has " in line]
    return {line.split()[0]: _short(line.partition(" has ")[2]) for line in told}


def _short(reason: str) -> str:
    """Return the first part of a reason."""
    return reason.partition(";")[0].partition(", which")[0]


def _engine(**arguments: Any) -> Any:
    import sglang

    return sglang.Engine(**{**ENGINE, **arguments})


def _with_smc(family: Family, path: str, draft: str) -> tuple[dict[str, list[list[int]]], bool]:
    """Return texts by mode, and whether mode exact kept all drafted tokens."""
    arguments = {"model_path": path, "speculative_draft_model_path": draft, **SMC}
    engine = _engine(**arguments, **dict(family.flags))
    try:
        answers = {mode: _ask(engine, {"mode": mode}) for mode in MODES}
    finally:
        engine.shutdown()
    kept = all(answer["meta_info"]["spec_accept_rate"] == 1 for answer in answers["exact"])
    return {m: [answer["output_ids"] for answer in found] for m, found in answers.items()}, kept


def _texts(engine: Any, smc: dict[str, Any]) -> list[list[int]]:
    try:
        return [answer["output_ids"] for answer in _ask(engine, smc)]
    finally:
        engine.shutdown()


def _ask(engine: Any, smc: dict[str, Any]) -> list[dict[str, Any]]:
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    if smc:
        params["custom_params"] = {"smc": smc}
    return engine.generate(input_ids=prompts(), sampling_params=params)


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
