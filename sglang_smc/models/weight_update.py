"""New weights for a running server's target and draft.

Weights and verification correct for whatever draft there is, if not at the same speed. So an update
that names no draft keeps it.
"""

import pickletools
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_smc import upstream
from sglang_smc.models.checkpoints import reason_not_to_load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang.srt.managers.io_struct import (
        UpdateWeightFromDiskReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.managers.tp_worker import TpModelWorker

DRAFT_KEY = "draft_model_path"
"""The key in the `manifest` of an update from disk that names the draft's new checkpoint."""

DRAFT_PREFIX = "draft."
"""What the names of the draft's tensors begin with where no request selects a model."""

LOAD_FORMATS = ("auto", "safetensors")

_NO_DRAFT = "New weights are for the draft, and this server has no draft model. Leave them out."


class WeightUpdates(BaseSpecWorker):
    """The part of the worker that takes new weights; `patches/weights.py` asks it."""

    _draft_worker: "TpModelWorker | None"

    @property
    def draft_worker(self) -> "TpModelWorker | None":
        """The draft's, which is a whole model or a head; None where there is none."""
        return self._draft_worker

    def reason_not_to_update(self, recv_req: "UpdateWeightFromDiskReqInput") -> str | None:
        """Why an update from disk would fail; nothing has been loaded when it is asked."""
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
        return self._reason_not_to_load(recv_req)

    def _reason_not_to_load(self, recv_req: "UpdateWeightFromDiskReqInput") -> str | None:
        found = [_reason(recv_req.model_path, self.target_worker)]
        draft = _draft_path(recv_req)
        if draft is not None:
            own = self.draft_worker
            found.append(_NO_DRAFT if own is None else _reason(draft, own))
        return next((reason for reason in found if reason is not None), None)

    def load_draft(self, recv_req: "UpdateWeightFromDiskReqInput") -> str | None:
        """Load the draft's checkpoint, if the request names one; why that failed, if it did."""
        path = _draft_path(recv_req)
        if path is None:
            return None
        assert self.draft_worker is not None, "`reason_not_to_update` was asked before"
        updater = self.draft_worker.model_runner.weight_updater
        assert recv_req.load_format is not None, "SGLang's tokenizer manager fills in the server's"
        success, message = updater.update_weights_from_disk(path, recv_req.load_format)
        return None if success else message

    def update_weights_from_tensor(
        self, recv_req: "UpdateWeightsFromTensorReqInput"
    ) -> tuple[bool, str]:
        """Load tensors named ``draft.…`` into the draft, all others into the target.

        SGLang asks where requests select no model.
        """
        tensors = self.target_worker._deserialize_own_rank(  # pyright: ignore[reportAttributeAccessIssue] -- 0.5.17
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
        for worker, named in ((self.target_worker, own), (self.draft_worker, drafts)):
            if named and worker is None:
                return False, _NO_DRAFT
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


def names_in(payload: bytes) -> "Iterator[str]":
    """The strings in serialized tensors, their names among them; no tensor is read.

    A tensor of another process must be read only once: reading takes a reference that is counted.
    """
    return (arg for _, arg, _ in pickletools.genops(payload) if isinstance(arg, str))


def reason_not_to_name(names: "Iterable[str]") -> str | None:
    """Why tensors of these names are not taken where requests select their model."""
    if not upstream.SELECTS_MODELS:
        return None
    named = next((name for name in names if name.startswith(DRAFT_PREFIX)), None)
    if named is None:
        return None
    return (
        f"A tensor is named {named!r}; allowed: names as in its own checkpoint. Send the draft's "
        "without 'draft.', in an update with selector='draft'."
    )


def _draft_path(recv_req: "UpdateWeightFromDiskReqInput") -> str | None:
    return (recv_req.manifest or {}).get(DRAFT_KEY)


def _reason(path: str, worker: "TpModelWorker") -> str | None:
    return reason_not_to_load(path, worker.model_runner.model_config.model_path)
