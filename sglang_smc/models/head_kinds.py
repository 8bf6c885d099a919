"""Classify a draft's checkpoint, and check what all kinds of heads have in common.

What one kind alone has is checked by its drafter, `DraftProposer.problems`.
"""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_smc.drafts import checkpoint, heads, language_models, reading, sizes
from sglang_smc.drafts.heads.base import Config, Kind, is_reduced
from sglang_smc.drafts.heads.dflash import BLOCKS
from sglang_smc.drafts.heads.eagle3 import EAGLE3
from sglang_smc.drafts.heads.mtp import MTP
from sglang_smc.models import draft_config
from sglang_smc.operator_code import at, load_class
from sglang_smc.options.server import SMCConfig, flag_of

_OTHER_CLASS = (
    f"allowed: a language model, a head of {', '.join(heads.BY_CLASS)}, or an MTP layer of this "
    "target. Choose another draft."
)
_OTHER_SETTING = (
    "allowed: settings that are read. Take out of config.json what concerns training alone; with "
    "another choose another draft."
)
_FIT = "allowed: a head that fits this target and these settings. Or choose another draft."
_WHOLE = (
    "allowed: the weights that its config.json describes, all of them. Download both anew, or "
    "choose another draft."
)


def kind_of(config: ModelConfig) -> Kind:
    return heads.kind_of(architecture_of(config))


def architecture_of(config: ModelConfig) -> str:
    return _named(config.hf_config)


def drafter_of(config: ModelConfig) -> Any:
    """Return the class of `proposers` that drafts with a checkpoint of this configuration."""
    found = heads.head_of(config.hf_config.to_dict())
    return at(heads.LANGUAGE_MODEL if found is None else found.drafter)


class Place(NamedTuple):
    """Where a checkpoint's configuration is read, by a server's resolved arguments."""

    path: str
    revision: str | None
    trusts: bool  # code of the checkpoint
    file: str | None  # in place of config.json

    @classmethod
    def of_draft(cls, view: Any) -> "Place":
        path = view.speculative_draft_model_path
        revision = view.speculative_draft_model_revision
        file = (view.decrypted_draft_config_file or "").strip()
        return cls(path, revision, view.trust_remote_code, file or None)

    @classmethod
    def of_target(cls, view: Any) -> "Place":
        file = (view.decrypted_config_file or "").strip()
        return cls(view.model_path, view.revision, view.trust_remote_code, file or None)


def has_mtp(place: Place) -> bool:
    """Return whether a checkpoint is of a target with an MTP layer."""
    config = _config_at(place)
    return _named(config) in MTP and 1 in num_mtp(config)


def num_mtp(config: Any) -> tuple[int | None, ...]:
    """Return the number of MTP layers by each key that a configuration may give it under."""
    told = config.to_dict() | config.get_text_config().to_dict()
    return told.get("num_nextn_predict_layers"), told.get("mtp_num_hidden_layers")


def take_mtp(config: ModelConfig) -> None:
    """Make a target's configuration that of its MTP layer, as SGLang does for drafts."""
    config.hf_config.architectures = [MTP[_named(config.hf_config)]]


def drafter_named(path: str) -> Any:
    """Return the class at ``path``, the value of --speculative-smc-draft-class.

    Raises ValueError unless it is a `DraftProposer`.
    """
    return load_class(flag_of("draft_class"), path, at(heads.INTERFACE))


def reads_states(server_args: Any) -> bool:
    """Return whether the draft of these arguments is a head over the target's hidden states."""
    if server_args.speculative_draft_model_path is None:
        return False
    place = Place.of_draft(server_args)
    is_head = _named(_config_at(place)) in heads.BY_CLASS
    return is_head or (place.path == server_args.model_path and has_mtp(place))


def sizes_for(view: Any, target: ModelConfig, config: SMCConfig) -> sizes.Chosen:
    """Return the N and K of a server with these resolved arguments that is given none."""
    is_mixture = sizes.is_mixture(target.hf_config.to_dict())
    return sizes.choose(*_draft_of(view), config, is_mixture=is_mixture)


def _draft_of(view: Any) -> tuple[str, Config | None]:
    """Return the kind of a server's draft, a key of `sizes.ROWS`, and its configuration if any."""
    if view.speculative_smc_draft_class is not None:
        return sizes.OWN, None
    if view.speculative_draft_model_path is None:
        return sizes.NGRAM, None
    place = Place.of_draft(view)
    if place.path == view.model_path and has_mtp(place):
        return "mtp", None
    config = _config_at(place)
    return heads.kind_of(_named(config)), config.to_dict()


def knows_all(server_args: Any) -> bool:
    """Return whether a draft can propose every token: a head may lack rare ones, or most."""
    config = _config_at(Place.of_draft(server_args))
    found = heads.head_of(config.to_dict())
    if found is None:
        return True
    cuts = found.kind in ("eagle3", "dflash") and is_reduced(config.to_dict())
    return not cuts and not found.is_narrow


@cache
def _config_at(place: Place) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    other = {"_configuration_file": place.file} if place.file else {}
    return draft_config.read(get_config, place.path, place.trusts, place.revision, **other)


def _named(config: Any) -> str:
    """Return the architecture of a Hugging Face configuration."""
    return (config.architectures or [""])[0]


class Misfit(NamedTuple):
    """Say what in a draft's checkpoint does not fit a server: a phrase that follows its path.

    One that ends with a full stop says itself what to do.
    """

    what: str
    cure: str = ""  # empty where the phrase says what to do

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}" if self.cure and self.what[-1] != "." else self.what


def draft_problems(
    config: ModelConfig, target: ModelConfig, num_steps: int, *, has_files: bool = True
) -> Iterator[Misfit]:
    """Yield what of a draft, a language model or a head, does not fit a server.

    Args:
        has_files: whether its weights are loaded from its files.
    """
    if found := [*_class_problems(config)]:
        yield from (Misfit(what, _OTHER_CLASS) for what in found)
        return
    if kind_of(config) != "model":
        if unknown := config.hf_config.to_dict().get(reading.UNKNOWN):
            what = f"sets {', '.join(unknown)} in its config.json, which nothing here reads"
            yield Misfit(what, _OTHER_SETTING)
        drafter = drafter_of(config)
        yield from (Misfit(what, _FIT) for what in drafter.problems(config, target, num_steps))
        misfits = [*_width_problems(config, target), *_layer_problems(drafter, config, target)]
        if misfits:
            yield from (Misfit(what, _FIT) for what in misfits)
            return
    if has_files:
        yield from _weight_problems(config, target)


def _class_problems(config: ModelConfig) -> Iterator[str]:
    """Yield what a draft is, if it is a head of no class that can be run."""
    name = architecture_of(config)
    told = config.hf_config.to_dict()
    if (type_of := told.get(reading.SPECULATORS)) and type_of not in heads.BY_TYPE:
        what = heads.reason_of_type(type_of) or "a head of an unknown type"
        yield f"is {what} ({reading.SPECULATORS} is {type_of!r})"
    elif name not in heads.BY_CLASS:
        if (what := heads.reason_of_class(name)) is not None:
            yield f"is {what} ({name})"
        elif "draft_vocab_size" in told:
            yield (
                f"is an EAGLE-3 head that names {name} in its config.json. Write {EAGLE3} there."
            )


def _weight_problems(config: ModelConfig, target: ModelConfig) -> Iterator[Misfit]:
    """Yield what of a draft's weights would not be loaded or computed with, by their files.

    Nothing is told of a Hugging Face id that is not downloaded yet, or in part; nor of a folder
    without weights where the target is one, too: such a pair is planned for.
    """
    is_folder = Path(config.model_path).is_dir()
    try:
        folder = checkpoint.folder_of(config.model_path, config.revision)
    except (OSError, ValueError):
        return
    if not checkpoint.has_weights(folder):
        if is_folder and _has_weights(target):
            yield Misfit(f"has no weights, {' or '.join(checkpoint.PATTERNS)}", _WHOLE)
        return
    if not is_folder and checkpoint.absent_from(folder):
        return
    try:
        shapes = checkpoint.shapes_in(folder)
    except ValueError as error:
        yield Misfit(f"has weights that cannot be loaded: {error}")
        return
    if shapes and kind_of(config) == "model":
        packed = checkpoint.is_quantized(folder, config.hf_config.to_dict(), shapes)
        named = architecture_of(config)
        found = language_models.problems(config.hf_config, named, shapes, packed)
        yield from (Misfit(what, _WHOLE) for what in found)
    elif shapes:
        found = _head_weight_problems(config, target, folder, shapes)
        yield from (Misfit(what, _WHOLE) for what in found)


def _head_weight_problems(
    config: ModelConfig, target: ModelConfig, folder: Path, shapes: checkpoint.Shapes
) -> Iterator[str]:
    told = config.hf_config.to_dict()
    yield from reading.problems(told, shapes, partial(checkpoint.tensor_in, folder))
    name = next((name for name in shapes if name.endswith("embed_tokens.weight")), None)
    if kind_of(config) == "dflash" and name and not _is_targets(folder, name, target):
        yield f"has {name} of its own, which is not the target's; block heads embed by the target's"


def _has_weights(config: ModelConfig) -> bool:
    path = Path(config.model_path)
    return not path.is_dir() or checkpoint.has_weights(path)


def _is_targets(folder: Path, name: str, target: ModelConfig) -> bool:
    """Return whether a draft's embedding equals the target's, by their files."""
    of_target = checkpoint.folder_of(target.model_path, target.revision)
    names = (one for one in checkpoint.shapes_in(of_target) if one.endswith("embed_tokens.weight"))
    tables = checkpoint.tensor_in(folder, name), checkpoint.tensor_in(of_target, next(names, ""))
    own, known = tables
    return own is not None and known is not None and torch.equal(own, known.to(own.dtype))


def _width_problems(config: ModelConfig, target: ModelConfig) -> Iterator[str]:
    """Yield mismatches of width: heads take hidden states, and mostly embeddings, of the target."""
    own = config.hf_config
    reads = own.to_dict().get("target_hidden_size") or config.hidden_size
    if reads != target.hidden_size:
        yield f"reads states of width {reads}, and the target's have {target.hidden_size}"
    has_all = architecture_of(config) not in BLOCKS
    if has_all and config.vocab_size != target.vocab_size:
        yield f"has vocab_size {config.vocab_size}, and the target {target.vocab_size}"


def is_tied(config: ModelConfig) -> bool:
    return bool(config.hf_config.get_text_config().to_dict().get("tie_word_embeddings"))


def _layer_problems(drafter: Any, config: ModelConfig, target: ModelConfig) -> Iterator[str]:
    if not drafter.captures_by:  # it reads the last layer's output
        return
    last = target.num_hidden_layers - 2  # the last layer's output is not captured
    try:
        layers = drafter.captured_layers(config, target.num_hidden_layers)
    except ValueError as error:
        yield f"cannot be read: {error}"
        return
    if layers is None:  # SGLang's default for EAGLE-3, as inputs of the layers behind
        count = target.num_hidden_layers
        layers = [1, count // 2 - 1, count - 4]
    if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
        yield (
            f"reads layers {layers} of the target, {twice} more than once; SGLang gives out the "
            "states of different layers"
        )
        return
    boundaries = "GptOssForCausalLM" in (target.hf_config.architectures or ())
    if boundaries and max(layers) == target.num_hidden_layers:  # counted as layers' inputs
        return
    wrong = [layer for layer in layers if not 0 <= layer <= last]
    if wrong:
        yield f"reads what layers {wrong} of the target pass on; it gives out those of 0 to {last}"
