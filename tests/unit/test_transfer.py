"""Copies between host and device: nobody waits for them, and what they read lasts until they ran.

SGLang copies results on a stream of its own. Device memory whose last tensor is gone is had by the
next that asks on the stream that made it, though a copy on another stream has yet to read it.
"""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_gpu import FakeGPU, fake_gpu
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from table_entries import entry
from torch.utils._pytree import tree_leaves
from toy_laws import languages, toy
from toy_logprobs import AskingWorker
from toy_request import ToyRequest

from sglang_smc.kv.transfer import each_tensor, on_device, on_host, to_device
from sglang_smc.ops import ops_of
from sglang_smc.options.request import RequestConfig
from sglang_smc.patches import decode_memory
from sglang_smc.round import prefill
from sglang_smc.round.handover import Handover
from sglang_smc.round.result import SMCBatchResult, SMCDraftInput
from sglang_smc.state.settings import RequestTable

ROOT = Path(__file__).parents[2]
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "with particles": {"return_particles": True},
    "with a trace": {"trace": True},
    "with open first tokens": {"power": 2.0},
    "with log-probabilities": {},
}


def played(kind: str, device: str) -> SMCBatchResult:
    given: dict[str, Any] = {"num_particles": 3, "num_steps": 2, "chosen": (ASKED[kind],)}
    if kind == "with log-probabilities":
        given |= {"kind": AskingWorker, "shown": ((2, [1]),)}
    worker = toy(2, languages(device=device), limit=12, ops=ops_of("torch", device), **given)
    reqs = worker.begin([1, 2])
    worker.reserve(reqs)
    result = worker.worker.launch_round(worker.batch(reqs))
    result.copy_done = SimpleNamespace(record=lambda: None)  # type: ignore[assignment]
    return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    known = vars(value) if isinstance(value, (LogitsProcessorOutput, SMCDraftInput)) else value
    return [leaf for leaf in tree_leaves(known) if isinstance(leaf, torch.Tensor)]


def carried(result: Any) -> dict[str, list[torch.Tensor]]:
    """The tensors of a result by field, without those that are kept for nobody to read."""
    names = {field.name for field in fields(result)} - {"extra_keep_alive_refs"}
    return {name: tensors_in(getattr(result, name)) for name in names}


READ_ON_DEVICE = {"new_seq_lens", "next_draft_input"}
"""By the next round, through SGLang's relay."""


@pytest.mark.parametrize("kind", list(ASKED))
def test_results_are_copied_to_pinned_memory_and_marked_as_read_by_that_stream(kind: str) -> None:
    """And the device's tensors outlive the copies, which it has yet to run."""
    with fake_gpu() as gpu:
        result = played(kind, "cuda")
        copy(gpu, result, return_logprob=kind == "with log-probabilities")
        check_all_is_copied(gpu, result)
        assert not any(memory.expired() for memory in gpu.to_host)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(ASKED))
def test_a_gpu_hands_no_memory_out_that_a_late_copy_reads(kind: str) -> None:
    """The stream that copies is busy while others ask for as much memory, and write there."""
    result = played(kind, "cuda")
    expected = {name: [x.cpu() for x in own] for name, own in carried(result).items()}
    result.extra_keep_alive_refs = None  # else nothing would be handed out
    copying = torch.cuda.Stream()
    copying.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copying):
        torch.cuda._sleep(10**9)
        result.copy_to_cpu(kind == "with log-probabilities", return_hidden_states=False)
    written = [torch.full_like(x, 77, device="cuda") for own in expected.values() for x in own * 4]
    torch.cuda.synchronize()
    assert len(written) > 0
    for name, own in carried(result).items():
        assert all(torch.equal(x.cpu(), y) for x, y in zip(own, expected[name], strict=True)), name


def test_the_next_request_of_a_row_waits_for_the_drafts_last_pass_over_it() -> None:
    """Else it would read, and write, slots that are another request's by then."""
    device = mock.MagicMock()
    rows = Handover(device.prefill, torch.empty(0), [], page_size=1, device="cuda", stream="rounds")
    with mock.patch.object(torch, "get_device_module", return_value=device):
        rows.finish(mock.Mock(output_ids=[1]))
    names = [name for name, *_ in device.mock_calls]
    _, _, _, entered, read, left, _, waited = names
    assert (entered, left) == ("stream().__enter__", "stream().__exit__")
    assert (read, waited) == ("prefill.finish", "current_stream().wait_stream")


def copy(gpu: FakeGPU, result: GenerationBatchResult, *, return_logprob: bool) -> None:
    gpu.to_host.clear()
    result.copy_done = SimpleNamespace(record=lambda: None)  # type: ignore[assignment]
    with gpu.no_waiting():
        result.copy_to_cpu(return_logprob=return_logprob, return_hidden_states=False)


def check_all_is_copied(gpu: FakeGPU, result: GenerationBatchResult) -> None:
    assert len(gpu.to_host) > 0
    assert set(gpu.to_host) == set(gpu.recorded), "its memory may be had by others too soon"
    left = {name for name, own in carried(result).items() if any(x.is_cuda for x in own)}
    assert left <= READ_ON_DEVICE


@pytest.mark.parametrize("asking", [{}, {"kind": AskingWorker, "shown": ((2, None), (0, [1]))}])
@pytest.mark.parametrize("choice", [{}, {"power": 2.0}])
def test_what_a_prefill_carries_is_marked_too(
    choice: dict[str, Any], asking: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a stock result, with tensors of ours in its fields."""
    monkeypatch.setattr(prefill.ForwardBatch, "init_new", mock.Mock())
    with fake_gpu() as gpu:
        result = prefilled(chosen=(choice,), **asking)
        copy(gpu, result, return_logprob=bool(asking))
        assert result.logits_output is not None
        result.logits_output.next_token_logits = None  # stays there: nobody reads it
        check_all_is_copied(gpu, result)


def prefilled(**options: Any) -> GenerationBatchResult:
    """A prefill of two requests, by models of which all logits are 0."""
    worker = toy(2, languages(device="cuda"), num_particles=3, num_steps=2, **options)
    logits = torch.zeros(2, worker.vocab_size, device="cuda")
    output = LogitsProcessorOutput(logits, hidden_states=None)
    target = mock.Mock()
    draft = mock.Mock(wants_states=False)

    def forward(_: None, batch: Any, *, is_verify: bool) -> GenerationBatchResult:
        batch.positions.add_(1)  # as Gemma 3 with images does
        return GenerationBatchResult(logits_output=output)

    target.forward_batch_generation = forward
    draft.read_prompts.return_value = logits
    own = worker.worker._prefill
    own._target = target
    own._draft = draft
    own._init_from_prompt = mock.Mock()
    own.unread = None
    batch = worker.batch([worker.make_request(row) for row in (1, 2)])
    batch.is_prefill_only = False
    batch.hicache_consumer_index = -1
    return own.run(batch, None)


def test_heads_read_prompts_at_their_own_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = SimpleNamespace(positions=torch.arange(3))
    monkeypatch.setattr(prefill.ForwardBatch, "init_new", lambda *_, **__: made)
    with fake_gpu():
        prefilled()
    assert made.positions.tolist() == [0, 1, 2]


COMING: list[Callable[[], torch.Tensor]] = [
    lambda: on_device("cuda", [1, 2]),
    lambda: on_device("cuda", [(1, 2.5), (True, 4)], torch.float64),
    lambda: on_device("cuda", [], torch.int64),
    lambda: to_device("cuda", torch.arange(6, device="cpu").view(2, 3).t()),
]


@pytest.mark.parametrize("default", ["cpu", "cuda"])
@pytest.mark.parametrize("coming", COMING, ids=["a list", "rows", "nothing", "a view"])
def test_the_host_waits_for_no_copy(coming: Callable[[], torch.Tensor], default: str) -> None:
    with fake_gpu() as gpu, torch.device(default), gpu.no_waiting():
        assert coming().device.type == "cuda" and len(gpu.to_device) == 1


def test_numbers_keep_their_kind_and_their_precision() -> None:
    """A CPU's own tensors are not copied, and what is no tensor stays as it is."""
    third = 1 / 3
    tensor = torch.ones(2)
    other = object()
    assert to_device("cpu", tensor) is tensor is on_host(tensor)
    found = each_tensor(lambda x: x + 1, [torch.ones(1), {"a": (other, None, "ab", 3)}])
    assert found[0].item() == 2 and found[1] == {"a": (other, None, "ab", 3)}
    assert on_device("cpu", [third], torch.float64).tolist() == [third]
    assert on_device("cpu", [True, False]).dtype == torch.bool
    assert on_device("cpu", [(1, 2), (3, 4)]).tolist() == [[1, 2], [3, 4]]
    table = RequestTable(3, 4, "cpu")
    table.write([entry(1, RequestConfig(ess_threshold=third))])
    assert table.gather(torch.tensor([1])).ess_threshold.tolist() == [third]


def reserved(table: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests in rows 2, 5 and 1 the slots 100, 101, ... in spans of their own."""
    monkeypatch.setattr(
        decode_memory,
        "alloc_token_slots",
        lambda _, total: torch.arange(100, 100 + total, device=table.device),
    )
    batch: Any = SimpleNamespace(
        reqs=[ToyRequest(row, 4, 9, {}, None) for row in (2, 5, 1)],
        device=str(table.device),
        tree_cache=None,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
        req_to_token_pool=SimpleNamespace(write=table.__setitem__),
    )
    decode_memory._allocate(batch, [(3, 5), (4, 4), (0, 3)])


def test_each_request_is_given_new_slots_where_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waits for nothing; nor do settings of new requests."""
    table = torch.zeros(6, 6, dtype=torch.int32)
    reserved(table, monkeypatch)
    assert table[2, 3:5].tolist() == [100, 101] and table[1, :3].tolist() == [102, 103, 104]
    assert table.count_nonzero() == 5
    with fake_gpu() as gpu:
        table = torch.zeros(6, 6, dtype=torch.int32, device="cuda")
        settings = RequestTable(3, 4, "cuda")
        with gpu.no_waiting():
            reserved(table, monkeypatch)
            assert len(gpu.to_device) == 1
            settings.write([entry(1, stop_tokens=frozenset({2, 3})), entry(2)])


def test_there_is_one_way_between_host_and_device() -> None:
    """What moves tensors for itself forgets one duty or another."""
    sources = [*(ROOT / "sglang_smc").rglob("*.py"), *(ROOT / "patches").glob("*.py")]
    ways = re.compile("non_blocking|pin_memory")
    assert [path.name for path in sources if ways.search(path.read_text())] == ["transfer.py"]
