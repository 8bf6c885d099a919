"""Which families of models run: each is started, asked in all modes, and held against transformers.

    python bench/support                   the families that have no result yet
    python bench/support --only 'Gemma 2'  these again
    python bench/support --publish         write the results and the table of docs/families.md
    python bench/support --features        features of SGLang with SMC and with its own EAGLE-3

An engine that dies takes its process with it, so each runs in one of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from dummies import word_tokenizer
from results import provenance
from speed.remote import EngineError, running
from speed.runner import Clock, TimeUpError
from study import GOES_ON, PUBLISHED, REPOSITORY, main_of, parser, write_between
from support.engine import ENGINE, NEW_TOKENS, PATIENCE, prompts
from support.families import EOS, FAMILIES, VOCAB, ModelFamily

from sglang_smc_tools.demo.serving import Launch

# --- One family: random weights, an engine, and the texts of transformers

MODES = ("smc", "exact", "auto")
LONGEST_NOTE = 200
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


def save(family: ModelFamily, folder: Path) -> str:
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


def _save_weights(family: ModelFamily, folder: Path) -> None:
    """Save what transformers makes of the configuration, spelled as published checkpoints are."""
    import torch
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


def try_family(family: ModelFamily, folder: Path) -> Trial:
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


def _with_smc(family: ModelFamily, path: str, folder: Path, log: Path) -> Trial:
    """Start a server in which the family drafts for itself, and compare greedy texts in all modes.

    The texts must equal those of transformers, or else those of SGLang without SMC: the two differ
    for some families. If the draft is the target, mode exact must keep every drafted token. If the
    family is refused only as a draft, a Llama drafts.
    """
    flags = {"model_path": path, **SMC, **dict(family.flags)}
    try:
        answers = _answers(log, MODES, speculative_draft_model_path=path, **flags)
        kept = all(one["meta_info"]["spec_accept_rate"] == 1 for one in answers["exact"])
        draft = "run" if kept else "failed"
        note = ""
    except EngineError:
        reasons = _reasons(log.read_text(errors="replace"))
        if not reasons:  # no refusal by SMC
            raise
        if "--model-path" in reasons:
            return Trial(family.name, "refused", "refused", reasons["--model-path"])
        llama = save(FAMILIES[0], folder / "llama")
        answers = _answers(log, MODES, speculative_draft_model_path=llama, **flags)
        draft = "refused"
        note = f"as a draft: {reasons['--speculative-draft-model-path']}"
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
    found = {}
    launch = Launch({**ENGINE, **arguments})
    try:
        with Clock(math.inf).at_most(PATIENCE), running(launch, log) as engine:
            for mode in modes:
                asked = params | ({"custom_params": {"smc": {"mode": mode}}} if mode else {})
                found[mode] = engine.generate(input_ids=prompts(), sampling_params=asked)
    except TimeUpError as error:
        raise EngineError("it did not answer") from error
    return found


def _transformers(family: ModelFamily, path: str) -> list[list[int]]:
    """Return greedy continuations with eager attention: faster kernels leave out logit caps."""
    import torch
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


# --- All families

RESULTS = PUBLISHED / "support" / "support.json"
PAGE = REPOSITORY / "docs" / "families.md"
MARKS = "<!-- made by bench/support -->", "<!-- end -->"
LONGEST = 64  # characters of a note on the page
WORDS = {"run": "yes", "refused": "refused", "not here": "not here", "failed": "**fails**"}


def main(argv: Sequence[str] | None = None) -> int:
    """Try the families; return exit status 0 if it completes."""
    made = parser("support", (__doc__ or "").splitlines()[0])
    names = [family.name for family in FAMILIES]
    made.add_argument("--only", nargs="+", default=[], choices=names, metavar="FAMILY")
    made.add_argument("--publish", action="store_true", help="write results and the page")
    made.add_argument("--features", action="store_true", help="features of SGLang, and their table")
    options = made.parse_args(argv)
    if options.features:
        from support.features import publish, run_features

        return main_of(lambda: publish(run_features(options.output_dir)), GOES_ON)
    return main_of(lambda: run(options), GOES_ON)


def run(options: argparse.Namespace) -> None:
    """Do what the options select."""
    path = options.output_dir / "trials.json"
    found = read(path)
    names = options.only or [family.name for family in FAMILIES if family.name not in found]
    wanted = [family for family in FAMILIES if family.name in names]
    for number, family in enumerate(wanted, 1):
        with tempfile.TemporaryDirectory() as folder:
            found[family.name] = trial = try_family(family, Path(folder))
        print(f"{number}/{len(wanted)}  {'  '.join(trial)}", flush=True)
        write(path, found)
    if options.publish:
        write(RESULTS, found, provenance=provenance({"vocabulary": VOCAB}))
        write_between(PAGE, MARKS, tables(found))


def read(path: Path) -> dict[str, Trial]:
    """Return the trials of an earlier run, by family."""
    if not path.exists():
        return {}
    return {one["family"]: Trial(**one) for one in json.loads(path.read_text())["families"]}


def write(path: Path, found: dict[str, Trial], **more: Any) -> None:
    """Write the trials, in the families' order."""
    rows = [found[family.name]._asdict() for family in FAMILIES if family.name in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**more, "families": rows}, indent=1) + "\n")


def tables(found: dict[str, Trial]) -> str:
    """Return a list for each kind of attention."""
    parts = []
    for attention, families in groupby(FAMILIES, key=lambda family: family.attention):
        parts += [f"**{attention.capitalize()}**\n", *items_of(list(families), found), ""]
    return "\n".join(parts).rstrip()


def items_of(families: Sequence[ModelFamily], found: dict[str, Trial]) -> Iterator[str]:
    """Yield an item for all families with the same result, in the order of the first ones."""
    named: dict[tuple[str, str, str], list[str]] = {}
    for trial in (found[family.name] for family in families if family.name in found):
        named.setdefault((trial.target, trial.draft, trial.note), []).append(trial.family)
    for (target, draft, note), names in named.items():
        why = f" ({shorten(note.partition('. ')[0], LONGEST, placeholder=' …')})" if note else ""
        yield f"- **Target {WORDS[target]}, draft {WORDS[draft]}**{why}: {'; '.join(names)}"
