"""Which model an update's tensors are for, and what hooks hand to SGLang's own updates."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import io_struct
from sglang.srt.utils import MultiprocessingSerializer

from sglang_smc import upstream
from sglang_smc.models.weight_update import names_in, reason_not_to_name
from sglang_smc.patches import weights
from sglang_smc.patches.weights import update_from_ipc, update_from_tensor

selects = pytest.mark.skipif(not upstream.SELECTS_MODELS, reason="names of tensors tell the model")
TENSORS = [("lm_head.weight", torch.ones(2)), ("draft.norm.weight", torch.ones(2))]
BUCKET = {"flattened_tensor": torch.ones(2), "metadata": [SimpleNamespace(name=TENSORS[1][0])]}


@pytest.fixture(autouse=True)
def by_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share tensors without torch's manager of files: an engine that shuts down takes it along."""
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", "file_descriptor")


@pytest.mark.parametrize("sent", [TENSORS, BUCKET], ids=["list", "bucket"])
def test_names_are_found_without_reading_tensors(sent: Any) -> None:
    assert "draft.norm.weight" in names_in(MultiprocessingSerializer.serialize(sent))


@selects
def test_the_drafts_prefix_is_refused_where_requests_select_the_model() -> None:
    assert reason_not_to_name(["lm_head.weight", "model.draft.weight"]) is None
    assert "selector='draft'" in (reason_not_to_name(["lm_head.weight", "draft.norm.weight"]) or "")


@selects
@pytest.mark.parametrize(
    ("opened", "given", "updated"),
    [
        *((opened, "all", "target") for opened in (None, "all", "target")),
        *((opened, "draft", "draft") for opened in ("draft", "all")),
        ("draft", "all", "draft"),
        ("draft", "target", "target"),
    ],
)
def test_all_is_one_model(opened: str | None, given: str, updated: str) -> None:
    session = None if opened is None else SimpleNamespace(selector=opened)
    request = SimpleNamespace(selector=given)
    manager = SimpleNamespace(_session=session)
    upstream.select_one_model(manager, request)  # pyright: ignore[reportArgumentType]
    assert request.selector == updated


ANSWER = object()


class Scheduler:
    """What a hook looks at, of a server that is paused or not."""

    def __init__(self, *, smc: bool = True, paused: bool = False, running: bool = False) -> None:
        algorithm = "SMC" if smc else None
        self.server_args = SimpleNamespace(
            device="cpu",
            hicache_storage_backend=None,
            speculative_algorithm=algorithm,
            speculative_token_map=None,
        )
        self._engine_paused = paused
        self.running_batch = SimpleNamespace(is_empty=lambda: not running)
        self.last_batch = self.chunked_req = self.tree_cache = None
        self.grammar_manager: list[Any] = []

    def pause_generation(self, request: io_struct.PauseGenerationReqInput) -> None:
        assert request.mode == "retract", "which takes the result in flight"
        self._engine_paused = True

    def continue_generation(self, request: io_struct.ContinueGenerationReqInput) -> None:
        assert not request.torch_empty_cache, "it asks CUDA"
        self._engine_paused = False


class Manager:
    """What a hook looks at, and how an update found it."""

    tp_cpu_group = _session = None

    def __init__(self, scheduler: Scheduler, error: str | None = None) -> None:
        self.scheduler = scheduler
        self.error = error
        self.draft_worker: Any = "the draft"
        self.found: list[Any] = []

    def update(self, _request: Any) -> Any:
        self.found.append((self.draft_worker, self.scheduler._engine_paused))
        if self.error is not None:
            raise RuntimeError(self.error)
        return ANSWER


FLUSHED = io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={})
KEPT = io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={}, flush_cache=False)


@pytest.mark.parametrize(("paused", "error"), [(False, None), (True, None), (False, "no")])
def test_updates_by_ipc_find_no_draft_and_a_server_at_rest(paused: bool, error: str | None) -> None:
    """And leaves it as it was, though the update failed."""
    manager = Manager(Scheduler(paused=paused), error)
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        assert update_from_ipc(Manager.update, manager, FLUSHED) is ANSWER
    assert manager.found == [(None, True)]
    assert (manager.draft_worker, manager.scheduler._engine_paused) == ("the draft", paused)


def test_kv_in_use_is_not_flushed_and_other_algorithms_are_left_alone() -> None:
    manager = Manager(Scheduler(paused=True, running=True))
    answer = update_from_ipc(Manager.update, manager, FLUSHED)
    assert (answer.success, "'retract'" in answer.message, manager.found) == (False, True, [])
    assert update_from_ipc(Manager.update, manager, KEPT) is ANSWER
    manager = Manager(Scheduler(smc=False, paused=True, running=True))
    assert update_from_ipc(Manager.update, manager, FLUSHED) is ANSWER
    assert manager.found == [("the draft", True)]


def test_what_tensors_raise_is_an_answer_and_no_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    monkeypatch.setattr(weights.torch.distributed, "barrier", lambda group: met.append(group))
    sent = [MultiprocessingSerializer.serialize(TENSORS[:1])]
    request = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=sent)
    manager = Manager(Scheduler(), error="shapes differ")
    answer = update_from_tensor(Manager.update, manager, request)
    assert (answer.success, "shapes differ" in answer.message) == (False, True)
    assert met == [None], "the group of the manager, once"
    request.load_format = "direct"
    manager.scheduler.server_args.speculative_token_map = "map.pt"
    manager.draft_worker = SimpleNamespace(draft_worker="the draft")
    for selector, told in (("draft", "'direct'; allowed: none or"), ("target", "shapes differ")):
        request.selector = selector
        answer = update_from_tensor(Manager.update, manager, request)
        assert (answer.success, told in answer.message) == (False, True)
    request.load_format = None
    request.selector = "draft"
    manager.draft_worker = SimpleNamespace(draft_worker=None)
    answer = update_from_tensor(Manager.update, manager, request)
    assert (answer.success, "no draft model" in answer.message) == (False, True)
