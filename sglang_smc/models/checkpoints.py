"""What a checkpoint on disk holds, looked at before a running server loads it.

SGLang loads weights in place. A checkpoint that does not fit, or is not written to its end,
would be noticed half way, when what it replaces is gone.
"""

from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def reason_not_to_load(path: str, loaded: str) -> str | None:
    """Why the checkpoint at ``path`` cannot replace the one that was ``loaded``; None if it can.

    The two must have the same tensors, by name and shape.
    """
    try:
        new, old = tensor_shapes(path), tensor_shapes(loaded)
    except Exception as error:  # whatever stands in the way is what the operator has to hear
        return f"{path!r} cannot replace {loaded!r}: {error}"
    differing = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
    if not differing:
        return None
    name = differing[0]
    return (
        f"{path!r} cannot replace {loaded!r}: {len(differing)} tensors differ, {name} is "
        f"{_shape(new, name)} instead of {_shape(old, name)}. Allowed: a checkpoint of the same "
        "architecture and size; start a new server for another."
    )


def tensor_shapes(path: str) -> Shapes:
    """Name and shape of each tensor in the checkpoint at ``path``, read from its files' headers.

    Args:
        path: a folder, or a Hugging Face id that has been downloaded.

    Raises:
        ValueError: there are no safetensors.
        Exception: what reading them raises, such as for a file that is cut off.
    """
    from safetensors import safe_open

    files = sorted(_folder(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"there are no *.safetensors in {path!r}")
    shapes: Shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    return shapes


def _folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))


def _shape(shapes: Shapes, name: str) -> Any:
    return list(shapes[name]) if name in shapes else "absent"
