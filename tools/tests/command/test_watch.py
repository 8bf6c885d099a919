"""``sglang-smc watch``: intervals from what a server tells. A stand-in tells it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from hostile import HOSTILE
from little_server import answering

from sglang_smc_tools import watch
from sglang_smc_tools.watch import HEADER, REQUEST_HEADER, Snapshot, lines_of, rates

KEYS = "rounds weighed_rounds mean_ess_ratio kept_columns emitted_tokens resamplings silent_rounds"
BEFORE: dict[str, Any] = dict(zip(KEYS.split(), (100, 50, 0.5, 700, 600, 60, 10), strict=True))
# The mean: 25 before, 33 now, so 8 in 10 rounds.
AFTER: dict[str, Any] = dict(zip(KEYS.split(), (120, 60, 0.55, 800, 700, 65, 12), strict=True))
IN_FORCE = {"mode": "smc", "num_particles": 8, "num_steps": 4}
LOAD = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1}
LOAD |= {"num_used_tokens": 250, "max_total_num_tokens": 1000}
REQUEST = {
    "rid": "0123456789abcdef",
    "output_tokens": 42,
    "mode": "auto",
    "num_particles": 3,
    "num_steps": 2,
    "rounds": 14,
    "tokens_per_pass": 3.0,
    "ess_ratio": 0.456,
    "resample_rate": 0.25,
}
SILENT = {**REQUEST, "rid": "b", "tokens_per_pass": None, "ess_ratio": None, "resample_rate": None}


def state(totals: dict[str, Any], *requests: dict[str, Any], **in_force: Any) -> dict[str, Any]:
    found = {"since_start": totals, "in_force": {**IN_FORCE, **in_force}, "running": requests}
    return {"smc": found | {"fidelity": {"all": {"tilt": 0.312}, "exact": {"tilt": 0.0}}}}


def snapshot(at: float, *of: dict[str, Any], **in_force: Any) -> Snapshot:
    return Snapshot(at, state(*of, **in_force)["smc"], LOAD)


def lines(before: dict[str, Any], *after: dict[str, Any], **in_force: Any) -> list[str]:
    return lines_of([snapshot(10, before)], [snapshot(12, *after, **in_force)])


def test_an_interval_is_the_difference_of_two_looks() -> None:
    found = rates(snapshot(10, BEFORE), snapshot(12, AFTER))
    assert found["tokens/s"] == 50
    assert found["tokens/pass"] == 5  # 100 tokens in 20 rounds
    assert found["ESS / N"] == pytest.approx(0.8)
    assert (found["resampled"], found["silent"], found["KV free"]) == (0.25, 0.1, 0.75)
    assert [found[name] for name in ("running", "waiting", "N", "K")] == [3, 1, 8, 4]
    cells = ["0", "3", "1", "0.0", "-", "-", "-", "-", "0.31", "smc", "8", "4", "75%"]
    assert lines(AFTER, AFTER)[0].split() == cells, "without a round"
    anew = rates(snapshot(10, AFTER), snapshot(12, {**BEFORE, "rounds": 20}))  # restarted
    assert anew["tokens/s"] == 300 and anew["ESS / N"] == pytest.approx(0.5)


def test_requests_that_run_stand_below_their_replica() -> None:
    """Of two replicas, each in its own row; and how many more there are."""
    pair = [snapshot(10, BEFORE)] * 2, [snapshot(12, AFTER, REQUEST), snapshot(12, AFTER, SILENT)]
    found = lines_of(*pair)
    assert found[2:4] == ["", REQUEST_HEADER]
    assert found[4].split() == ["0", "0123456789ab", "42", "3.00", "0.46", "25%", "auto", "3", "2"]
    assert found[5].split() == ["1", "b", "42", "-", "-", "-", "auto", "3", "2"]
    assert found[6].split() == ["and", "4", "more"], "each replica has three"
    assert len(lines(BEFORE, AFTER)) == 1


def test_an_adaptive_replica_says_why_below_all() -> None:
    """Which has no reason where N and K stay."""
    known = [snapshot(10, AFTER)] * 2
    why = known[1]._replace(smc={**known[1].smc, "reason": "1 row a request"})
    assert lines_of(known, [known[0], why])[2:] == ["   1  1 row a request"]


def test_text_of_clients_is_shown_in_escapes() -> None:
    """Whatever field has it, and in its own column."""
    hostile = {**REQUEST, "rid": HOSTILE, "mode": HOSTILE, "output_tokens": HOSTILE}
    found = lines(BEFORE, AFTER, hostile, mode=HOSTILE)
    assert all(line.isprintable() for line in found)
    one, plain = (lines(BEFORE, AFTER, {**REQUEST, "rid": rid}) for rid in ("\a\x1b[2J", "b"))
    assert len(one[3]) == len(plain[3])


@contextmanager
def serving(*states: dict[str, Any], key: str = "") -> Iterator[str]:
    """A server that answers with these states in turn, the last again and again."""
    left = list(states)

    def answer(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        if key and headers["Authorization"] != f"Bearer {key}":
            return 401, {}
        if path == "/server_info":
            return 200, {"internal_states": [left.pop(0) if len(left) > 1 else left[0]]}
        assert path == "/v1/loads?include=core"
        return 200, {"loads": [LOAD]}

    with answering(answer) as url:
        yield url


def test_once_prints_one_line_and_sends_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(state(BEFORE), state(AFTER), key="secret") as url:
        words = "--once", "--interval", "0.1"
        assert watch.main([url, *words]) == 1
        assert "--api-key" in capsys.readouterr().err
        assert watch.main([f"{url}/", *words, "--api-key", "secret"]) == 0
    header, line = capsys.readouterr().out.splitlines()[-2:]
    assert header == HEADER and "5.00" in line and watch.CLEAR not in line


def test_nothing_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor SMC at what is there."""
    for url in ("http://127.0.0.1:9", "nonsense"):
        assert watch.main([url, "--once"]) == 1
        assert f"{url}: no server answers" in capsys.readouterr().err
    with serving({}) as url:
        assert watch.main([url, "--once"]) == 1
    assert "does not run SMC" in capsys.readouterr().err
