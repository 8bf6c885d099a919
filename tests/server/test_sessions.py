"""Sessions, priorities and retractions are SGLang's own, and particles do not disturb them."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_server import Server
from spelling import GRAMMARS
from trace_replay import read, replay

from server.kinds import CHOICES, EDITS, LOGPROBS, MODES, asked, constrained, edited
from server.target import Target
from server.test_target import assert_greedy, assert_scored

FIRST = [5, 9, 33, 20]
SECOND = [41, 8]
THIRD = [12]


def greedy(tokens: list[int], size: int = 10, **fields: Any) -> dict[str, Any]:
    return asked(fields=fields, temperature=0.0, max_new_tokens=size) | {"input_ids": tokens}


def turn(session: str, tokens: list[int], **params: Any) -> dict[str, Any]:
    return greedy(tokens, session_params={"id": session, **params})


def opened(server: Server, **fields: Any) -> str:
    return server.post("/open_session", capacity_of_str_len=10_000, **fields).json()


def closed(server: Server, session: str) -> None:
    assert server.post("/close_session", session_id=session).status_code == 200


def test_turns_of_a_session_stand_behind_each_other(server: Server) -> None:
    """The text so far need not be sent again, and its KV is not computed again."""
    session = opened(server)
    text = []
    last = None
    for tokens in (FIRST, SECOND, THIRD):
        (answer,) = server.generate([turn(session, tokens, rid=last)])
        text += tokens
        (plain,) = server.generate([greedy(text)])
        info = answer["meta_info"]
        # But for the token that never had KV, and the one that the draft may not have read.
        assert last is None or info["cached_tokens"] == len(text) - len(tokens) - 2
        assert plain["meta_info"]["cached_tokens"] == len(text) - 1
        assert answer["output_ids"] == plain["output_ids"]
        assert info["prompt_tokens"] == len(text)
        text += answer["output_ids"]
        last = info["id"]
    closed(server, session)


def test_a_session_branches_and_is_rewritten(server: Server) -> None:
    session = opened(server)
    (first,) = server.generate([turn(session, FIRST)])
    root = first["meta_info"]["id"]
    answered = [*FIRST, *first["output_ids"]]
    ways: list[tuple[list[int], dict[str, Any], list[int]]] = [
        (SECOND, {}, answered),  # two turns behind one
        (THIRD, {}, answered),
        (THIRD, {"offset": 6}, answered[:6]),
        (SECOND, {"drop_previous_output": True}, FIRST),
        (THIRD, {"replace": True}, answered),
    ]
    for tokens, how, before in ways:
        (found,) = server.generate([turn(session, tokens, rid=root, **how)])
        (plain,) = server.generate([greedy([*before, *tokens])])
        assert found["output_ids"] == plain["output_ids"], how
        if not how.get("replace"):
            last = found["meta_info"]["id"]
    wrong = [
        (turn(session, THIRD, rid=last), "Invalid request session id"),  # its turn is gone
        (turn("nobody", FIRST), "session id nobody does not exist"),
    ]
    for request, words in wrong:
        (outcome,) = server.outcomes([request])
        assert outcome.status_code == 400 and words in outcome.text
    closed(server, session)


@pytest.mark.parametrize("retracts", [False, True])
def test_a_streaming_session_reads_what_its_turns_wrote(server: Server, retracts: bool) -> None:
    """Sessions side by side: a slot in place of the last token's changes most of these texts."""
    firsts = [[i, i + 1] for i in range(3, 11)]
    ids = [opened(server, streaming=True) for _ in firsts]
    texts: list[list[int]] = [[] for _ in firsts]
    for turns in (firsts, *([tokens] * len(firsts) for tokens in ([8], [9, 10, 11], [12, 13]))):
        requests = [turn(*one, rid=None) for one in zip(ids, turns, strict=True)]
        answers = retracted(server, requests) if retracts else server.generate(requests)
        texts = [text + tokens for text, tokens in zip(texts, turns, strict=True)]
        whole = server.generate([greedy(text) for text in texts])
        for answer, other in zip(answers, whole, strict=True):
            assert answer["output_ids"] == other["output_ids"]
            assert answer["meta_info"]["prompt_tokens"] == other["meta_info"]["prompt_tokens"]
        texts = [text + one["output_ids"] for text, one in zip(texts, answers, strict=True)]
    for session in ids:
        closed(server, session)


def retracted(server: Server, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of requests that are retracted, all that run, again and again until they end."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.generate, requests)
        while not answers.done():
            server.pause("retract")
            server.resume()
            server.get("/health_generate")  # until there is another token
        return answers.result()


def test_retractions_change_no_greedy_text_and_no_number(server: Server, target: Target) -> None:
    """Whenever they come: counts of penalties, grammars and log-probabilities go on; traces say
    where particles began anew. Edits are as SGLang itself makes them, in each mode in turn."""
    cold: dict[str, Any] = {"temperature": 0.0}
    requests = {f"choice {i}": asked(one, LOGPROBS, **cold) for i, one in enumerate(CHOICES)}
    for name, mode in zip(EDITS, itertools.cycle(MODES), strict=False):
        requests[name] = edited(name, {"mode": mode}, **cold) | LOGPROBS
    for kind, mode in zip(GRAMMARS, itertools.cycle(MODES), strict=False):
        requests[kind] = constrained(kind, {"mode": mode}, **cold)
    traced = [asked({**smc, "trace": True}, sampling_seed=9) for smc in CHOICES]
    begun = 0
    for _ in range(20):  # until there was one, which time decides
        answers = retracted(server, [*requests.values(), *traced])
        for (name, request), answer in zip(requests.items(), answers, strict=False):
            assert_greedy(target, name, request, answer["output_ids"])
            if "return_logprob" in request:
                assert_scored(target, request, answer)
        for smc, answer in zip(CHOICES, answers[len(requests) :], strict=True):
            trace = read(answer["meta_info"])
            found = replay(trace, is_plain="power" not in smc, tolerance=1e-5)
            assert found.output_ids == answer["output_ids"]
            begun += sum(one.begins is not None for one in trace.rounds[1:])
        counts = [answer["meta_info"]["num_retractions"] for answer in answers]
        if begun and sum(counts[: len(requests)]):
            return
    raise AssertionError("nothing was retracted")


def test_the_more_important_take_the_place_of_others(server: Server) -> None:
    """Those that they displace lose their particles, and nothing of their text."""
    fields = {"return_logprob": True, "priority": 0}
    low = [greedy([token, 7], 150, **fields) for token in range(20, 36)]  # all that may run
    high = [greedy([token, 7], 8, priority=20) for token in (50, 51)]  # SGLang's threshold is 10
    for _ in range(20):  # until they came while the others ran
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(server.generate, low)
            while not answers.done():
                server.generate(high)
        pairs = zip(low, answers.result(), strict=True)
        if displaced := [both for both in pairs if both[1]["meta_info"]["num_retractions"]]:
            break
    assert displaced
    again = server.generate([request for request, _ in displaced])
    for (_, answer), calm in zip(displaced, again, strict=True):
        assert calm["output_ids"] == answer["output_ids"]
        values, calm_values = (
            [value for value, *_ in one["meta_info"]["output_token_logprobs"]]
            for one in (answer, calm)
        )
        assert values == pytest.approx(calm_values, abs=2e-4)
