"""Hold each request's logit edits in device tables: penalties with their counts, and biases.

One row of each table belongs to one request, under its index in SGLang's `req_to_token_pool`.
Unlike SGLang's own counts, these survive a retraction.
"""

from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_smc.kv.transfer import on_device
from sglang_smc.smc.edits import EditColumns, Edits
from sglang_smc.smc.settings import BatchSettings

_NEUTRAL = (0.0, 0.0, 1.0)


def has_edits(req: Req) -> bool:
    """Return whether a request has penalties, logit biases, or `min_new_tokens`."""
    return _penalizes(req) or _biases(req) or req.sampling_params.min_new_tokens > 0


class EditTable:
    """Edits of all requests that hold a row of SGLang's request pool.

    Counts and biases take 8 V bytes per row: 1 MB with a vocabulary of 128k. They are allocated
    with the first request that has an edit, unless `make_room` has been called before.

    Args:
        num_rows: rows of SGLang's request pool, the padding row included.
        vocab_size: V, of the logits.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: str) -> None:
        self._shape = num_rows, vocab_size
        self._device = device
        self._penalizes = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._biases = torch.zeros_like(self._penalizes)
        self._rates = torch.zeros(num_rows, len(_NEUTRAL), dtype=torch.float32, device=device)
        self._wide: tuple[torch.Tensor, torch.Tensor] | None = None  # counts and biases

    def make_room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate counts and biases once: captured CUDA graphs read at their addresses.

        Both are ``[rows, V]``; rows of requests without edits are never used.
        """
        if self._wide is None:
            self._wide = (
                torch.empty(self._shape, dtype=torch.int32, device=self._device),
                torch.empty(self._shape, dtype=torch.float32, device=self._device),
            )
        return self._wide

    def begin(self, reqs: list[Req], rows: list[int]) -> None:
        """Store the edits of requests in prefill, where all particles share their whole output."""
        at = on_device(self._device, rows)
        self._penalizes[at] = on_device(self._device, [_penalizes(req) for req in reqs])
        self._biases[at] = on_device(self._device, [_biases(req) for req in reqs])
        self._rates[at] = on_device(self._device, [_rates(req) for req in reqs], torch.float32)
        if not any(map(has_edits, reqs)):
            return
        counts, bias = self.make_room()
        for req, row in zip(reqs, rows, strict=True):
            if _penalizes(req):
                ids = on_device(self._device, list(req.output_ids), torch.int64)
                counts[row].zero_().index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))
            if biased := req.sampling_params.logit_bias:
                each = {int(token): value for token, value in biased.items()}
                biases = on_device(self._device, list(each.values()), torch.float32)
                bias[row].zero_().index_copy_(0, on_device(self._device, list(each)), biases)

    def of(
        self,
        reqs: Sequence[Req],
        rows: torch.Tensor,
        settings: BatchSettings,
        *,
        starts: torch.Tensor,
        texts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> Edits:
        """Return the edits of a batch; without requests, of any request in ``rows`` ``[G]``.

        ``starts``, ``texts`` and ``lengths`` are as in `Edits`.
        """
        groups = range(len(rows))
        counts, biases = self.make_room()
        columns = EditColumns(self._penalizes, self._biases, self._rates, counts, biases)
        edited = [group for group in groups if has_edits(reqs[group])] if reqs else groups
        return Edits(
            columns=columns,
            groups=edited,
            rows=rows,
            min_new_tokens=settings.min_new_tokens,
            stop_mask=settings.stop_mask,
            starts=starts,
            texts=texts,
            lengths=lengths,
        )


def _rates(req: Req) -> tuple[float, float, float]:
    params = req.sampling_params
    return params.frequency_penalty, params.presence_penalty, params.repetition_penalty


def _penalizes(req: Req) -> bool:
    return _rates(req) != _NEUTRAL


def _biases(req: Req) -> bool:
    return bool(req.sampling_params.logit_bias)
