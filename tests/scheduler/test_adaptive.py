"""N and K follow the load, down to no drafts and back.

Costs are given, so that the batch size alone decides; the draft is its target, so that drafts are
always worth their while.
"""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from head_laws import DFLASH, EAGLE3, make_head
from in_process import Reply, Server
from sglang.srt.managers.io_struct import GetInternalStateReq
from tiny_models import smc_arguments

from sglang_smc import process
from sglang_smc.options import policy
from sglang_smc.options.policy import COSTS_ENV, Curve, Policy, RoundCosts
from sglang_smc.options.request import OFF
from sglang_smc.options.server import MODES
from sglang_smc.round import costs as round_costs
from sglang_smc.round.costs import costs_of
from sglang_smc.round.play import ServedRound
from sglang_smc.round.stand_ins import StandIns

SETTINGS = {"num_particles": 4, "num_steps": 3, "max_lag": 16, "adaptive": "on"}
SMC: list[dict[str, Any]] = [
    {},
    {"num_particles": 3, "num_steps": 1, "resampling_method": "stratified"},
    {"mode": "exact"},
    {"mode": "auto", "num_particles": 2},
    {"num_particles": 1},
    {"power": 2.0, "num_particles": 2},
    {"return_particles": True},
    {"num_steps": 0},
]


@pytest.fixture
def adaptive(
    start: Callable[..., Server], tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Server]:
    """Start a server where passes of up to so many tokens cost the same, and more cost a lot."""

    def make(num_free: int | None, *, overlap: bool = True, **settings: Any) -> Server:
        if num_free is not None:
            points = [(1, 1.0), (num_free, 1.0), (2 * num_free, 8.0)]
            both = {"draft": 0.0005, "target": 0.005}
            costs = {kind: [(n, c * unit) for n, c in points] for kind, unit in both.items()}
            monkeypatch.setenv(COSTS_ENV, json.dumps(costs))
        model = tiny(seed=1, vocab_size=64, scale=0.3)
        return start(**smc_arguments(model, model, **{**SETTINGS, **settings}), overlap=overlap)

    return make


def asked(max_new_tokens: int, *more: int, **params: Any) -> dict[str, Any]:
    own = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **params}
    return {"input_ids": [3, 4, 5, *more], "sampling_params": own}


def sizes(reply: Reply) -> tuple[float, float]:
    return reply.meta["spec_smc_particles_mean"], reply.meta["spec_smc_steps_mean"]


def test_a_crowd_decodes_plainly_and_others_speculate(
    adaptive: Callable[..., Server],
) -> None:
    server = adaptive(num_free=16, max_running_requests=32)
    assert sizes(server.generate(**asked(60))) == (4, 3)
    crowd = server.play([asked(60 + i, i) for i in range(24)], every=0)
    for index, reply in enumerate(crowd):
        assert len(reply.output_ids) == 60 + index
        particles, steps = sizes(reply)
        assert particles < 2 and steps < 1.5, "most rounds had one particle, or drafted nothing"
        assert reply.meta["spec_smc_num_particles"] == 4, "what was asked for"
        assert reply.meta["spec_smc_rounds_ct"] == reply.meta["spec_verify_ct"]
    server.generate(**asked(120))  # a budget stays for some rounds
    assert sizes(server.generate(**asked(60))) == (4, 3), "and speculation has come back"


@pytest.mark.parametrize("overlap", [True, False])
def test_the_draft_catches_up_with_what_it_skipped(
    adaptive: Callable[..., Server], overlap: bool
) -> None:
    """It is the target: all its tokens are accepted, as long as it has read the same ones."""
    server = adaptive(num_free=16, overlap=overlap, max_running_requests=32, mode="exact")
    slow = server.send(**asked(200))
    server.run_until(lambda: len(slow.output_ids) > 20)
    server.play([asked(90, i) for i in range(24)], every=0)
    assert sizes(slow)[1] < 2, "it skipped rounds before it outlived the crowd"
    ended_off = server.play([asked(90, i, i) for i in range(24)], every=0)[0]
    server.generate(**asked(120))
    longer = server.generate(**asked(40, 0, 0, *ended_off.output_ids))
    assert longer.meta["cached_tokens"] > 80
    for reply in (slow, longer):
        drafted = sizes(reply)[1] * reply.meta["spec_smc_rounds_ct"]
        assert reply.meta["spec_num_correct_drafts"] >= drafted - 3, "but of the last round"


@pytest.mark.parametrize(("overlap", "page_size"), [(True, 1), (False, 1), (False, 8)])
def test_sizes_change_under_all_kinds_in_a_small_pool(
    adaptive: Callable[..., Server], overlap: bool, page_size: int
) -> None:
    pool = {"max_total_tokens": 500, "max_running_requests": 12, "chunked_prefill_size": 24}
    server = adaptive(num_free=4, overlap=overlap, page_size=page_size, **pool)
    draw = random.Random(0)
    requests = []
    limits = [draw.choice([1, 2, 17, 40]) for _ in range(40)]
    for index, limit in enumerate(limits):
        prompt = [draw.randrange(2, 64) for _ in range(draw.choice([0, 7, 40]))]
        stop = {"stop": ["t9 "]} if index % 9 == 0 else {}
        own = {"custom_params": {"smc": SMC[index % len(SMC)]}, **stop}
        own |= {"sampling_seed": index} if index % 5 == 0 else {}
        requests.append(asked(limit, *prompt, temperature=1.2, **own))
    crowd = [server.send(**one) for one in requests[:20]]
    server.step(6)
    server.retract(*crowd)  # each, as it runs beside another
    server.step(6)
    server.abort(crowd[11])
    thin = server.play(requests[20:], every=4, aborted={2, 13}, after=2)
    assert sum(reply.num_retractions > 0 for reply in crowd) > 3
    for index, reply in enumerate(crowd + thin):
        assert reply.why in {"stop", "length"} or index in {11, 22, 33}
        if reply.why == "length":
            assert len(reply.output_ids) == limits[index]
    steps = [sizes(r)[1] for r in crowd + thin if "spec_smc_steps_mean" in r.meta]
    assert min(steps) < 1 < max(steps)
    server.generate(**asked(60))
    assert sizes(server.generate(**asked(60)))[1] > 0, "speculation comes back"
    server.flush()


def test_clients_that_leave_end_no_one(
    adaptive: Callable[..., Server],
) -> None:
    """Rules about text have the batch chosen before the last result is read, which ends some."""
    server = adaptive(num_free=16, max_running_requests=32)
    own = {"stop": ["zzz "], "temperature": 1.5}
    crowd = [server.send(**asked(80, i, **own)) for i in range(20)]
    server.run_until(lambda: process.active.budget == OFF)
    server.step(3)
    for reply in crowd[:8]:
        server.abort(reply)
        server.step()
    server.finish()
    assert [reply.why for reply in crowd] == ["abort"] * 8 + ["length"] * 12
    server.flush()


@pytest.mark.parametrize("kind", ["model", EAGLE3, DFLASH])
def test_several_passes_a_round_are_as_many_rounds(
    kind: str,
    start: Callable[..., Server],
    tiny: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts, drafts and counts are the same: red where a draft misses one of the tokens."""
    target = tiny(seed=1, vocab_size=64, scale=0.3, layers=4)  # a head reads 3
    draft = target if kind == "model" else make_head(kind, target, tmp_path / "head")
    monkeypatch.setenv(COSTS_ENV, '{"draft": [[1, 0.001]], "target": [[1, 0.005]]}')
    monkeypatch.setattr(Policy, "choose", in_turns)
    prompts = range(5, 10)
    own = {"temperature": 1.2, "top_p": 0.9}
    found = []
    for most in (1, 4):
        monkeypatch.setattr(policy, "_MOST_PASSES", most)
        num_steps = 3 if kind == DFLASH else 5  # the former's block has 4
        sizes = {"num_particles": 4, "num_steps": num_steps, "max_running_requests": 8 + most}
        server = start(**smc_arguments(target, draft, mode="exact", adaptive="on", **sizes))
        replies = []
        begin = server.steps
        asks = [[asked(count, *prompts, **own)] for count in (60, 23, 14)]
        # Without a prefix in common, for which SGLang would have some of them wait.
        asks.append([{**asked(20 + 9 * i, **own), "input_ids": [10 + i, 4]} for i in range(5)])
        for together in asks:
            begins = process.active.policy
            assert begins is not None
            begins.budget = begins.top
            monkeypatch.setattr(begins, "turns", 0, raising=False)
            replies += server.play(together, every=0)
        found.append((server.steps - begin, [outcome_of(reply) for reply in replies]))
    (single, expected), (several, same) = found

    assert same == expected
    assert several < 0.6 * single


def in_turns(self: Any, *args: Any) -> None:
    """Draft in four rounds, then in none for 25 passes of the target, and so on."""
    self.turns = getattr(self, "turns", 0) + (args[-1] if self.budget == OFF else 6)
    self.budget = OFF if self.turns % 49 >= 24 else self.top


def outcome_of(reply: Reply) -> tuple[list[int], dict[str, Any]]:
    """The text, and what was counted."""
    counted = [name for name in reply.meta if name.endswith(("_ct", "_mean"))]
    return reply.output_ids, {name: reply.meta[name] for name in counted}


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_fixes_a_text_beside_any_load(adaptive: Callable[..., Server], mode: str) -> None:
    """Red where a seeded request gets the N and K that the load leaves to others."""
    server = adaptive(num_free=16, max_running_requests=32)
    own = {"temperature": 1.2, "custom_params": {"smc": {"mode": mode}}}
    seeded = asked(40, 9, sampling_seed=7, **own)
    alone = server.generate(**seeded).output_ids
    for count in (1, 7, 31):
        others = [asked(50 + i, i, **own) for i in range(count)]
        crowd = server.play([*others[1:], seeded, others[0]], every=count % 2)
        reply = crowd[count - 1]
        assert reply.output_ids == alone and sizes(reply) == (4, 3)
    assert sizes(crowd[0])[0] < 3, "while others are reduced"


def test_greedy_texts_are_those_of_plain_decoding_under_any_load(
    adaptive: Callable[..., Server],
) -> None:
    """A seed has no effect there, and a greedy request adapts with one, too."""
    server = adaptive(num_free=16, max_running_requests=32)
    off = {"temperature": 0.0, "custom_params": {"smc": {"num_steps": 0}}}
    plain = [server.generate(**asked(40, i, **off)).output_ids for i in range(4)]
    greedy = [asked(40, i, temperature=0.0, sampling_seed=i) for i in range(4)]
    others = [asked(60, 9, i, temperature=1.2) for i in range(20)]
    replies = server.play([*others, *greedy], every=0)[20:]
    assert [reply.output_ids for reply in replies] == plain
    assert min(sizes(reply)[1] for reply in replies) < 2


def test_few_large_requests_do_not_cost_all_others_theirs(
    adaptive: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where one seeded request has its batch played in rounds of its own size."""
    server = adaptive(num_free=16, max_running_requests=32)
    played: list[tuple[int, int]] = []
    play = ServedRound.play

    def noted(self: ServedRound, inputs: Any, shape: Any, *args: Any) -> Any:
        played.append((len(inputs.rows), shape.num_particles * (shape.num_steps + 1)))
        return play(self, inputs, shape, *args)

    monkeypatch.setattr(ServedRound, "play", noted)
    params = {"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 1}
    seeded = {"input_ids": [3, 4, 5], "sampling_params": params, "return_logprob": True}
    replies = server.play([*(asked(60, i) for i in range(24)), seeded], every=0)
    assert len(replies[-1].logprobs) == 60
    assert (1, 16) in played and (24, 1) in played
    assert max(size for size, rows in played if rows == 16) < 20


def test_servers_adapt_in_modes_that_verify(adaptive: Callable[..., Server]) -> None:
    """And say where their N and K come from."""
    adaptive(num_free=16, adaptive="auto", mode="smc")
    assert process.active.policy is None
    server = adaptive(num_free=16, adaptive="auto", mode="auto")
    assert process.active.policy is not None
    weighed = {"custom_params": {"smc": {"mode": "smc"}}}
    crowd = [asked(40, i, **(weighed if i == 5 else {})) for i in range(16)]
    replies = server.play(crowd, every=0)
    assert sizes(replies[5]) == (4, 3) and sizes(replies[4])[1] < 3, "N is mode smc's fidelity"
    told = server.ask(GetInternalStateReq()).internal_state["smc"]
    assert told["chosen"] == "as given"


def test_a_server_that_cannot_measure_serves_with_fixed_sizes(
    adaptive: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red where a failure of measuring ends the server."""
    warned: list[str] = []
    # Not by caplog: SGLang configures logging anew in a process.
    monkeypatch.setattr(round_costs.logger, "warning", lambda said, *of: warned.append(said % of))

    def fails(*_: Any) -> Any:
        raise RuntimeError("no kernel for it")

    monkeypatch.setattr(StandIns, "begin", fails)
    server = adaptive(num_free=None, max_running_requests=3)
    assert "cannot measure rounds: RuntimeError: no kernel for it" in " ".join(warned)
    assert sizes(server.generate(**asked(30))) == (4, 3)
    told = server.ask(GetInternalStateReq()).internal_state["smc"]
    assert told["costs"] is None and "could not be measured" in told["reason"]


def test_costs_are_measured_where_none_are_given(
    adaptive: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And /server_info has them, as JSON."""
    monkeypatch.setattr(round_costs, "_SECONDS", math.inf)
    server = adaptive(num_free=None)
    assert server.generate(**asked(40)).meta["spec_smc_rounds_ct"] > 0
    told = server.ask(GetInternalStateReq()).internal_state["smc"]
    costs = told["costs"]
    assert ", running 1: N = " in told["reason"]
    reading = costs.pop("reading")
    nodes = {sizes: [float(count) for count in of] for sizes, of in costs.pop("nodes").items()}
    assert set(nodes) == {sizes for sizes in costs if not sizes.startswith("N=1")}
    fewest = nodes["N=4 K=3"][0]
    most = nodes["N=4 K=3"][-1]
    assert 4 <= fewest < 5 and 12 < most <= 13, "of equal chains, and of chains that all differ"
    assert set(costs) == set(reading) >= {"N=4 K=3", "N=1 K=0"}
    assert all(seconds > 0 for points in costs.values() for _, seconds in points)
    assert orjson.loads(orjson.dumps(told))["costs"].keys() == costs.keys()


def test_ranks_take_the_costs_that_the_first_one_measures() -> None:
    def made(key: Any) -> RoundCosts:
        return RoundCosts({key: Curve(())})

    group = SimpleNamespace(broadcast_object=lambda mine, src: made((mine, src)))
    measure: Any = lambda _: "seconds"  # noqa: E731
    assert costs_of(measure, group) == made(("seconds", 0))
