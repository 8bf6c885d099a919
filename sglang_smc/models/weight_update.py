"""Load new weights into a running server's target and draft.

Weights and verification correct for any draft, if not at the same speed. So an update that names no
draft keeps it. SGLang loads weights in place: a checkpoint that does not fit, or is incomplete,
would fail half way, when the old weights are gone. So it is validated on disk first, against what
the server started with, whose files may have changed or gone.
"""

import hashlib
import pickletools
from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.managers.io_struct import (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_smc import __version__, upstream
from sglang_smc.drafts.checkpoint import SCALES, Shapes, folder_of


def reason_not_to_load(path: str, old: Shapes | str) -> str | None:
    """Return why the checkpoint at ``path`` cannot replace one of ``old`` tensors; None if it can.

    The two must have the same tensors, by name and shape.
    """
    new = tensor_shapes(path)
    if isinstance(new, str) or isinstance(old, str):
        return f"{path!r} cannot be loaded: {new if isinstance(new, str) else old}"
    differing = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
    if not differing:
        return None
    name = differing[0]
    return (
        f"{path!r} cannot be loaded: {len(differing)} tensors differ, {name} is "
        f"{_shape(new, name)} instead of {_shape(old, name)}. Allowed: a checkpoint of the same "
        "architecture and size; start a new server for another."
    )


def tensor_shapes(path: str) -> Shapes | str:
    """Return name and shape of each tensor in a checkpoint, read from its files' headers.

    If they cannot be read, return the error. The path may be a downloaded Hugging Face id.
    """
    from safetensors import safe_open

    shapes: Shapes = {}
    try:
        for file in folder_of(path).glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys()
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except Exception as error:  # reported to the operator, whatever it is
        return str(error)
    return shapes or f"there are no *.safetensors in {path!r}"


# Arguments that KV depends on, beside checkpoints.
_OF_KV = (
    "dtype quantization quantization_param_path kv_cache_dtype modelopt_quant quantize_and_serve "
    "rl_quant_profile json_model_override_args context_length model_impl model_loader_extra_config "
    "custom_weight_loader decrypted_config_file decrypted_draft_config_file hicache_mem_layout "
    "speculative_draft_model_quantization speculative_draft_kv_cache_dtype attention_backend "
    "prefill_attention_backend"
)


def name_of_kv(server_args: upstream.Arguments) -> str:
    """Return a digest that two servers share only if they compute the same KV from the same text.

    It covers releases, and the files of checkpoints and adapters: names, sizes, times of change.
    """
    view = upstream.resolved(server_args)
    releases = (upstream.release(), __version__)
    draft = view.speculative_draft_model_path, view.speculative_draft_model_revision
    adapters = ((adapter.lora_path, None) for adapter in view.lora_paths or ())
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for path, revision in ((view.model_path, view.revision), draft, *adapters)
        for file in (sorted(folder_of(path, revision, view.download_dir).iterdir()) if path else ())
    ]
    given = [getattr(view, field) for field in _OF_KV.split()]
    return hashlib.sha256(repr((releases, files, given)).encode()).hexdigest()[:16]


def _shape(shapes: Shapes, name: str) -> Any:
    return list(shapes[name]) if name in shapes else "absent"


DRAFT_KEY = "draft_model_path"
"""The key in the `manifest` of an update from disk that names the draft's new checkpoint."""

DRAFT_PREFIX = "draft."
"""The prefix of names of the draft's tensors, where requests do not select a model."""

LOAD_FORMATS = ("auto", "safetensors")

NO_DRAFT = "New weights are for the draft, and this server has no draft model. Leave them out."


class WeightUpdates(BaseSpecWorker):
    """The worker's interface for weight updates, which `patches/weights.py` calls."""

    _draft_worker: TpModelWorker | None
    _shapes: dict[TpModelWorker, Shapes | str]  # or why they cannot be read

    def read_shapes(self) -> None:
        workers = filter(None, (self.target_worker, self.draft_worker))
        paths = ((worker, worker.model_runner.model_config.model_path) for worker in workers)
        self._shapes = {worker: tensor_shapes(path) for worker, path in paths}

    @property
    def draft_worker(self) -> TpModelWorker | None:
        return self._draft_worker

    def reason_not_to_update(self, recv_req: UpdateWeightFromDiskReqInput) -> str | None:
        """Return why an update from disk would fail, before anything is loaded; None if not."""
        manifest = recv_req.manifest or {}
        if set(manifest) - {DRAFT_KEY} or not isinstance(manifest.get(DRAFT_KEY, ""), str):
            return f"manifest is {manifest!r}; allowed: {{{DRAFT_KEY!r}: a path}}, or none."
        if recv_req.load_format not in (None, *LOAD_FORMATS):
            return (
                f"load_format is {recv_req.load_format!r}; allowed: {' or '.join(LOAD_FORMATS)}. "
                "Leave it out."
            )
        if recv_req.recapture_cuda_graph:
            return (
                "recapture_cuda_graph is True; allowed: False, since weights are loaded in place "
                "and captured rounds go on reading them. Leave it out."
            )
        reason = reason_not_to_load(recv_req.model_path, self._shapes[self.target_worker])
        if reason is not None or (draft := manifest.get(DRAFT_KEY)) is None:
            return reason
        own = self.draft_worker
        return NO_DRAFT if own is None else reason_not_to_load(draft, self._shapes[own])

    def load_draft(self, recv_req: UpdateWeightFromDiskReqInput) -> str | None:
        """Load the draft's checkpoint, if the request names one; return an error or None."""
        path = (recv_req.manifest or {}).get(DRAFT_KEY)
        if path is None:
            return None
        assert self.draft_worker is not None, "`reason_not_to_update` was asked before"
        updater = self.draft_worker.model_runner.weight_updater
        assert recv_req.load_format is not None, "SGLang's tokenizer manager fills in the server's"
        success, message = updater.update_weights_from_disk(path, recv_req.load_format)
        return None if success else message

    def update_weights_from_tensor(
        self, recv_req: UpdateWeightsFromTensorReqInput
    ) -> tuple[bool, str]:
        """Load tensors named ``draft.…`` into the draft, all others into the target.

        SGLang calls this on releases where requests select no model.
        """
        tensors = self.target_worker._deserialize_own_rank(  # pyright: ignore[reportAttributeAccessIssue] -- OLDER
            recv_req.serialized_named_tensors
        )
        if recv_req.load_format == "flattened_bucket":
            return self._update_from_bucket(tensors)
        own = [pair for pair in tensors if not pair[0].startswith(DRAFT_PREFIX)]
        drafts = [
            (name.removeprefix(DRAFT_PREFIX), tensor)
            for name, tensor in tensors
            if name.startswith(DRAFT_PREFIX)
        ]
        if drafts and self.draft_worker is None:
            return False, NO_DRAFT
        for worker, named in ((self.target_worker, own), (self.draft_worker, drafts)):
            if named and worker is not None:
                updater = worker.model_runner.weight_updater
                success, message = updater.update_weights_from_tensor(named, recv_req.load_format)
                if not success:
                    return success, message
        return True, "Success"

    def _update_from_bucket(self, bucket: dict[str, Any]) -> tuple[bool, str]:
        named = [entry.name for entry in bucket["metadata"]]
        if any(name.startswith(DRAFT_PREFIX) for name in named):
            return False, (
                "A flattened bucket has tensors named 'draft.…'; allowed: the target's alone. "
                "Send the draft's without load_format."
            )
        updater = self.target_worker.model_runner.weight_updater
        return updater.update_weights_from_tensor(
            bucket,  # pyright: ignore[reportArgumentType] -- a dict in this format
            "flattened_bucket",
        )


def names_in(payload: bytes) -> Iterator[str]:
    """Return the strings in serialized tensors, their names among them, without loading tensors.

    A tensor of another process must be loaded only once, since loading takes a counted reference.
    """
    return (arg for _, arg, _ in pickletools.genops(payload) if isinstance(arg, str))


def reason_not_to_name(names: Iterable[str]) -> str | None:
    """Return why tensors of these names are refused where requests select their model."""
    if not upstream.SELECTS_MODELS:
        return None
    named = next((name for name in names if name.startswith(DRAFT_PREFIX)), None)
    if named is None:
        return None
    return (
        f"A tensor is named {named!r}; allowed: names as in its own checkpoint. Send the draft's "
        "without 'draft.', in an update with selector='draft'."
    )


def reason_not_to_scale(names: Iterable[str]) -> str | None:
    """Return why tensors of these names, sent to a CPU server, are refused; None if not."""
    scale = next((name for name in names if name.endswith(SCALES)), None)
    if scale is None:
        return None
    return (
        f"A tensor is named {scale!r}: the smc_cpu platform dequantizes weights of files alone. "
        "Allowed: weights in 16 or 32 bits. Send them dequantized, or update from disk."
    )
