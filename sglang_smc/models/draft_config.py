"""Read the configuration of a draft's checkpoint, in any published format.

Everything that reads one comes through here: this package's checks, and SGLang's own `get_config`
(`patches/drafts.py`), from which servers build models.
"""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from sglang_smc.drafts import checkpoint, formats

_FILE = "_configuration_file"  # the keyword by which transformers takes another file


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
    if told is None or not formats.is_head(told):
        return get_config(path, trust_remote_code, revision, *rest, **more)
    folder = checkpoint.downloaded(path, revision)
    shapes = checkpoint.shapes_in(folder)
    wanted = formats.normalized(told, shapes or None)
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
