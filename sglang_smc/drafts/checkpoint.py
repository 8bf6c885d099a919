"""Read the names, shapes and small tensors of a checkpoint, without its weights."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]

CONFIG = "config.json"
MASK = "mask_embedding.pt"
"""Of block heads: a trained embedding of the mask, beside the weights."""

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Files that SGLang loads weights from."""

SCALES = (".weight_scale", ".weight_scale_inv")
"""Ends of the names of a weight's scales, all factors: the second was named for an inverse."""

_WEIGHTS = PATTERNS[:2]
_QUANTIZED = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_PACKED = ("qweight", "weight_packed", "scales", "weight_scale", "weight_scale_inv", "absmax")
_OF_MISTRAL = "consolidated.safetensors"
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def folder_of(path: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return a checkpoint's folder: the path itself, or that of a downloaded Hugging Face id.

    Raises OSError or ValueError, by huggingface_hub, for an id that is not downloaded.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    known = snapshot_download(path, revision=revision, cache_dir=cache_dir, local_files_only=True)
    return Path(known)


def downloaded(path: str, revision: str | None = None) -> Path:
    """Return a checkpoint's folder as `folder_of`, its weights downloaded if they are not there.

    These are the files that SGLang loads later.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        folder = folder_of(path, revision)
    except (OSError, ValueError):
        folder = None
    from huggingface_hub import snapshot_download

    for pattern in _WEIGHTS:
        if folder is None or not _files(folder):
            wanted = [pattern, "*.json", MASK]
            folder = Path(snapshot_download(path, revision=revision, allow_patterns=wanted))
    assert folder is not None, "there are patterns"
    return folder


def shapes_in(folder: Path) -> Shapes:
    """Return name and shape of each tensor in a folder, from the files' headers.

    Raises ValueError, naming the file, if one cannot be read, or is not there.
    """
    shapes: Shapes = {}
    files = _files(folder)
    if absent := _absent(folder, files):
        raise ValueError(
            f"{folder} lacks {', '.join(absent)}, which the index of its weights names. Download "
            "the checkpoint anew."
        )
    for file in files:
        with _reading(file):
            shapes |= _shapes_of(file)
    return shapes


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files that weights may be in."""
    return any(any(folder.glob(pattern)) for pattern in PATTERNS)


def absent_from(folder: Path) -> list[str]:
    """Return the files that the index of a folder's weights names, and that are not there."""
    return _absent(folder, _files(folder))


def is_quantized(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> bool:
    """Return whether weights of a folder are saved in fewer bits, by settings or by their names."""
    told = config.get("quantization_config") or config.get("compression_config")
    has_file = any((folder / name).exists() for name in _QUANTIZED)
    return bool(told) or has_file or any(name.endswith(_PACKED) for name in shapes)


def tensor_in(folder: Path, name: str) -> "torch.Tensor | None":
    """Return a tensor of a folder by its name; None if there is none."""
    from safetensors import safe_open

    for file in _files(folder):
        if file.suffix == ".bin":
            if (found := _pickled(file, "cpu").get(name)) is not None:
                return found
            continue
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 -- it is no mapping
                return tensors.get_tensor(name)
    return None


def mask_in(folder: Path) -> Any:
    """Return what a folder has in `MASK`; None without that file.

    Raises ValueError, naming the file, if it cannot be read.
    """
    file = folder / MASK
    if not file.exists():
        return None
    with _reading(file):
        return _pickled(file, "cpu")


def _files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights, as SGLang finds them.

    It prefers safetensors, of those the ones that an index names, and Hugging Face's names to
    Mistral's own.
    """
    for pattern in _WEIGHTS:
        found = [one for one in sorted(folder.glob(pattern)) if one.name not in _NO_WEIGHTS]
        if not found:
            continue
        named = _indexed(folder) if pattern == _WEIGHTS[0] else set()
        known = [file for file in found if file.name in named]
        return known or [one for one in found if one.name != _OF_MISTRAL] or found
    return []


def _indexed(folder: Path) -> set[str]:
    """Return the files that the indices of a folder's weights name."""
    named: set[str] = set()
    for index in filter(Path.exists, map(folder.joinpath, _INDICES)):
        with _reading(index):
            named |= {*json.loads(index.read_text())["weight_map"].values()}
    return named


def _absent(folder: Path, files: list[Path]) -> list[str]:
    """Return the files that the index of a folder's weights names, and that are not there."""
    named = _indexed(folder)
    kinds = {file.suffix for file in files} or {Path(pattern).suffix for pattern in _WEIGHTS}
    return sorted(
        name for name in named if Path(name).suffix in kinds and not (folder / name).exists()
    )


def _shapes_of(file: Path) -> Shapes:
    from safetensors import safe_open

    if file.suffix == ".bin":
        return {name: tuple(one.shape) for name, one in _pickled(file, "meta").items()}
    with safe_open(file, framework="pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def _pickled(file: Path, device: str) -> dict[str, Any]:
    """Return the tensors of a pickled file, read as weights alone."""
    import torch

    # Files of before torch 1.6 are no archives, which alone can be mapped.
    return torch.load(file, map_location=device, mmap=is_zipfile(file), weights_only=True)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise ValueError for whatever safetensors or pickle raise of a broken file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {error}. Download it anew.") from error
