"""New weights for a running server's target and draft.

Weights and verification correct for whatever draft there is, if not at the same speed. So an update
that names no draft keeps it.
"""

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_smc.models.checkpoints import reason_not_to_load

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import (
        UpdateWeightsFromIPCReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.managers.tp_worker import TpModelWorker

DRAFT_KEY = "draft_model_path"
"""The key in the `manifest` of an update from disk that names the draft's new checkpoint."""

DRAFT_PREFIX = "draft."
"""What the names of the draft's tensors begin with, as in SGLang's /weights_checker."""

LOAD_FORMATS = ("auto", "safetensors")

_KEEPS_DRAFT = "Succeeded to update model weights. The draft keeps its own."


class WeightUpdates(BaseSpecWorker):
    """The part of the worker that takes new weights; SGLang updates the target first."""

    _draft_worker: "TpModelWorker"

    @property
    def draft_worker(self) -> "TpModelWorker":
        """The draft's, which is a whole model."""
        return self._draft_worker

    def reason_not_to_update(self, recv_req: UpdateWeightFromDiskReqInput) -> str | None:
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

    def _reason_not_to_load(self, recv_req: UpdateWeightFromDiskReqInput) -> str | None:
        found = [_reason(recv_req.model_path, self.target_worker)]
        draft = _draft_path(recv_req)
        if draft is not None:
            found.append(_reason(draft, self.draft_worker))
        return next((reason for reason in found if reason is not None), None)

    def update_weights_from_disk(self, recv_req: UpdateWeightFromDiskReqInput) -> tuple[bool, str]:
        """Load the draft's weights, if the request names any; the target has its own by now."""
        path = _draft_path(recv_req)
        if path is None:
            return True, _KEEPS_DRAFT
        updater = self.draft_worker.model_runner.weight_updater
        assert recv_req.load_format is not None, "SGLang's tokenizer manager fills in the server's"
        return updater.update_weights_from_disk(path, recv_req.load_format)

    def update_weights_from_ipc(self, recv_req: "UpdateWeightsFromIPCReqInput") -> tuple[bool, str]:
        """Keep the draft: a checkpoint engine sends one model's weights, the target's."""
        return True, _KEEPS_DRAFT

    def update_weights_from_tensor(
        self, recv_req: "UpdateWeightsFromTensorReqInput"
    ) -> tuple[bool, str]:
        """Load tensors named ``draft.…`` into the draft, all others into the target."""
        try:
            tensors = self.target_worker._deserialize_own_rank(recv_req.serialized_named_tensors)
        except Exception as error:  # nothing is loaded yet, so nobody else need hear of it
            return False, f"The tensors cannot be read: {error}"
        if recv_req.load_format == "flattened_bucket":
            return self._update_from_bucket(tensors)
        own = [pair for pair in tensors if not pair[0].startswith(DRAFT_PREFIX)]
        drafts = [
            (name.removeprefix(DRAFT_PREFIX), tensor)
            for name, tensor in tensors
            if name.startswith(DRAFT_PREFIX)
        ]
        for worker, named in ((self.target_worker, own), (self.draft_worker, drafts)):
            if named:
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


def _draft_path(recv_req: UpdateWeightFromDiskReqInput) -> str | None:
    return (recv_req.manifest or {}).get(DRAFT_KEY)


def _reason(path: str, worker: "TpModelWorker") -> str | None:
    return reason_not_to_load(path, worker.model_runner.model_config.model_path)
