"""Seeds of requests, what outlives a retraction, and what the streamer gets."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_smc.diagnostics import Counters
from sglang_smc.runs import RunBook, publish, run_of, unopened


def make_req(seed: int | None = None, row: int = 1, **changes: Any) -> Any:
    params = SimpleNamespace(
        sampling_seed=seed,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        max_new_tokens=20,
        min_new_tokens=2,
        ignore_eos=False,
        stop_token_ids=[4],
    )
    fields = {
        "sampling_params": params,
        "req_pool_idx": row,
        "retraction_count": 0,
        "output_ids": [],
        "eos_token_ids": {1},
        "tokenizer": None,
        "vocab_size": 10,
        "is_finished": False,
    }
    req = SimpleNamespace(**{**fields, **changes})
    req.finished = lambda: req.is_finished
    return req


def seeds(book: RunBook, *reqs: Any) -> list[int]:
    return [start.spec.seed for start in book.begin(list(reqs))]


def test_the_same_seed_gives_the_same_run_on_any_server_in_any_place() -> None:
    first = seeds(RunBook(4, random_seed=1), make_req(7))
    second = seeds(RunBook(8, random_seed=2), make_req(), make_req(7, row=3))
    assert first == second[1:]


def test_other_seeds_give_other_runs() -> None:
    book = RunBook(4, random_seed=1)
    assert len(set(seeds(book, *(make_req(seed) for seed in range(50))))) == 50


def test_requests_without_a_seed_all_differ_and_follow_from_the_servers() -> None:
    first = seeds(RunBook(4, random_seed=1), *(make_req() for _ in range(20)))
    again = seeds(RunBook(4, random_seed=1), *(make_req() for _ in range(20)))
    other = seeds(RunBook(4, random_seed=2), *(make_req() for _ in range(20)))
    assert len(set(first)) == 20
    assert first == again
    assert not set(first) & set(other)


def test_seeded_requests_do_not_shift_the_seeds_of_the_others() -> None:
    plain = seeds(RunBook(4, 1), make_req(), make_req())
    mixed = seeds(RunBook(4, 1), make_req(), make_req(9), make_req())
    assert plain == [mixed[0], mixed[2]]


@pytest.mark.parametrize("seed", [7, None])
def test_a_retracted_request_draws_new_numbers_but_the_same_each_time(seed: int | None) -> None:
    """The old ones led to the tails that were lost: drawn again they would bias the text."""

    def life(book: RunBook) -> list[int]:
        req = make_req(seed)
        found = seeds(book, req)
        for count in (1, 2):
            req.retraction_count = count
            found += seeds(book, req)
        return found

    found = life(RunBook(4, 1))
    assert len(set(found)) == 3
    assert found == life(RunBook(4, 1))


def test_what_was_counted_outlives_a_retraction() -> None:
    book, req = RunBook(4, 1), make_req(7)
    assert book.begin([req])[0].counters == [0.0] * len(Counters._fields)
    req.smc_run.counters = [float(i) for i in range(len(Counters._fields))]
    req.output_ids, req.retraction_count = [5, 6, 7], 1
    start = book.begin([req])[0]
    assert start.counters == req.smc_run.counters
    assert start.num_emitted == 3


def test_a_request_is_opened_once_after_each_prefill() -> None:
    book, reqs = RunBook(4, 1), [make_req(1), make_req(2)]
    book.begin(reqs)
    assert unopened(reqs) == reqs
    assert unopened(reqs) == []
    book.begin(reqs[:1])
    assert unopened(reqs) == reqs[:1]


def test_the_spec_carries_what_the_request_asked_for() -> None:
    spec = RunBook(4, 1).begin([make_req(7, row=3)])[0].spec
    assert (spec.row, spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (3, 0.7, 5, 0.9, 0.1)
    assert (spec.max_new_tokens, spec.min_new_tokens, spec.ignore_eos) == (20, 2, False)
    assert spec.stop_tokens == {1, 4}


def test_only_finished_requests_of_smc_publish() -> None:
    stranger = make_req(is_finished=True)
    publish(stranger)
    assert run_of(stranger) is None
    assert "customized_info" not in stranger.__dict__
    running = make_req()
    RunBook(4, 1).begin([running])
    publish(running)
    assert "customized_info" not in running.__dict__


def test_published_totals_are_whole_in_every_slice() -> None:
    """The streamer slices from the last sent token on; a plain list of one would be empty there."""
    req = make_req(is_finished=True)
    RunBook(4, 1).begin([req])
    req.smc_run.counters = [3.0, 2.0, 1.0, 0.0, 9.0, -0.5]
    publish(req)
    values = req.customized_info["spec_smc_rounds_ct"]
    assert values[0] == values[-1] == 3
    for whole in (values[0:1], values[17:], values[5:9], values[:]):
        assert whole == [3]
    assert len(values) == 1
    assert all(name.startswith("spec_smc_") for name in req.customized_info)
