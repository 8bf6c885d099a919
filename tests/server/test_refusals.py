"""What a server refuses, in words that help; and what fails by itself, and nothing beside it."""

import contextlib
import json
import time
from typing import Any

import httpx
import psutil
import pytest
from bad_requests import bad_requests
from http_server import HANGS, Server
from routed import ROUTES
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor as Disallowed
from spelling import IS_LEGAL, VOCAB

from server.kinds import EOS, MODES, PLAIN, asked, constrained

ENDLESS = 'a\na ::= a "x"'  # what an a is nobody can say


def steered(
    name: str = "count", smc: dict[str, Any] | None = None, grammar: str | None = None, **more: Any
) -> dict[str, Any]:
    """A request with a potential."""
    return asked({"potentials": [{"name": name, **more}], **(smc or {})}, regex=grammar)


def barred(smc: dict[str, Any], **params: Any) -> dict[str, Any]:
    """A request with a processor that leaves no token."""
    params["custom_params"] = {"token_ids": list(range(VOCAB))}
    return asked(smc, {"custom_logit_processor": Disallowed.to_str()}, **params)


NO_TOKEN = "DisallowedTokensLogitsProcessor leaves no token to draw"
REFUSED: list[tuple[dict[str, Any], str]] = [
    (asked({"num_particles": 5}), "num_particles=5; allowed: an integer from 1 to 4"),
    (asked(fields={"lora_path": "choice"}), "'choice-0', 'choice-1'"),
    (asked(fields={"image_data": "file:///etc/passwd"}), "image_data"),
    (steered(args={"tokn": 3}), "unknown field `tokn`; allowed: token: int, weight: float"),
    (steered(when="often"), "potential 'count' with when='often'; allowed"),
    (steered(exponent=-1), "exponent=-1.0; allowed: a finite number >= 0"),
    (steered(smc={"mode": "exact"}), "has no effect in mode 'exact'; allowed: mode 'smc'"),
    (steered(smc={"evidence_threshold": 0.5}), "beside potentials; allowed"),
    (asked(regex="("), "Failed to compile regex grammar"),
    (asked(regex="a", ebnf='root ::= "a"'), "Only one of"),
]
# What is found out once they run.
FAILING: list[tuple[dict[str, Any], str]] = [
    *(
        (asked({"mode": mode}, **given), "admits no text here: behind the ")
        for mode in MODES
        for given in (
            {"ebnf": f"root ::= {ENDLESS}"},
            {"ebnf": f'root ::= "abc" {ENDLESS}'},
            {"regex": "abc", "min_new_tokens": 20},
        )
    ),
    *(
        (steered("broken", args={"does": does}), words)
        for does, words in {
            "raise": "RuntimeError: the oracle is silent",
            "exit": "SystemExit: the oracle has left",
            "write": "TypeError: 'tuple' object does not support item assignment",
            "nan": "gave nan",
            "forbid": "forbid the texts of all",
        }.items()
    ),
    (steered("broken", args={"does": "forbid"}, grammar="[a-z ]*"), "forbid the texts of all"),
    (
        asked(fields={"custom_logit_processor": Disallowed.to_str()}),
        "custom logit processor raised KeyError",
    ),
    *((barred(smc), NO_TOKEN) for smc in (*({"mode": mode} for mode in MODES), PLAIN)),
]


def test_what_is_refused_or_fails_is_told_and_harms_no_neighbour(server: Server) -> None:
    """All of it at once, between answers that come out as they do by themselves."""
    cold: dict[str, Any] = {"temperature": 0.0}
    quiet = steered("broken", args={"does": "nothing"})
    quiet["sampling_params"] |= cold
    neighbours = [asked(**cold), quiet]
    neighbours += [constrained("ebnf", {"mode": mode}, **cold) for mode in ("smc", "exact")]
    wrong = [*REFUSED, *FAILING]
    found = server.outcomes([*neighbours, *(request for request, _ in wrong)])
    for outcome, (request, words) in zip(found[len(neighbours) :], wrong, strict=True):
        assert outcome.status_code in (400, 500), (request, outcome.text)
        assert words in outcome.text, request
        assert "root:" not in outcome.text
    calm = server.generate(neighbours)
    for outcome, again in zip(found, calm, strict=False):
        assert outcome.json()["output_ids"] == again["output_ids"]
    assert all(IS_LEGAL["ebnf"](answer["text"]) for answer in calm[2:])


def together(*requests: dict[str, Any]) -> dict[str, Any]:
    """One request with a list of prompts."""
    fields = ("input_ids", "sampling_params", "custom_logit_processor")
    given = [field for field in fields if any(field in one for one in requests)]
    return {field: [one.get(field) for one in requests] for field in given}


def test_an_item_of_a_list_fails_alone(server: Server) -> None:
    """Red if it takes its neighbour's answer; where all fail there is none, but an error."""
    kinds = [{"mode": mode} for mode in MODES]
    fine = [asked(smc, temperature=0.0) for smc in kinds]
    lists = [together(barred(smc), one) for smc, one in zip(kinds, fine, strict=True)]
    samples = asked({"mode": "exact"}, n=2)
    lists.append(together(samples, asked({"mode": "exact"}, regex="abc", min_new_tokens=20, n=2)))
    *found, all_fail = server.outcomes([*lists, together(*map(barred, kinds))])
    alone = [[one] for one in server.generate(fine)] + server.generate([samples])
    for outcome, neighbours in zip(found, alone, strict=True):
        failed = []
        whole = []
        for item in outcome.json():
            reason = item["meta_info"]["finish_reason"]
            (failed if reason["type"] == "abort" else whole).append(item)
        assert [one["output_ids"] for one in whole] == [one["output_ids"] for one in neighbours]
        assert len(failed) == len(whole)
        for item in failed:
            reason = item["meta_info"]["finish_reason"]
            assert reason["message"] and reason["status_code"] == 400
    assert all_fail.status_code == 400 and NO_TOKEN in all_fail.text
    instances = [{"input_ids": ids} for ids in lists[0].pop("input_ids")]
    of_vertex = server.post("/vertex_generate", instances=instances, parameters=lists[0]).json()
    reasons = [item["meta_info"]["finish_reason"]["type"] for item in of_vertex["predictions"]]
    assert reasons == ["abort", "length"]


def test_a_refused_stream_leaves_no_traceback(server: Server, model: str) -> None:
    """On all routes: red where SGLang, two seconds behind a stream, asks for what it never had."""
    begin = server.log.stat().st_size
    refused = 0
    asked = [("/generate", body) for body, _ in (*REFUSED, *FAILING)]
    asked += [(route, body(model, "exat")) for route, body in ROUTES.items()]
    for bad in bad_requests(200):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON
            body = json.loads(bad.body)
            asked += [(bad.route, body)] if isinstance(body, dict) else []
    for route, body in asked:
        content = json.dumps({**body, "stream": True})
        headers = {"content-type": "application/json"}
        answer = server.client.post(route, content=content, headers=headers)
        refused += answer.status_code >= 400 or "error" in answer.text or "abort" in answer.text
    assert refused > 0.9 * len(asked), "this server takes some that another refuses"
    time.sleep(3)
    assert b"Traceback" not in server.log.read_bytes()[begin:]


def test_a_late_potential_ends_its_own_requests(server: Server) -> None:
    late = steered("slow", args={"seconds": 12.0})
    first, *others = server.outcomes([late, steered(when="end"), asked()])
    assert first.status_code == 503 and "took more than 10 s" in first.text
    assert all(len(other.json()["output_ids"]) == 24 for other in others)


def test_limits_stops_and_ends_hold_within_a_grammar(server: Server) -> None:
    """A grammar's end is one even where EOS is ignored: in each column of a round."""
    for mode in MODES:
        smc = {"mode": mode}
        own = [
            {"regex": "[a-d]{60}", "max_new_tokens": 9},
            {"regex": "[a-d]{200}", "max_new_tokens": 80, "stop": ["c"]},
            {"regex": "[a-d]{0,60}", "max_new_tokens": 40, "min_new_tokens": 12},
        ]
        lengths = [{"regex": f"[a-d]{{{size}}}", "sampling_seed": size} for size in range(8)]
        requests = [asked(smc, temperature=1.5, **one) for one in (*own, *lengths)]
        cut, stopped, late, *whole = server.generate(requests)
        assert len(cut["output_ids"]) == 9 and set(cut["text"]) <= set("abcd")
        assert cut["meta_info"]["finish_reason"]["type"] == "length"
        assert stopped["meta_info"]["finish_reason"]["matched"] == "c"
        assert set(stopped["text"]) <= set("abd") and len(late["output_ids"]) >= 12
        for size, answer in enumerate(whole):
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            assert len(answer["text"]) == size
            assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1


@pytest.mark.parametrize("key", [None, "another key", "a key of this serve", "A KEY"])
def test_without_the_key_nothing_is_served(server: Server, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    routes = ("/server_info", "/get_model_info", "/v1/models", "/metrics", "/health")
    with httpx.Client(base_url=server.url, headers=headers, timeout=HANGS) as client:
        assert client.post("/generate", json=asked()).status_code == 401
        found = {route: client.get(route).status_code for route in routes}
    assert found == {route: 200 if route in ("/metrics", "/health") else 401 for route in routes}


def test_only_this_machine_can_connect(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    process = psutil.Process(server.process.pid)
    tree = process, *process.children(recursive=True)
    found = [connection for one in tree for connection in one.net_connections("tcp")]
    own = [one for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
    assert {one.laddr.ip for one in own} == {"127.0.0.1"}
