"""The servers under audit: their faults, and the table of what is found."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audit import run
from audit.faults import audit_faults, kv_faults
from audit.faults.audit_faults import KV, OWN, STOCK, accept
from audit.run import SERVERS, AuditedServer, copied, main, row_of
from baselines.cpu_speculation import attention
from baselines.cpu_speculation import hooks as speculation
from laws import sampling
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import llama

from sglang_smc.smc import deciding
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.verification import Verified
from sglang_smc_tools.demo.serving import Launch, ServerError, reason_in
from sglang_smc_tools.testing.client import Client
from sglang_smc_tools.testing.endpoint import Endpoint, Sample
from sglang_smc_tools.testing.model import Position

NODES = 60
FLAT = torch.tensor([[0.3, 0.2, 0.1, 0.0]]).repeat(NODES, 1)  # logits


def tokens_of(fault: str, logits: torch.Tensor = FLAT, **limits: Any) -> list[int]:
    """Sample the target's tokens at the nodes of one chain, with a fault."""
    torch.manual_seed(0)
    tokens = STOCK[fault](
        speculation.sample_target,
        None,
        next_token_logits=logits,
        sampling_info=sampling(1, **limits),
        batch_size=1,
        verify_width=len(logits),
        max_top_k=None,
    )
    return tokens[0].tolist()


def test_each_fault_is_audited() -> None:
    assert {server.fault for server in SERVERS} == {"", *STOCK, *OWN, *KV}


def test_faults_change_what_is_sampled() -> None:
    assert set(tokens_of("greedy")) == {0}
    assert len(set(tokens_of("temperature", temperatures=1e-3))) > 1
    assert len(set(tokens_of("filters", top_ks=1))) > 1
    assert tokens_of("bonus")[-1] == 0 != max(tokens_of("bonus"))


def test_the_likely_fault_accepts_likely_drafts() -> None:
    """Of drafts 2 and 3 it accepts the one with probability 0.3 or more."""
    logits = torch.log(torch.tensor([[0.3, 0.2, 0.5, 0.0], [0.4, 0.3, 0.2, 0.1], [1.0, 0, 0, 0]]))
    tokens_of("likely", logits)
    predicted = torch.zeros(1, 3, dtype=torch.long)
    how = {"candidates": torch.tensor([[9, 2, 3]]), "target_predict": predicted}
    accept(lambda original, **seen: None, None, **how)
    assert predicted.tolist() == [[2, 0, 0]]


def test_faults_of_smc_change_what_is_accepted() -> None:
    found = Verified(*torch.ones(5, 2).bool())
    assert not OWN["residual"](lambda *_: found).rejects.any()
    law = TokenDistribution(FLAT, torch.full((1,), 0.5), sums=object())
    drafts = SimpleNamespace(_replace=SimpleNamespace, q=[law])
    scored = SimpleNamespace(_replace=SimpleNamespace, drafts=drafts)
    (q,) = OWN["ratio"](lambda scored: scored.drafts.q, scored)
    assert q.temperature.tolist() == [1.0] and q.sums is None


def test_a_fault_of_smc_replaces_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = deciding._verified
    monkeypatch.setattr(deciding, "_verified", verified)
    monkeypatch.setenv("AUDIT_FAULT", "residual")
    audit_faults.register()
    assert deciding._verified.args == (verified,)


def test_faults_of_kv_move_what_rounds_write() -> None:
    slots = torch.tensor([14, 15, 997, 24])
    rows, where = kv_faults.shared(slots, 2)
    assert (rows.tolist(), where.tolist()) == ([0, 1, 2, 3, 2], [14, 15, 997, 24, 996])
    assert kv_faults.page(slots, 2)[1].tolist() == [14, 16, 997, 24]
    assert kv_faults.stale(torch.tensor([8, 16, 9, 24]), 2)[0].tolist() == [1, 2, 3]
    assert kv_faults.position(torch.tensor([255, 256])).tolist() == [255, 257]
    assert kv_faults.swapped(torch.arange(6), 2).tolist() == [2, 3, 0, 1, 4, 5]
    sees = kv_faults.sibling(torch.eye(3).bool().unsqueeze(0))
    assert sees[0].tolist() == [[True, False, False], [True, True, False], [False, True, True]]


def test_a_slot_that_is_freed_early_has_two_owners() -> None:
    free = iter(range(0, 99, 3))
    allocate = kv_faults.freed(lambda allocator, size: torch.arange(size) + next(free))
    slots = [slot for _ in range(16) for slot in allocate(None, 3).tolist()]
    assert len(slots) - len(set(slots)) == 2 and len(slots) == 48


class Pool:
    """Keeps the keys of one layer."""

    def __init__(self) -> None:
        self.keys = torch.zeros(32)

    def set_kv_buffer(self, layer: Any, slots: Any, k: Any, v: Any) -> None:
        self.keys[slots] = k


class Model:
    """Writes the positions of a batch's two tokens to slots 15 and 17."""

    def forward(self, ids: Any, positions: Any, batch: Any) -> torch.Tensor:
        batch.pool.set_kv_buffer(None, torch.tensor([15, 17]), positions.float(), positions.float())
        return batch.pool.keys[15:18]


@pytest.mark.parametrize(("name", "kept"), [("page", [0, 1, 300]), ("position", [1, 0, 301])])
def test_faults_of_kv_leave_prefills_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, kept: list[int]
) -> None:
    broken = type("Broken", (Model,), {})
    pool = type("BrokenPool", (Pool,), {})
    monkeypatch.setattr(memory_pool, "MHATokenToKVPool", pool)
    monkeypatch.setattr(llama, "LlamaForCausalLM", broken)
    kv_faults.install(name)
    ids = torch.zeros(2)
    positions = torch.tensor([1, 300])
    for mode, expected in ((ForwardMode.EXTEND, [1, 0, 300]), (ForwardMode.TARGET_VERIFY, kept)):
        batch = SimpleNamespace(forward_mode=mode, req_pool_indices=[0], pool=pool())
        assert broken().forward(ids, positions, batch).tolist() == expected


def test_a_retracted_request_keeps_what_others_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is prefilled again, once."""

    broken = type("Broken", (Model,), {})
    pool = type("BrokenPool", (Pool,), {})

    class Request(SimpleNamespace):
        def reset_for_retract(self) -> None:
            self.is_retracted = True

    monkeypatch.setattr(memory_pool, "MHATokenToKVPool", pool)
    monkeypatch.setattr(llama, "LlamaForCausalLM", broken)
    monkeypatch.setattr(schedule_batch, "Req", Request)
    kv_faults.install("retracted")
    request = Request(rid="b")
    request.reset_for_retract()
    lengths = torch.tensor([1, 1])
    assert request.is_retracted
    for kept in ([1, 0, 0], [1, 0, 300]):
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            rids=["a", "b"],
            extend_seq_lens=lengths,
            pool=pool(),
        )
        assert broken().forward(torch.zeros(2), torch.tensor([1, 300]), batch).tolist() == kept


def test_the_fault_of_a_tree_is_in_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = {"a tree": torch.eye(3).bool().unsqueeze(0), "a chain": None}
    monkeypatch.setattr(attention, "tree_of", trees.get)
    kv_faults.install("sibling")
    assert attention.tree_of("a tree")[0, 2, 1] and attention.tree_of("a chain") is None


def test_likeliest_drafts_leave_the_targets_samples_alone() -> None:
    class Law(TokenDistribution):
        pass

    OWN["argmax"](Law)
    uniforms = torch.linspace(0, 0.99, NODES, dtype=torch.float64)
    law = Law(FLAT, torch.ones(1))
    assert set(law.sample(uniforms)[0].tolist()) == {0}
    assert set(law.draw(uniforms).tolist()) == {0, 1, 2, 3}
    assert law.sample(uniforms)[1].allclose(torch.log_softmax(FLAT, 1)[:, 0])


def test_a_row_names_what_failed() -> None:
    sampled = {"check": "sampled", "verdict": "fail", "estimate": 0.05, "standard_error": 0.01}
    copies = {"check": "copies-1", "verdict": "fail", "estimate": 0.25, "num_answers": 8}
    results = [{**sampled, "num_answers": 40}, {"check": "together", "verdict": "pass"}, copies]
    told = {
        "name": "EAGLE",
        "is_lossless": False,
        "audits": [{"passed": False, "results": results}],
    }
    row = ["EAGLE", "no", "48", "1 of 1", "copies-1, sampled", "+0.050 ± 0.020", "2 of 8"]
    assert row_of(told) == row
    until = {"answers_until_found": 9, "results": [copies]}
    told |= {"audits": [{"passed": False, **until}]}
    assert row_of(told)[-2:] == ["", "found within 9"]


def test_a_server_that_does_not_start_says_why_in_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def running(launch: Launch) -> Iterator[Any]:
        launch.log.write_text("Warning: a\nTraceback\n- ValueError: no pages | here\nkilled\n")
        raise ServerError("it ended")
        yield

    monkeypatch.setattr(run, "running", running)
    monkeypatch.setattr(run, "SERVERS", [AuditedServer("one")])
    monkeypatch.setattr(run.study, "PUBLISHED", tmp_path)
    monkeypatch.setattr("sglang_smc.upstream.release", lambda: "0.5.22")
    assert main(["--output-dir", str(tmp_path), "--publish"]) == 0
    cells = "one | yes |  | none | does not start: no pages / here |"
    for folder in (tmp_path, tmp_path / "audit" / "0.5.22"):
        assert cells in (folder / "audit.md").read_text()
    assert reason_in("Warning: slow", "not up\nin time") == "not up"
    monkeypatch.delattr(run, "measure")  # it is not started again
    assert main(["--output-dir", str(tmp_path)]) == 0


def test_simulated_audits_have_copies_too(tmp_path: Path) -> None:
    assert main(["--only", "simulated", "--simulated", "2", "--output-dir", str(tmp_path)]) == 0
    told, *_ = json.loads((tmp_path / "simulated.json").read_text())["audits"]
    assert [one["check"] for one in told["results"]][-3:] == ["copies-1", "copies-12", "copies-64"]
    assert told["false_alarm"] == pytest.approx(0.01, rel=0.1)


def test_copies_are_counted_until_one_fails() -> None:
    """The third of them is wrong at temperature 0."""

    class Wrong(Endpoint):
        def at_once(self, asked: Sequence[Any], width: int) -> list[Sample | None]:
            top = {0: -0.1, 1: -9.0}
            wrong = [index == 2 for index in range(len(asked))]
            positions = ([Position(int(bad), top[int(bad)], top)] * 99 for bad in wrong)
            return [Sample("", "", each, [99]) for each in positions]

    told = copied(Wrong(Client("")), 8, 0)
    assert told["answers_until_found"] == 9 and not told["passed"]
