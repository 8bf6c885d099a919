"""Cut a draft model's LM head to hot tokens, the frequent ones: FR-Spec (arXiv 2502.14856).

A small model over a large vocabulary spends much of each pass on its LM head. Only the rows of
tokens in `--speculative-token-map` are multiplied; q has no mass on others.
"""

from pickle import UnpicklingError
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_utils import load_token_map

_FLAG = "--speculative-token-map"
_UNREADABLE = OSError, ValueError, TypeError, RuntimeError, EOFError, UnpicklingError


def read_map(path: str, width: int) -> torch.Tensor:
    """Read the token ids ``[H]`` int64 of a map, in its order.

    Args:
        path: of a list of ids that `torch.save` wrote, or OWNER/NAME/FILE on Hugging Face.
        width: of the logits that both models have.

    Raises ValueError for a file that cannot be read, and for ids that repeat or are out of range.
    """
    try:
        hot = torch.as_tensor(load_token_map(path))
    except _UNREADABLE as error:
        raise ValueError(
            f"{_FLAG} {path} cannot be read: {error}. Pass a file that torch.save wrote, with a "
            "list of token ids, or one of a Hugging Face repository as OWNER/NAME/FILE."
        ) from error
    known = hot[(hot >= 0) & (hot < width)].unique()
    if hot.ndim != 1 or not 0 < len(known) == len(hot):
        raise ValueError(
            f"{_FLAG} {path} has {hot.numel()} token ids in {hot.ndim} dimensions, {len(known)} of "
            f"them different and from 0 to {width - 1}, which target and draft both have; allowed: "
            "a list of such ids. Count tokens with the draft's tokenizer."
        )
    return hot


def lm_head_of(model: torch.nn.Module) -> Any:
    """Return the LM head of a model, or the embedding in its place; None where none is found."""
    places = dict(model.named_modules(remove_duplicate=False))
    ends = ((end, place) for end in ("lm_head", "embed_tokens") for place in places)
    return next((places[place] for end, place in ends if place.split(".")[-1] == end), None)


def cut_head(model: Any, hot: torch.Tensor) -> torch.nn.Module:
    """Have a loaded model compute logits ``[..., H]`` of the tokens ``hot`` ``[H]`` alone.

    Returns the LM head of these rows. They are a copy, at one address, and follow new weights. A
    table that is the embedding too stays whole; another is freed. Ranks have equal shares of the
    rows, the last ones padded.

    Raises ValueError for a model whose LM head is quantized, or not known.
    """
    head = lm_head_of(model)
    sharded = isinstance(head, VocabParallelEmbedding)
    if not isinstance(head, torch.nn.Embedding) and not (
        sharded and isinstance(head.quant_method, UnquantizedEmbeddingMethod)
    ):
        raise ValueError(
            f"{_FLAG} is given with a draft of {type(model).__name__}, whose LM head is quantized "
            "or of an unknown kind; allowed: one with plain weights. Leave the flag out, or choose "
            "another draft."
        )
    cut = CutHead(model, head, hot)

    def put_in_place(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        input_ids, states, passed, *others = given
        assert passed is head, "the model passes another LM head than the one of that name"
        return input_ids, states, cut, *others

    for each in model.modules():
        if isinstance(each, LogitsProcessor):
            each.register_forward_pre_hook(put_in_place)
    model.hot_token_id = hot  # as of SGLang's heads
    return cut


class CutHead(torch.nn.Module):
    """The rows of a loaded model's LM head at tokens ``hot`` ``[H]``, in the head's place."""

    def __init__(
        self,
        model: torch.nn.Module,
        head: VocabParallelEmbedding | torch.nn.Embedding,
        hot: torch.Tensor,
    ) -> None:
        super().__init__()
        self._hot = hot
        self._num_ranks = 1
        table: Any = head.weight
        if isinstance(head, VocabParallelEmbedding):
            self._num_ranks = head.tp_size
            rows = VocabParallelEmbedding.forward(head, hot)  # [H, hidden]; an LM head's own raises
        else:
            rows = table[hot]  # [H, hidden]
        self.weight = torch.nn.Parameter(self._share(rows).clone(), requires_grad=False)
        named = model.named_parameters(remove_duplicate=False)
        places = [place for place, parameter in named if parameter is table]
        self._load_table = None
        if all(place.endswith("lm_head.weight") for place in places):
            table.data = table.new_empty(0, table.shape[1])
        else:  # it is the embedding, too
            self._load_table = vars(table).get("weight_loader", default_weight_loader)
        table.weight_loader = self._load

    def _share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's ``[ceil(H / ranks), hidden]`` of the rows."""
        if self._num_ranks == 1:
            return rows
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % self._num_ranks))
        return padded.chunk(self._num_ranks)[get_parallel().tp_rank]

    def _load(self, table: torch.nn.Parameter, weights: torch.Tensor) -> None:
        """Take new weights ``[V, hidden]``, as SGLang's loader of the table."""
        if self._load_table is not None:
            self._load_table(table, weights)
        rows = self._share(weights[self._hot.to(weights.device)])
        vars(self.weight).get("weight_loader", default_weight_loader)(self.weight, rows)
