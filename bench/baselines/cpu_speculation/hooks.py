"""Run SGLang's own speculative decoding on a CPU: torch in place of kernels."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.platforms import current_platform

from sglang_smc.server.hooks import Hooks
from sglang_smc.upstream import NEWEST

from . import attention, trees

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.draft_utils import DraftBackendFactory


_OPS = "sglang.kernels.ops.speculative."
_SPEC = "sglang.srt.speculative."
_CACHE = "sglang.srt.mem_cache."
_WHY = (
    "SGLang launches a kernel there, of Triton or CUDA. Platforms are asked for one such function, "
    "`get_speculative_cache_locs_fn`, and not for this."
)
_RETIRE = "SGLang asks platforms for it, or has it in torch for those without Triton."
PATCHES = Hooks(why=_WHY, retire_when=_RETIRE)


@PATCHES.on(
    _SPEC + "draft_utils.DraftBackendFactory._create_backend",
    "srt/speculative/draft_utils.py:63",
    why="The attention of drafts comes from a table of names without `torch_native`.",
    retire_when="SGLang asks platforms for it, or the registry of attention backends.",
    family=NEWEST,
)
def create_backend(
    original: Callable,
    factory: "DraftBackendFactory",
    backend_name: str,
    backend_map: dict[str, Callable],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Create a draft's attention under the name of this platform's backend.

    With ``stamps_children`` it is that of the draft's passes, else that of its extend.
    """
    name = current_platform.get_default_attention_backend()
    draft = factory.draft_model_runner
    topk = factory.topk
    num_steps = factory.speculative_num_steps

    def ours() -> tuple[str, Any]:
        if stamps_children:
            return name, attention.DraftSteps(draft, topk, num_steps)
        return name, attention.DraftExtend(draft)

    with_ours = {**backend_map, name: ours}
    return original(factory, backend_name, with_ours, error_template, stamps_children)


@PATCHES.on(
    _SPEC + "spec_utils._select_top_k_tokens_later",
    "srt/speculative/spec_utils.py:437",
    why="It is decorated with torch.compile, whatever a platform's `get_compile_backend` says.",
    retire_when="SGLang compiles it with the platform's backend.",
    family=NEWEST,
)
def as_written(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function without the compilation that it was decorated with."""
    return inspect.unwrap(original)(*args, **kwargs)


@PATCHES.on(
    _SPEC + "eagle_utils._can_use_sparse_uno_tree_target_sampling",
    "srt/speculative/eagle_utils.py:676",
    why="That kernel is None without CUDA, and a hook on None would replace every None there "
    "is. This other way of SGLang's own draws from the same distribution.",
    family=NEWEST,
)
def samples_target(
    original: Callable, max_top_k: int | None, sampling_info: "SamplingBatchInfo"
) -> bool:
    """Return True: sample a target token at each node, and walk trees as greedy ones are walked.

    So a draft's token is accepted as probably as the target has it, or else one of the target's
    others comes: the law of SGLang's own kernel.
    """
    return True


@PATCHES.on(
    _SPEC + "uno_utils.sample_uno_tree_target_tokens",
    "srt/speculative/eagle_utils.py:684 (imported at each call)",
    family=NEWEST,
)
def sample_target(
    original: Callable,
    *,
    next_token_logits: torch.Tensor,
    sampling_info: "SamplingBatchInfo",
    batch_size: int,
    verify_width: int,
    max_top_k: int | None,
) -> torch.Tensor:
    """Sample a token of the target at each node, ``[batch_size, verify_width]``.

    Logits are ``[batch_size * verify_width, vocabulary]``.
    """

    def each(of_request: torch.Tensor) -> torch.Tensor:
        return of_request.repeat_interleave(verify_width, dim=0)

    info = sampling_info
    shape = (batch_size, verify_width)
    probs = torch.softmax(next_token_logits / each(info.temperatures), dim=-1)
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return torch.multinomial(probs, num_samples=1).view(shape)
    tokens: Any = top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        each(info.top_ks),
        each(info.top_ps),
        each(info.min_ps),
        info.need_min_p_sampling,
        sampling_seed=None,
        positions=torch.empty(0),
    )
    return tokens.view(shape)


@PATCHES.on(
    _CACHE + "allocation_sizing.get_req_to_token_extra_context_len",
    "srt/mem_cache/allocation_sizing.py:105",
    "srt/mem_cache/allocation_sizing.py:64 (get_alloc_reserve_per_decode)",
    why="With pages of one slot its rows are too short for that, by up to twice what a round "
    "drafts. Kernels write on into the next row; torch raises, and the scheduler ends.",
    retire_when="SGLang's rows have room for what it allocates, with pages of one slot too.",
    family=NEWEST,
)
def row_headroom(original: Callable) -> int:
    """Return the columns of `req_to_token` beyond the context, at least what a round reserves."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return max(original(), get_alloc_reserve_per_decode())


@PATCHES.on(
    _CACHE + "allocation.assign_req_to_token_pool_func",
    "srt/mem_cache/allocation.py:755",
    family=NEWEST,
)
def fill_table(
    original: Callable,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write slots, concatenated, to each row's positions ``start .. end - 1``."""
    places = trees.spans(req_pool_indices, start_offset, end_offset)
    req_to_token[places] = out_cache_loc.to(req_to_token.dtype)


@PATCHES.on(
    _OPS + "cache_locs.assign_draft_cache_locs_contiguous_func",
    "kernels/ops/speculative/cache_locs.py:110",
    family=NEWEST,
)
def draft_slots(
    original: Callable,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Write the ``topk * num_cols`` slots after each row's sequence, concatenated."""
    assert positions is None and mrope is None, "wanted on GPUs alone"
    column = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices.unsqueeze(1), column].flatten())


@PATCHES.on(
    _OPS + "cache_locs.fill_front_out_cache_loc_func",
    "kernels/ops/speculative/cache_locs.py:772",
    family=NEWEST,
)
def front_slots(
    original: Callable,
    num_front: torch.Tensor,
    out_cache_loc: torch.Tensor,
    front_out_cache_loc: torch.Tensor,
) -> None:
    """Write the first ``num_front`` slots of each request, concatenated, to the front."""
    own = out_cache_loc.view(len(num_front), -1)
    found = own[trees.spans(torch.arange(len(own)), torch.zeros_like(num_front), num_front)]
    front_out_cache_loc[: len(found)] = found.to(front_out_cache_loc.dtype)


@PATCHES.on(
    _OPS + "eagle.fill_accept_out_cache_loc_func",
    "kernels/ops/speculative/eagle.py:86",
    family=NEWEST,
)
def accepted_slots(
    original: Callable,
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """Write the slots of all accepted nodes, concatenated, to the front."""
    found = out_cache_loc[accept_index[accept_index != -1]]
    accept_out_cache_loc[: len(found)] = found.to(accept_out_cache_loc.dtype)


@PATCHES.on(
    _OPS + "eagle.fill_bonus_tokens_func", "kernels/ops/speculative/eagle.py:47", family=NEWEST
)
def last_accepted(
    original: Callable,
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write the last accepted token of each request."""
    last = torch.arange(batch_size) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


@PATCHES.on(
    _OPS + "spec_tree.build_tree_kernel_efficient_func",
    "kernels/ops/speculative/spec_tree.py:428",
    family=NEWEST,
)
def build_trees(
    original: Callable,
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Write a round's trees; ``tree_mask`` is already True over the text before them."""
    assert tree_mask_mode == 0, f"our attention reads whole lines, not mode {tree_mask_mode}"
    sees = trees.who_sees_whom(parent_list, top_scores_index, topk)
    if topk > 1:  # the mask of chains is not read
        tree_mask[trees.places_in_mask(seq_lens, num_verify_tokens)] = sees
    links = trees.Links(retrieve_index, retrieve_next_token, retrieve_next_sibling)
    trees.write_tree(sees, seq_lens, positions, links)


@PATCHES.on(
    _OPS + "spec_tree.verify_tree_greedy_func",
    "kernels/ops/speculative/spec_tree.py:549",
    family=NEWEST,
)
def verify_trees(
    original: Callable,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree from its root along the children that hold the target's tokens.

    Writes the target's token at each node of the path, the path, and its length without the root.
    """
    tensors = candidates, target_predict, retrieve_next_token, retrieve_next_sibling
    of_rows = zip(*(tensor.tolist() for tensor in tensors), strict=True)
    for row, tree in enumerate(of_rows):
        nodes = trees.walk(*tree, longest=accept_index.shape[1])
        places = retrieve_index[row, nodes]
        predicts[places] = target_predict[row, nodes].to(predicts.dtype)
        accept_index[row, : len(nodes)] = places.to(accept_index.dtype)
        accept_token_num[row] = len(nodes) - 1
    return predicts, accept_index, accept_token_num
