"""Many requests at once: queues, full pools, retractions, ends and aborts at chosen steps.

A seeded text is the one that its request gets alone; what follows a retraction depends on the seed
and on the text that was kept, and on nothing else.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from in_process import Reply, Server
from sglang.srt.managers.io_struct import GetInternalStateReq, OpenSessionReqInput
from sglang.srt.session.session_controller import SessionReqNode
from tiny_models import smc_arguments

from sglang_smc.smc.randomness import derive_seed
from sglang_smc.upstream import resolved

SIZES = {"num_particles": 4, "num_steps": 3, "enable_custom_logit_processor": True}
ROOMY = {**SIZES, "max_lag": 32, "max_total_tokens": 8000, "max_running_requests": 40}
SMALL = {**SIZES, "max_lag": 32, "max_total_tokens": 600, "max_running_requests": 8}
TOKENS = 24
LIMITS = (1, 2, 5, 17, 30)
SMC: list[dict[str, Any]] = [
    {"max_lag": 4},
    {"mode": "exact"},
    {"mode": "auto", "num_particles": 3},
    {"mode": "auto", "trace": True},
    {"power": 2.0},
    {"resample_at": "token", "ess_threshold": 1.0},
    {"num_steps": 0},
    {"num_particles": 2, "num_steps": 2, "return_particles": True},
    {"resampling_method": "stratified", "max_lag": 8},
]


def asked(index: int, **params: Any) -> dict[str, Any]:
    """A request of one kind, which ends at its length."""
    own = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8}
    own |= {"sampling_seed": 100 + index, "custom_params": {"smc": SMC[index % len(SMC)]}}
    own |= {"frequency_penalty": 0.3} if index % 4 == 3 else {}
    return {"input_ids": [5 + index, *range(20, 31)], "sampling_params": {**own, **params}}


def mixed(index: int, draw: random.Random) -> dict[str, Any]:
    """A request with an end, a prompt and limits of any kind."""
    params: dict[str, Any] = {
        "max_new_tokens": LIMITS[index % len(LIMITS)],
        "temperature": 0.0 if index % 5 == 4 else draw.choice([0.7, 1.5]),
        "ignore_eos": index % 2 == 0,
    }
    params |= {"stop": ["t9 ", "t17 t"]} if index % 4 == 1 else {}
    params |= {"top_p": 0.8} if index % 6 == 1 else {}
    prompt = [draw.randrange(2, 64) for _ in range(draw.choice([1, 3, 10, 40, 90]))]
    return {**asked(index, **params), "input_ids": [5 + index, *prompt]}


KINDS = [asked(index) for index in range(len(SMC))]
REQUESTS = [*KINDS, *map(mixed, range(9, 36), [random.Random(0)] * 27)]
ABORTED = {2, 8, 14, 19, 23, 34}
MANY = 26  # of these, more than a small pool holds


class Alone(NamedTuple):
    """Answers of a server whose results reach the scheduler at once."""

    answers: list[Reply]  # one by one
    retracted: list[list["Retracted"]]  # by rounds before, and kind


class Retracted(NamedTuple):
    """What a request had said as it lost its KV, and what it says in all."""

    kept: list[int]
    text: list[int]


@pytest.fixture(scope="module")
def alone(start: Callable[..., Server], pair: tuple[str, str]) -> Alone:
    server = start(**smc_arguments(*pair, **ROOMY), overlap=False)
    replies = [server.generate(**one) for one in REQUESTS]
    for known, given in zip(replies[: len(KINDS)], KINDS, strict=True):
        again = server.generate(**given)
        assert known.meta["cached_tokens"] == 0 < again.meta["cached_tokens"]
        assert again.output_ids == known.output_ids
    return Alone(replies, [retract_all(server, rounds) for rounds in ROUNDS])


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["in turn", "one round late"],
)
def roomy(
    request: pytest.FixtureRequest,
    alone: Alone,
    start: Callable[..., Server],
    pair: tuple[str, str],
) -> Server:
    """A server with room for all, under either schedule, with other pages than that of `alone`."""
    server = start(**smc_arguments(*pair, **ROOMY), page_size=4, overlap=request.param)
    assert resolved(server.scheduler.server_args).disable_overlap_schedule is not request.param
    return server


def essence(reply: Reply) -> dict[str, Any]:
    """All that a request is told of itself, but for how its prompt was read."""
    own = {name: value for name, value in reply.meta.items() if name != "cached_tokens"}
    for name, value in own.items():
        if isinstance(value, float):
            own[name] = pytest.approx(value, rel=1e-3, abs=1e-3)
    if "spec_smc_particles" in own:
        own["spec_smc_particles"] = [one["output_ids"] for one in own["spec_smc_particles"]]
    if "spec_smc_trace" in own:
        own["spec_smc_trace"] = len(own["spec_smc_trace"]["rounds"])
    return {"output_ids": reply.output_ids, "end": reply.end, **own}


def test_neither_company_nor_schedule_changes_an_answer(roomy: Server, alone: Alone) -> None:
    replies = roomy.play(REQUESTS, aborted=ABORTED)
    for index, (found, known) in enumerate(zip(replies, alone.answers, strict=True)):
        if found.why == "abort":
            assert index in ABORTED
            assert found.output_ids == known.output_ids[: len(found.output_ids)]
        else:
            assert essence(found) == essence(known), REQUESTS[index]
    assert {reply.why for reply in replies} == {"stop", "length", "abort"}
    roomy.flush()


def test_a_text_that_is_read_on_is_found_in_whole_pages(roomy: Server, alone: Alone) -> None:
    """Prompt and answer, but for two tokens; what a flushed server reads anew gives the rest."""
    roomy.flush()
    roomy.play(KINDS, every=0)
    requests = []
    cached = []
    for index, (kind, answer) in enumerate(zip(KINDS, alone.answers, strict=False)):
        text = [*kind["input_ids"], *answer.output_ids]
        longer = [*text, 7, 8][: len(text) - 1 + index % 4]
        requests.append(kind | {"input_ids": longer})
        cached.append(min(len(longer) - 1, len(text) - 2) // 4 * 4)
    found = roomy.play(requests, every=0)
    assert [reply.meta["cached_tokens"] for reply in found] == cached
    roomy.flush()
    known = roomy.play(requests, every=0)
    assert not any(reply.meta["cached_tokens"] for reply in known)
    assert [reply.output_ids for reply in found] == [reply.output_ids for reply in known]


@pytest.mark.parametrize(
    ("overlap", "page_size"), [(False, 16), (True, 1)], ids=["in turn", "one round late"]
)
def test_a_full_pool_changes_no_text_before_a_retraction(
    alone: Alone, start: Callable[..., Server], pair: tuple[str, str], overlap: bool, page_size: int
) -> None:
    own = {**SMALL, "chunked_prefill_size": 24, "page_size": page_size}
    server = start(**smc_arguments(*pair, **own), overlap=overlap)
    replies = server.play(REQUESTS[:MANY], every=0, aborted=ABORTED, after=3)
    server.flush()
    for index, (found, known) in enumerate(zip(replies, alone.answers[:MANY], strict=True)):
        params = REQUESTS[index]["sampling_params"]
        drawn_anew = found.kept and params["temperature"] > 0
        same = found.kept[0] if drawn_anew else found.output_ids
        assert same == known.output_ids[: len(same)]
        assert (found.why == "abort") <= (index in ABORTED)
        assert found.why in {"abort", known.why} or drawn_anew
        assert found.why != "length" or len(found.output_ids) == params["max_new_tokens"]
    assert {reply.why for reply in replies} == {"stop", "length", "abort"}
    # It queues, and does not thrash.
    assert sum(reply.num_retractions > 0 for reply in replies) < len(replies) // 2
    assert server.generate(**REQUESTS[9]).output_ids == alone.answers[9].output_ids


# --- retractions ---
ROUNDS = (0, 3)


def retract_all(server: Server, rounds: int) -> list[Retracted]:
    """Take the KV of one request of each kind, behind so many rounds, beside one that stays."""
    server.flush()
    staying = server.send(**asked(0, max_new_tokens=2 * TOKENS))
    replies = [server.send(**one) for one in KINDS]
    server.run_until(lambda: all(map(server.decodes, replies)))
    server.step(rounds + server.scheduler.enable_overlap)
    server.retract(*replies)
    server.step()
    server.run_until(lambda: not server.scheduler.waiting_queue)
    for index, reply in enumerate(replies):
        assert_begun_anew(server, reply, 100 + index)
    server.finish()
    assert staying.num_retractions == 0
    for reply in (staying, *replies):
        assert reply.meta["spec_smc_rounds_ct"] == reply.meta["spec_verify_ct"]
    assert {len(reply.kept) for reply in replies} == {1}
    return [Retracted(reply.kept[0], reply.output_ids) for reply in replies]


def assert_begun_anew(server: Server, reply: Reply, seed: int) -> None:
    """Its row on the device has its next seed, and is committed to what it kept."""
    assert reply.end is None
    req = server.req(reply)
    worker = cast(Any, server.scheduler.draft_worker)
    settings = worker._tables.requests.gather(torch.tensor([req.kv.req_pool_idx]))
    assert settings.seeds.tolist() == [derive_seed(seed, 1)]
    assert req.kv.kv_committed_len >= len(req.origin_input_ids) + len(reply.kept[0])


def test_what_follows_a_retraction_has_its_own_seed(roomy: Server, alone: Alone) -> None:
    """A result that comes beside the retraction, one round late, is dropped whole."""
    assert [retract_all(roomy, rounds) for rounds in ROUNDS] == alone.retracted
    for of_rounds in alone.retracted:
        for one, known in zip(of_rounds, alone.answers, strict=False):
            assert len(one.text) == TOKENS
            kept = len(one.kept)
            assert one.text[:kept] == one.kept == known.output_ids[:kept]
        whole = [reply.output_ids for reply in alone.answers]
        assert sum(a.text != b for a, b in zip(of_rounds, whole, strict=False)) > 6
    assert sum(len(one.kept) > 2 for one in alone.retracted[-1]) > 6


def test_who_leaves_right_after_a_retraction_frees_no_slot_of_the_cache(roomy: Server) -> None:
    """Its whole text has just been read anew, by both models, and is the radix cache's.

    Particles that never meet emit nothing: all that it says is what two prefills draw.
    """
    apart = {"custom_params": {"smc": {"ess_threshold": 0.0}}, "temperature": 1.5}
    replies = [roomy.send(**asked(0, **apart, sampling_seed=seed)) for seed in range(3)]
    roomy.run_until(lambda: all(map(roomy.decodes, replies)))
    roomy.step(2)
    roomy.retract(*replies[1:])
    roomy.step()
    roomy.run_until(lambda: not roomy.scheduler.waiting_queue)
    for reply in replies[1:]:
        assert len(roomy.req(reply).output_ids) <= 2
        roomy.abort(reply)
    roomy.finish()
    assert [reply.why for reply in replies] == ["length", "abort", "abort"]
    roomy.flush()


def test_a_request_that_fails_in_its_prefill_ends_alone(roomy: Server) -> None:
    """Its result is read when the next batch has been chosen; its processor cannot be loaded."""
    other = roomy.send(**asked(0))
    broken = '{"callable": "00"}'
    failed = roomy.generate(**asked(1), custom_logit_processor=broken)
    assert (other.why, failed.why) == ("length", "abort")
    nothing = {"min_new_tokens": 1, "stop_token_ids": list(range(64)), "stop": ["zzz "]}
    for logprobs in (False, True):
        params = {"max_new_tokens": 8, **nothing}
        failed = roomy.generate(input_ids=[3, 4], sampling_params=params, return_logprob=logprobs)
        assert failed.why == "abort"
    roomy.flush()


def test_turns_are_replaced(start: Callable[..., Server], pair: tuple[str, str]) -> None:
    """Turns of one rid, a thousand in a row; without a rid all are replaced."""
    server = start(**smc_arguments(*pair, **SIZES), enable_streaming_session=True, overlap=True)
    server.ask(OpenSessionReqInput(capacity_of_str_len=1000, session_id="r"))
    known: Any = server.scheduler.session_controller.get("r").req_nodes
    for own, rid in (("a", None), ("b", "a"), ("c", "a"), ("d", None)):
        how = {"id": "r", "rid": rid, "replace": own in "cd"}
        server.generate(**asked(0), rid=own, session_params=how)
        assert [*known] == {"a": ["a"], "b": ["a", "b"], "c": ["a", "c"], "d": ["d"]}[own]
        node = known[own]
        for _ in range(1000 if own == "b" else 0):
            node = SessionReqNode(node.req, node)


def test_a_turn_that_is_retracted_before_its_first_round_goes_on(
    start: Callable[..., Server], pair: tuple[str, str]
) -> None:
    """Its only token is withdrawn where particles differ in it, though its prompt is cached."""
    own = {**SIZES, "page_size": 4}
    server = start(**smc_arguments(*pair, **own), enable_streaming_session=True, overlap=True)
    for name, smc in (("s", {}), ("t", {"power": 2.0})):
        server.ask(OpenSessionReqInput(capacity_of_str_len=1000, session_id=name, streaming=True))
        server.send(**asked(0))
        server.step(3)
        own = {"max_new_tokens": 8, "ignore_eos": True, "custom_params": {"smc": smc}}
        asking = {"sampling_params": own, "session_params": {"id": name}}
        turn = server.send(input_ids=[5, 6, 7, 8], **asking)
        server.retract(turn)
        server.finish()
        assert (turn.num_retractions, len(turn.output_ids)) == (1, 8)
        assert server.generate(input_ids=[11, 12], **asking).meta["cached_tokens"] > 8


# --- memory ---
@pytest.fixture
def tight(start: Callable[..., Server], pair: tuple[str, str]) -> Server:
    """A server that admits as if answers had no length."""
    own = {**SMALL, "max_lag": 16, "max_total_tokens": 400, "context_length": 512}
    return start(**smc_arguments(*pair, **own, schedule_conservativeness=0.0), overlap=True)


def test_a_pool_that_overflows_retracts_and_changes_no_greedy_text(tight: Server) -> None:
    # Of a request that cannot end early SGLang counts the whole answer.
    own = {"max_new_tokens": 50, "logit_bias": {"1": -100.0}, "temperature": 0.0}
    requests = [{"input_ids": [3, 4, 5 + i], "sampling_params": own} for i in range(8)]
    replies = tight.play(requests, every=0)
    tight.flush()
    retracted = [i for i, reply in enumerate(replies) if reply.num_retractions]
    assert retracted
    for index in retracted:
        assert replies[index].output_ids == tight.generate(**requests[index]).output_ids


def test_a_server_says_what_memory_there_is(tight: Server) -> None:
    """In its state, and to a request that would fit without particles."""
    memory = tight.ask(GetInternalStateReq()).internal_state["smc"]["memory"]
    arena = memory["modes"]["smc"]["slots"]
    assert (memory["pool_slots"], arena, memory["longest"]) == (400, 80, 319)
    assert memory["beside"]["rows of particles"] == 9 * 4 * 32 * 4
    end = tight.generate(input_ids=[3] * 330, sampling_params={"max_new_tokens": 4}).end
    assert end is not None
    assert "holds 400 tokens, of which 80 are kept" in end["message"]
    assert "exceeds the maximum allowed length (314 tokens)" in end["message"]
    assert "--speculative-smc-max-lag" in end["message"]
