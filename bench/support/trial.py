"""One family through an engine: saved with random weights, started, held against transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.families import EOS, VOCAB, Family

MODES = ("smc", "exact", "mixed", "auto")
LENGTHS = (1, 7, 16, 45)
NEW_TOKENS = 24
ENGINE: dict[str, Any] = {
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
    """What came of a family."""

    family: str
    outcome: str  # run, refused, not here or failed
    note: str = ""
    as_draft: bool = False  # whether it drafts for itself, and every token is kept


def save(family: Family, folder: Path) -> str:
    """A random checkpoint of the family, or where transformers has no such class a bare config."""
    folder.mkdir(parents=True, exist_ok=True)
    if family.architecture is not None:
        config = {"model_type": family.model_type, "vocab_size": VOCAB, **family.config}
        config["architectures"] = [family.architecture]
        (folder / "config.json").write_text(json.dumps(config))
    else:
        _save_weights(family, folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def _save_weights(family: Family, folder: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(
        family.model_type,
        **family.config,
        vocab_size=VOCAB,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    model = getattr(transformers, family.head).from_config(config).float()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"t{i}" for i in range(2, VOCAB))]
    by_word = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(by_word, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, VOCAB - 8) for _ in range(length)] for length in LENGTHS]


def try_family(family: Family, folder: Path) -> Trial:
    """Start a server in which the family drafts for itself, and ask for greedy texts in all modes.

    The texts must be those of transformers, or else those of SGLang without SMC: the two differ for
    some families. Where the draft is the target, mode exact must keep every drafted token.
    """
    path = save(family, folder)
    try:
        texts, kept = _with_smc(family, path)
    except ValueError as error:
        return Trial(family.name, "refused", _reason(str(error)))
    note = ""
    if any(text != _transformers(family, path) for text in texts.values()):
        plain = _texts(_engine(model_path=path), {})
        wrong = [mode for mode, text in texts.items() if text != plain]
        if wrong:
            return Trial(family.name, "failed", f"other texts than plain decoding: {wrong}")
        note = "as plain SGLang, whose texts are not those of transformers"
    return Trial(family.name, "run", note, as_draft=kept)


def _engine(**arguments: Any) -> Any:
    import sglang

    return sglang.Engine(**{**ENGINE, **arguments})


def _with_smc(family: Family, path: str) -> tuple[dict[str, list[list[int]]], bool]:
    """Texts by mode, and whether mode exact kept all that was drafted."""
    arguments = {"model_path": path, "speculative_draft_model_path": path, **SMC}
    engine = _engine(**arguments, **dict(family.flags))
    try:
        texts = {mode: _ask(engine, {"mode": mode}) for mode in MODES}
    finally:
        engine.shutdown()
    kept = all(answer["meta_info"]["spec_accept_rate"] > 0.99 for answer in texts["exact"])
    return {m: [answer["output_ids"] for answer in found] for m, found in texts.items()}, kept


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
    """Greedy continuations in plain torch: faster attention would leave caps out."""
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


def _reason(message: str) -> str:
    """The sentence of a refusal, without the folder."""
    lines = [line.removeprefix("  - ") for line in message.splitlines()]
    told = next((line for line in lines if " has " in line and ";" in line), lines[-1])
    return told.partition(" has ")[2].partition(";")[0] or told
