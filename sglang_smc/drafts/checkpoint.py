"""Read the names, shapes and small tensors of a checkpoint, without its weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]

CONFIG = "config.json"
MASK = "mask_embedding.pt"
"""Of block heads: a trained embedding of the mask, beside the weights."""

_WEIGHTS = ("*.safetensors", "*.bin")


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

    Raises ValueError, naming the file, if one cannot be read.
    """
    shapes: Shapes = {}
    for file in _files(folder):
        try:
            shapes |= _shapes_of(file)
        except Exception as error:  # of safetensors or pickle, whatever a broken file raises
            raise ValueError(f"{file} cannot be read: {error}. Download it anew.") from error
    return shapes


def tensor_in(folder: Path, name: str) -> "torch.Tensor | None":
    """Return a tensor of a folder by its name; None if there is none."""
    from safetensors import safe_open

    for file in _files(folder):
        if file.suffix == ".bin":
            if (found := pickled(file, "cpu").get(name)) is not None:
                return found
            continue
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 -- it is no mapping
                return tensors.get_tensor(name)
    return None


def _files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights: SGLang prefers safetensors."""
    for pattern in _WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return [file for file in found if file.name != "training_args.bin"]
    return []


def _shapes_of(file: Path) -> Shapes:
    from safetensors import safe_open

    if file.suffix == ".bin":
        return {name: tuple(one.shape) for name, one in pickled(file, "meta").items()}
    with safe_open(file, framework="pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def pickled(file: Path, device: str) -> dict[str, Any]:
    """Return the tensors of a pickled file, read as weights alone."""
    import torch

    return torch.load(file, map_location=device, mmap=True, weights_only=True)
