"""Two tensor-parallel ranks decide alike, bit for bit; two replicas share the requests.

Ranks talk over gloo, SGLang's strict memory checks run at every step, and a seed gives the text of
the one rank that runs in this process.
"""

import os
import random
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from http_server import running_server
from model_families import make_model
from safetensors.torch import load_file, save_file
from tiny_models import smc_arguments

from sglang_smc_tools.demo.serving import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS = {"num_particles": 4, "num_steps": 3, "max_lag": 16}
KINDS: list[dict[str, Any]] = [
    {},
    {"mode": "exact"},
    {"mode": "auto"},
    {"mode": "exact", "num_particles": 2},
    {"num_particles": 3, "resampling_method": "multinomial", "resample_at": "token"},
    {"power": 2.0},
]
NUM_REQUESTS = 24


def request(index: int) -> dict[str, Any]:
    """Modes, sizes, temperatures and ends in turn."""
    draw = random.Random(index)
    params = {
        "temperature": (0.0, 0.8, 1.2)[index % 3],
        "max_new_tokens": 12 + index,
        "sampling_seed": index,
        "custom_params": {"smc": KINDS[index // 3 % len(KINDS)]},
        **({"stop": [f"{index % 10} t"]} if index % 4 == 0 else {"ignore_eos": True}),
    }
    prompt = [draw.randrange(2, 64) for _ in range(draw.randrange(1, 40))]
    return {"input_ids": prompt, "sampling_params": params}


REQUESTS = [request(index) for index in range(NUM_REQUESTS)]


def smc_of(asked: dict[str, Any]) -> dict[str, Any]:
    return asked["sampling_params"]["custom_params"]["smc"]


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    """A target, and a draft with one key head, of which each rank gets a copy."""
    return tiny(seed=1, vocab_size=64, scale=0.3), tiny(
        seed=2, kv_heads=1, vocab_size=64, scale=0.3
    )


def of_one_rank(
    pair: tuple[str, str], requests: list[dict[str, Any]] = REQUESTS, **settings: Any
) -> list[tuple[list[int], str]]:
    import in_process

    with in_process.running(**smc_arguments(*pair, **SETTINGS, **settings)) as server:
        replies = server.play(requests, every=0)
    found = [(reply.output_ids, str(reply.why)) for reply in replies]
    assert {end for _, end in found} == {"stop", "length"}
    return found


@pytest.fixture(scope="module")
def expected(pair: tuple[str, str]) -> list[tuple[list[int], str]]:
    return of_one_rank(pair)


@pytest.fixture
def start(
    engine: Callable[..., Any],
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Callable[..., Any]:
    """Start an engine whose ranks write what they hold; what the platform sets goes away."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_NCCL_SO_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK_PROBE_OUT", str(tmp_path))
    monkeypatch.syspath_prepend(str(request.config.rootpath / "tests" / "rank_probe"))
    return lambda *models, **settings: engine(
        **smc_arguments(*(models or pair), **SETTINGS, **settings)
    )


def answers(running: Any, requests: list[dict[str, Any]] = REQUESTS) -> list[tuple[list[int], str]]:
    """Tokens, and why they end, of one batch of requests of all kinds."""
    together = {name: [one[name] for one in requests] for name in requests[0]}
    found = running.generate(**together)
    return [(a["output_ids"], a["meta_info"]["finish_reason"]["type"]) for a in found]


def lines_of_ranks(folder: Path) -> list[list[str]]:
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    return [text[: text.rfind("\n")].splitlines() for text in texts]


def assert_ranks_agree(folder: Path) -> None:
    """The first rank answers; the second may have yet to write its last lines."""
    first, second = lines_of_ranks(folder)
    rounds = min(len(first), len(second))
    assert rounds > 20
    assert abs(len(first) - len(second)) <= 2, "they meet in each pass of a model"
    assert first[:rounds] == second[:rounds]


def test_two_ranks_agree_and_give_one_ranks_text(
    start: Callable[..., Any], expected: list, tmp_path: Path
) -> None:
    assert answers(start(tp_size=2)) == expected
    assert_ranks_agree(tmp_path)


@pytest.mark.nightly
def test_two_nodes_give_one_ranks_text(
    start: Callable[..., Any], pair: tuple[str, str], expected: list, tmp_path: Path
) -> None:
    """Of servers that users start on two machines the first answers."""
    given = smc_arguments(*pair, **SETTINGS, tp_size=2, nnodes=2)
    given["dist_init_addr"] = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        nodes = [running_server(tmp_path / f"{i}", node_rank=i, **given) for i in range(2)]
        first, _ = pool.map(stack.enter_context, nodes)
        found = first.generate(REQUESTS)
    ends = [(one["output_ids"], one["meta_info"]["finish_reason"]["type"]) for one in found]
    assert ends == expected


@pytest.mark.nightly
def test_two_replicas_of_two_ranks_give_one_ranks_text(
    start: Callable[..., Any],
    pair: tuple[str, str],
    expected: list,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each replica has its metrics, and forgets a request whose client leaves."""
    (ranks := tmp_path / "ranks").mkdir()
    monkeypatch.setenv("RANK_PROBE_OUT", str(ranks))
    given = smc_arguments(*pair, **SETTINGS, tp_size=2, dp_size=2, enable_metrics=True)
    given["load_balance_method"] = "round_robin"
    where = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # of the probe, too
    with running_server(tmp_path, where, **given) as server:
        found = server.generate(REQUESTS)
        told = server.get("/server_info").json()["internal_states"]
        metrics = server.get("/metrics").text
        params = {"max_new_tokens": 200, "ignore_eos": True}
        asked = {"input_ids": [3, 4], "sampling_params": params}
        for index in range(2):  # a replica each
            with server.stream(**asked, rid=f"gone-{index}") as chunks:
                next(chunks)
                assert server.post("/abort_request", rid=f"gone-{index}").status_code == 200
                assert [*chunks][-1]["meta_info"]["finish_reason"]["type"] == "abort"
    ends = [(one["output_ids"], one["meta_info"]["finish_reason"]["type"]) for one in found]
    assert ends == expected
    assert [state["smc"]["memory"]["pool_slots"] for state in told] == [4096, 4096]
    for replica in range(2):
        assert f'spec_smc_ess_ratio_count{{dp_rank="{replica}"' in metrics
    first, second = map(sorted, lines_of_ranks(ranks))  # of both replicas, mixed
    assert first == second


@pytest.mark.nightly
def test_prefixes_of_two_ranks_come_back_from_the_host(
    start: Callable[..., Any], expected: list, tmp_path: Path
) -> None:
    given = {"hicache_write_policy": "write_through", "hicache_ratio": 6.0, "max_total_tokens": 500}
    running = start(tp_size=2, enable_hierarchical_cache=True, **given)
    assert answers(running) == expected
    together = {name: [one[name] for one in REQUESTS] for name in REQUESTS[0]}
    found = running.generate(**together)
    assert [one["output_ids"] for one in found] == [tokens for tokens, _ in expected]
    details = [one["meta_info"]["cached_tokens_details"] or {} for one in found]
    assert any(of.get("host") for of in details)
    assert_ranks_agree(tmp_path)


@pytest.mark.nightly
def test_experts_on_two_ranks_give_one_ranks_text(
    start: Callable[..., Any], pair: tuple[str, str], tmp_path: Path
) -> None:
    """Each rank has half of the experts, whole, instead of half of each."""
    models = make_model(tmp_path / "experts", "mixtral", seed=1), pair[1]
    (ranks := tmp_path / "ranks").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RANK_PROBE_OUT", str(ranks))
        found = answers(start(*models, tp_size=2, ep_size=2))
    assert_ranks_agree(ranks)
    assert found == of_one_rank(models)


@pytest.mark.nightly
def test_frequent_tokens_on_two_ranks_give_one_ranks_text(
    start: Callable[..., Any], pair: tuple[str, str], tmp_path: Path
) -> None:
    """Each rank has 19 of 37 rows, some from the other's part of the table; the last is padding."""
    path = tmp_path / "map.pt"
    torch.save([*range(60, 23, -1)], path)
    requests = [one for one in REQUESTS if "power" not in smc_of(one)]  # would never reach others
    given = {"speculative_token_map": str(path)}
    expected = of_one_rank(pair, requests, **given)
    assert answers(start(tp_size=2, **given), requests) == expected


@pytest.mark.nightly  # scheduler/test_adaptive.py has the ranks' one count
def test_ranks_adapt_alike(start: Callable[..., Any], tmp_path: Path) -> None:
    """Each rank measures costs, and the clocks differ: one rank's count for both."""
    running = start(tp_size=2, adaptive="on", max_running_requests=12)
    for given, (tokens, end) in zip(REQUESTS, answers(running), strict=True):
        assert end == "stop" or len(tokens) == given["sampling_params"]["max_new_tokens"]
    assert_ranks_agree(tmp_path)


def test_two_replicas_share_the_requests(
    start: Callable[..., Any], expected: list, tmp_path: Path
) -> None:
    """Plugins load in the processes of SGLang's data-parallel controller, too."""
    running = start(dp_size=2, load_balance_method="round_robin")
    assert answers(running) == expected
    unseeded = {"max_new_tokens": 16, "ignore_eos": True}
    texts = running.generate(input_ids=[[3, 4]] * 8, sampling_params=unseeded)
    assert len({tuple(answer["output_ids"]) for answer in texts}) == 8, "replicas draw alike"
    (both,) = tmp_path.iterdir()  # each replica calls itself rank 0
    lines = both.read_text().splitlines()
    assert max(int(line.split()[0]) for line in lines) <= NUM_REQUESTS // 2


def with_twins(path: Path, model: str) -> str:
    """A copy of a model in which each token of one half of the vocabulary has a twin in the other.

    Each rank has one half of the LM head.
    """
    shutil.copytree(model, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    rows = tensors["lm_head.weight"]
    half = len(rows) // 2
    tensors["lm_head.weight"] = torch.cat([rows[:half], rows[:half]])
    save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


@pytest.mark.nightly
def test_two_ranks_break_ties_alike(
    start: Callable[..., Any], pair: tuple[str, str], tmp_path: Path
) -> None:
    """At temperature 0 each token is one of two equals; no rank waits for what is aborted."""
    models = [with_twins(tmp_path / str(i), model) for i, model in enumerate(pair)]
    cold = [
        {**one, "sampling_params": {**one["sampling_params"], "temperature": 0.0}}
        for one in REQUESTS
    ]
    (ranks := tmp_path / "ranks").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RANK_PROBE_OUT", str(ranks))
        running = start(*models, tp_size=2)
        for index, one in enumerate(cold[:6]):
            body = {**one, "sampling_params": {**one["sampling_params"], "max_new_tokens": 200}}
            chunks = running.generate(**body, rid=f"gone-{index}", stream=True)
            heard = [next(chunks)]
            running.tokenizer_manager.abort_request(f"gone-{index}")
            heard += chunks
            assert heard[-1]["meta_info"]["finish_reason"]["type"] in ("abort", "stop")
        found = answers(running, cold)
    assert_ranks_agree(ranks)
    assert found == of_one_rank((models[0], models[1]), cold)
