"""New weights for a running server: it goes on, as one that was started with them.

SGLang's strict memory checks run at every step; a leak or a double free ends the server.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from operator_client import GROUP, LONG, Fresh, Models, Operator, tensors_of

from sglang_smc import upstream

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("unharmed", "loaded_back", "by_file_name"),
]

selects = pytest.mark.skipif(not upstream.SELECTS_MODELS, reason="names of tensors tell the model")
names = pytest.mark.skipif(upstream.SELECTS_MODELS, reason="requests select the model")


def test_new_weights_from_disk_are_those_of_a_fresh_server(
    server: Operator, expected: list[str], models: Models, fresh: Fresh
) -> None:
    assert server.load(models.new_target, models.new_draft).status_code == 200
    assert server.texts() == fresh.texts != expected
    assert server.load(models.target).status_code == 200
    assert server.texts() != expected, "the draft keeps its weights where none are named"


def test_new_weights_while_requests_are_retracted(
    server: Operator, models: Models, fresh: Fresh
) -> None:
    with server.streaming() as stream:
        server.pause("retract")
        assert server.load(models.new_target, models.new_draft).status_code == 200
        server.assert_paused()
        server.resume()
        assert stream.finish()["meta_info"]["completion_tokens"] == LONG
    assert server.texts() == fresh.texts


def test_new_weights_while_requests_hold_kv(server: Operator, models: Models) -> None:
    """Refused if their KV is to be dropped; else they go on from it."""
    with server.streaming() as stream:
        server.pause("in_place")
        refused = server.load(models.new_target)
        assert (refused.status_code, "'retract'" in refused.text) == (400, True)
        assert server.load(models.new_target, flush_cache=False).status_code == 200
        server.resume()
        assert stream.finish()["meta_info"]["completion_tokens"] == LONG


def test_new_weights_wait_for_running_requests(
    server: Operator, models: Models, undisturbed: str
) -> None:
    with server.streaming() as stream:
        assert server.load(models.new_target).status_code == 200
        assert stream.finish()["text"] == undisturbed


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"model_path": "/nowhere"}, "/nowhere"),
        ({"manifest": {"draft": "x"}}, "draft_model_path"),
        ({"manifest": {"draft_model_path": 7}}, "draft_model_path"),
        ({"load_format": "dummy"}, "safetensors"),
        ({"recapture_cuda_graph": True}, "in place"),
    ],
)
def test_updates_that_cannot_be(
    server: Operator, models: Models, given: dict[str, Any], reason: str
) -> None:
    answer = server.post("/update_weights_from_disk", **{"model_path": models.target, **given})
    assert (answer.status_code, reason in answer.json()["message"]) == (400, True)


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_loaded(
    server: Operator, models: Models, tmp_path: Path
) -> None:
    """A draft of another size, beside a target that would fit; and files put in those' place."""
    answer = server.load(models.new_target, models.other_size)
    assert (answer.status_code, "layers.1" in answer.json()["message"]) == (400, True)
    name = "model.safetensors"
    paths = (models.new_target, models.other_size)
    fits, fewer = (Path(path, name).read_bytes() for path in paths)
    for content, status in ((fits, 200), (fewer, 400), (fits[:-64], 400)):
        (tmp_path / name).write_bytes(content)
        assert server.load(str(tmp_path)).status_code == status


def test_a_new_draft_changes_no_greedy_text(server: Operator, models: Models, fresh: Fresh) -> None:
    assert server.load(models.new_target).status_code == 200
    text, rounds = server.greedy()
    assert text == fresh.greedy
    assert server.load(models.new_target, models.new_target).status_code == 200
    assert server.greedy() == (text, 10), "39 tokens, of which every round keeps 3 and adds one"
    assert rounds > 20


@names
def test_tensors_that_name_their_model(server: Operator, models: Models, fresh: Fresh) -> None:
    """Those named `draft.` go to the draft, as /weights_checker names them."""
    own, draft = (tensors_of(path) for path in (models.new_target, models.new_draft))
    named = own | {f"draft.{name}": tensor for name, tensor in draft.items()}
    answer = server.send(named.items())
    assert answer.status_code == 200, answer.text
    assert server.texts() == fresh.texts


@selects
@pytest.mark.parametrize("mode", [None, "retract"])
def test_new_weights_of_both_in_one_session(
    server: Operator, models: Models, fresh: Fresh, mode: str | None
) -> None:
    before = server.checksums()
    with server.streaming() as stream:
        if mode is not None:
            server.pause(mode)
        with server.session():
            for path, given in ((models.new_target, {}), (models.new_draft, {"selector": "draft"})):
                answer = server.send(tensors_of(path).items(), **given)
                assert answer.status_code == 200, answer.text
        if mode is not None:
            server.resume()
        assert stream.finish()["meta_info"]["completion_tokens"] == LONG
    assert server.texts() == fresh.texts
    changed = {name for name, value in server.checksums().items() if value != before[name]}
    assert {"lm_head.weight", "draft.lm_head.weight"} <= changed


@selects
def test_sessions_that_cannot_be(server: Operator, models: Models) -> None:
    def refused(answer: httpx.Response, reason: str) -> bool:
        return answer.status_code == 400 and reason in answer.text

    named = tensors_of(models.target).items()
    assert refused(server.send(named), "begin_weight_update")
    assert refused(server.post("/end_weight_update"), "no weight-update session is open")
    assert refused(server.post("/begin_weight_update", selector="drafts"), "selector")
    with server.session():
        assert refused(server.post("/begin_weight_update"), "already open")
        assert refused(server.send(named, selector="drafts"), "selector")
        own_way = ((f"draft.{name}", tensor) for name, tensor in named)
        assert refused(server.send(own_way), "selector='draft'")


def test_tensors_that_do_not_fit_or_cannot_be_read_are_refused(server: Operator) -> None:
    draft = {"selector": "draft"} if upstream.SELECTS_MODELS else {}
    too_small = [("lm_head.weight", torch.ones(3, 5))]
    with server.session():
        for sent, given in ((too_small, {}), (too_small, draft), (b"no pickle", {})):
            answer = server.send(sent, **given)
            assert (answer.status_code, answer.json()["success"]) == (400, False)


def test_new_weights_by_broadcast(server: Operator, models: Models) -> None:
    """Of the target alone."""
    tensors = tensors_of(models.new_target)
    with server.session(), server.broadcasting() as group, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            server.post,
            "/update_weights_from_distributed",
            names=list(tensors),
            dtypes=["float32"] * len(tensors),
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group_name=GROUP,
        )
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, src=0, group=group)
        assert answer.result().status_code == 200, answer.result().text
    found = server.texts()
    assert server.load(models.new_target, models.draft).status_code == 200
    assert server.texts() == found
