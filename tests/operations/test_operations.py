"""Test what an operator does to a running server: it loses nothing, and keeps its texts.

SGLang's strict memory checks run at every step; a leak or a double free ends the server.
"""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_server import HANGS
from operator_client import LONG, MODES, Fresh, Operator, queries_of_dashboard, queries_of_page

from sglang_smc import upstream
from sglang_smc.state.metrics import PREFIX

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unharmed")]


def test_sigterm_lets_a_running_request_end_and_leaves_no_process(fresh: Fresh) -> None:
    assert (fresh.last_tokens, fresh.last_reason) == (LONG, "length")
    assert fresh.health == 503, "a load balancer has to hear that it is going"
    ending = 0 if upstream.IS_NEWER else -signal.SIGKILL  # SGLang kills its own tree there
    assert fresh.returncode == ending
    before, after = fresh.num_processes
    assert before >= 3 and after == 0


def test_metrics_count_what_requests_report(server: Operator) -> None:
    before = server.metrics()
    answers = [answer["meta_info"] for answer in server.answers()]
    gained = {name: value - before[name] for name, value in server.metrics().items()}

    def total(field: str) -> float:
        return sum(info["spec_smc_" + field] for info in answers)

    assert gained["rounds_total"] == total("rounds_ct")
    assert gained["resamplings_total"] == total("resample_ct") > 0
    assert gained["exact_rounds_total"] == total("exact_ct") > 0
    assert gained["narrowed_rounds_total"] == total("narrow_ct")
    assert gained["all_zero_rounds_total"] == total("all_zero_ct")
    assert gained["killed_particles_total"] >= gained["resamplings_total"], "at least one each"
    rounds = [info["spec_smc_rounds_ct"] for info in answers]
    assert gained["particles_total"] == 4 * sum(rounds[:3]) + 2 * rounds[3]
    assert gained["drafted_columns_total"] == 3 * sum(rounds)
    # The first token of each answer comes from prefill.
    emitted = sum(info["completion_tokens"] - 1 for info in answers)
    assert gained["emitted_tokens_total"] == emitted
    assert gained["ess_ratio_count"] == rounds[0] + rounds[3], "of those that are weighed"
    sums = (answers[i]["spec_smc_ess_mean"] / n * rounds[i] for i, n in ((0, 4), (3, 2)))
    assert gained["ess_ratio_sum"] == pytest.approx(sum(sums))


def test_metrics_carry_the_labels_of_sglangs_own(server: Operator) -> None:
    found = server.samples()
    (stock,) = (sample.labels for sample in found if sample.name == "sglang:token_usage")
    ours = [sample.labels for sample in found if sample.name.startswith(PREFIX)]
    assert ours and all({**labels, "le": ""} == {**stock, "le": ""} for labels in ours)
    assert {"model_name", "engine_type", "tp_rank"} <= stock.keys()


def test_server_info_shows_settings_and_the_same_totals(server: Operator) -> None:
    found = server.smc_state()
    exported = server.metrics()
    assert found["settings"]["num_particles"] == 4
    assert found["settings"]["evidence_threshold"] == 0.5, "the one in force, given or not"
    assert found["in_force"] == {"mode": "smc", "num_particles": 4, "num_steps": 3}
    totals = found["since_start"]
    for name in (name for name in exported if name.endswith("_total")):
        assert totals[name.removesuffix("_total")] == exported[name], name
    mean = exported["ess_ratio_sum"] / exported["ess_ratio_count"]
    assert totals["mean_ess_ratio"] == pytest.approx(mean)
    assert found["fidelity"]["all"]["answers"] >= len(MODES)


@pytest.mark.parametrize("queries", [queries_of_dashboard, queries_of_page])
def test_what_operators_ask_for_is_there(
    server: Operator, queries: Callable[[], list[str]]
) -> None:
    """By names that all scrapers see: SGLang's own by both of those that it may have."""
    exported = {sample.name for sample in server.samples()}
    asked = set(re.findall(r"\bsglang[:_]\w+", "\n".join(queries())))
    ours = {name for name in asked if name.startswith(PREFIX)}
    assert ours and ours <= exported, sorted(ours - exported)
    stock = {name for name in asked if ":" in name}
    assert stock <= exported, sorted(stock - exported)
    assert asked - ours - stock == {name.replace(":", "_") for name in stock}


def test_chunks_are_those_that_a_stream_brings(server: Operator) -> None:
    before = server.metrics()
    seen = []
    began = time.monotonic()
    with server.streaming() as stream:
        seen.append(stream.last["meta_info"]["completion_tokens"])
        while chunk := stream.next():
            seen.append(chunk["meta_info"]["completion_tokens"])
        lasted = time.monotonic() - began
    server.answers()  # which is no stream
    gained = {name: value - before[name] for name, value in server.metrics().items()}
    assert gained["chunk_tokens_sum"] == seen[-1] == LONG
    # Some that were sent on one by one may have reached the client as one.
    assert gained["chunk_tokens_count"] >= len(set(seen)) > 5
    assert gained["chunk_gap_seconds_count"] == gained["chunk_tokens_count"] - 1
    assert 0 < gained["chunk_gap_seconds_sum"] < lasted


def requests_of_all_kinds(number: int) -> list[dict[str, Any]]:
    """Requests that differ in all that a request may name, and more so with each number."""
    params = {"max_new_tokens": 3 + number % 5, "sampling_seed": number, "temperature": 0.7}
    smc = [{}, {"mode": "exact"}, {"mode": "auto"}, {"power": 1.5 + number}, {"num_particles": 2}]
    chosen = [{**params, "custom_params": {"smc": one}} for one in smc]
    stops = {**params, "stop": [f"x{number}"]}
    each = [{"sampling_params": one} for one in (*chosen, stops, {**params, "temperature": 0})]
    named = {"rid": f"series-{number}", "user": f"u{number}"}
    labels = [{"custom_labels": {name: str(number)}} for name in ("user", "model_name")]
    return [
        *({"input_ids": [3, 4, 5 + number % 8], **one} for one in each),
        *({"input_ids": [3], "sampling_params": params, **one} for one in (named, *labels)),
        {"input_ids": [3], "sampling_params": params, "stream": True, "priority": None},
        {"input_ids": [3], "sampling_params": {**params, "n": 2}, "return_logprob": True},
        {"input_ids": [3], "sampling_params": {**params, "custom_params": {"smc": {"mode": 1}}}},
        {"input_ids": [3] * (10000 + number), "sampling_params": params},
    ]


def send_all_kinds(server: Operator, number: int) -> None:
    """By both kinds of routes, under a name of its own where there is one to give."""
    for request in requests_of_all_kinds(number):
        server.post("/generate", **request)
    names = {"user": f"u{number}", "rid": f"chat-{number}", "x": number}
    for model in ("default", f"default:{number}"):
        asked = {"model": model, "prompt": [3, 4], "max_tokens": 3, **names}
        server.post("/v1/completions", **asked)
        server.get(f"/v1/models/{model}")


def test_requests_add_no_series(server: Operator) -> None:
    """Each is memory in Prometheus, which keeps it: none may carry what a request names."""

    def series() -> set[tuple[str, ...]]:
        return {(one.name, *sorted(map(str, one.labels.items()))) for one in server.samples()}

    send_all_kinds(server, 0)
    before = series()
    for number in range(1, 4):
        send_all_kinds(server, number)
    assert series() == before


@pytest.mark.parametrize(
    ("route", "busy"), [("/health", 200), ("/health_generate", 200), ("/flush_cache", 400)]
)
def test_health_and_no_flush_while_requests_run(server: Operator, route: str, busy: int) -> None:
    # A request of the test before may still be ending; a flush waits for it.
    assert server.get(route, params={"timeout": HANGS}).status_code == 200
    with server.streaming() as stream:
        assert server.get(route).status_code == busy
        assert stream.finish()["meta_info"]["completion_tokens"] == LONG


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_takes_back_no_token(server: Operator, undisturbed: str, mode: str) -> None:
    """In mid-tail; a retracted request reads its text anew, and goes on otherwise."""
    with server.streaming() as stream:
        server.pause(mode)
        server.assert_paused()
        so_far = stream.last["text"]
        server.resume()
        answer = stream.finish()
    assert answer["text"].startswith(so_far if mode == "retract" else undisturbed)
    assert answer["meta_info"]["completion_tokens"] == LONG
    assert answer["meta_info"]["num_retractions"] == (mode == "retract")


def test_pause_with_abort_tells_the_client(server: Operator) -> None:
    with server.streaming() as stream:
        server.pause("abort")
        answer = stream.finish()
        server.resume()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("every", [False, True])
def test_abort_of_one_spares_its_neighbour(server: Operator, undisturbed: str, every: bool) -> None:
    with server.streaming(seed=8) as mine, server.streaming() as other:
        asked = {"abort_all": True} if every else {"rid": mine.rid}
        assert server.post("/abort_request", **asked).status_code == 200
        assert mine.finish()["meta_info"]["finish_reason"]["type"] == "abort"
        answer = other.finish()
        reason = answer["meta_info"]["finish_reason"]["type"]
        assert reason == "abort" if every else answer["text"] == undisturbed


def test_memory_is_released_where_that_can_be(server: Operator) -> None:
    for route, told in (("/release_", "released on a CPU"), ("/resume_", "allowed now: none")):
        answer = server.post(f"{route}memory_occupation")
        assert (answer.status_code, told in answer.text) == (400, True)


def test_a_profile_is_written(server: Operator, tmp_path: Path) -> None:
    asked = {"output_dir": str(tmp_path), "with_stack": False}
    assert server.post("/start_profile", **asked).status_code == 200
    server.post("/generate", input_ids=[3], sampling_params={"max_new_tokens": 4})
    assert server.post("/stop_profile").status_code == 200
    assert list(tmp_path.rglob("*.json.gz"))


def test_internal_state_that_smc_does_not_read_is_not_set(server: Operator) -> None:
    for name, value, is_set in (
        ("pp_max_micro_batch_size", 4, True),
        ("speculative_accept_threshold_acc", 0.5, False),
        ("speculative_accept_threshold_single", 0.5, False),
    ):
        answer = server.post("/set_internal_state", server_args={name: value})
        assert answer.json() == [is_set], name
