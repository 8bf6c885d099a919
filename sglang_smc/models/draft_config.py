"""Read the configuration of a draft's checkpoint, in any published format.

Everything that reads one comes through here: this package's checks, and SGLang's own `get_config`
(`patches/drafts.py`), from which servers build models. There a draft gets as many positions as the
target has.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from sglang.srt.utils.hf_transformers.common import CONTEXT_LENGTH_KEYS, get_context_length

from sglang_smc.drafts import checkpoint, reading

_FILE = "_configuration_file"  # the keyword by which transformers takes another file

_ORIGINAL = "original_max_position_embeddings"
# Rotations whose frequencies depend on the number of positions before they were scaled, for which
# SGLang takes max_position_embeddings where a configuration has none.
_SCALED = ("yarn", "deepseek_yarn", "llama3", "longrope")


def read(
    get_config: Callable[..., Any],
    path: Any,
    trust_remote_code: bool,
    revision: str | None = None,
    *rest: Any,
    **more: Any,
) -> Any:
    """Return a checkpoint's configuration by ``get_config``, with the keys of SGLang's classes.

    Args:
        get_config: SGLang's; the other arguments are its own.

    Raises ValueError for a draft whose tensors' names cannot be read.
    """
    told = _contents(path, revision, more.get(_FILE))
    if told is None or not reading.is_head(told):
        return get_config(path, trust_remote_code, revision, *rest, **more)
    folder = checkpoint.downloaded(path, revision)
    shapes = checkpoint.shapes_in(folder)
    wanted = reading.normalized(told, shapes or None)
    if wanted == told:
        return get_config(path, trust_remote_code, revision, *rest, **more)
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(wanted, file)
        file.flush()
        more |= {_FILE: file.name}
        return get_config(str(folder), trust_remote_code, revision, *rest, **more)


def _contents(path: Any, revision: str | None, file: str | None) -> dict[str, Any] | None:
    """Return the contents of a checkpoint's config.json; None if SGLang reads another file."""
    if not isinstance(path, str | Path):
        return None
    folder = Path(path)
    if folder.is_dir() or (file and Path(file).is_file()):
        try:
            told = json.loads((folder / (file or checkpoint.CONFIG)).read_text())
        except (OSError, ValueError):  # told by SGLang
            return None
        return told if isinstance(told, dict) else None
    if folder.exists() or "://" in str(path):
        return None
    from transformers import PretrainedConfig

    other = {_FILE: file} if file else {}
    try:
        return PretrainedConfig.get_config_dict(str(path), revision=revision, **other)[0]
    except (OSError, ValueError):  # told by SGLang
        return None


def trained_length(config: Any) -> int:
    """Return how many positions a model was trained on, by its Hugging Face configuration."""
    scaled = [
        int(rope[_ORIGINAL] * rope["factor"])
        for rope in _rotations(config)
        if "yarn" in _kind_of(rope) and {_ORIGINAL, "factor"} <= rope.keys()
    ]
    return max([get_context_length(config), *scaled])


def extend_positions(config: Any, length: int) -> None:
    """Give a model's Hugging Face configuration ``length`` positions, if it has fewer.

    Those that it has keep their rotations, and later ones go on at the same frequencies.
    """
    known = get_context_length(config)
    if length <= known:
        return
    own = vars(config)
    longest = own.get("max_position_embeddings") or known
    for rope in _rotations(config):
        if _kind_of(rope) in _SCALED:
            _keep_frequencies(rope, own.get(_ORIGINAL), longest)
    for name in {"max_position_embeddings", *CONTEXT_LENGTH_KEYS}:
        if own.get(name) is not None:
            setattr(config, name, math.ceil(own[name] * length / known))
    if get_context_length(config) < length:  # it says nothing
        config.max_position_embeddings = length


def _rotations(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of a model's rotary embeddings: of all layers, or of each type."""
    for name in ("rope_parameters", "rope_scaling"):
        told = vars(config).get(name)
        if isinstance(told, dict):
            yield told
            yield from (one for one in told.values() if isinstance(one, dict))


def _kind_of(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type"))


def _keep_frequencies(rope: dict[str, Any], original: int | None, longest: int) -> None:
    """Write down what SGLang would take from the number of positions, ``longest`` until now."""
    before = int(rope.setdefault(_ORIGINAL, original or longest))
    if _kind_of(rope) != "longrope":
        return
    grown = longest / before
    scale = math.sqrt(1 + math.log(grown) / math.log(before)) if grown > 1 else 1.0
    for name in ("short_mscale", "long_mscale"):
        if rope.get(name) is None:
            rope[name] = scale
