"""Two tensor-parallel ranks decide alike, bit for bit; two replicas share the requests.

Ranks talk over gloo, SGLang's strict memory checks run at every step, and a seed gives the same
text as on one rank.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import smc_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS = {"num_particles": 4, "num_steps": 3, "max_lag": 16}
KINDS: list[dict[str, Any]] = [
    {},
    {"mode": "exact"},
    {"mode": "mixed"},
    {"mode": "exact", "num_particles": 2},
    {"num_particles": 3, "resampling_method": "residual", "resample_at": "token"},
    {"power": 2.0},
]
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """One thread a process. What the platform sets for two ranks goes away with the test."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        for name in ("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_NCCL_SO_PATH"):
            environment.setenv(name, "")
            environment.delenv(name)
        yield environment


@pytest.fixture(scope="module")
def start(
    engine: Callable[..., Any], tiny: Callable[..., str], environment: pytest.MonkeyPatch
) -> Callable[..., Any]:
    # The draft has one key head, of which each rank gets a copy.
    pair = [tiny(seed=s, kv_heads=k, vocab_size=64, scale=0.3) for s, k in ((1, 2), (2, 1))]
    return lambda **settings: engine(**smc_arguments(*pair, **SETTINGS, **settings))


@pytest.fixture
def ranks(
    environment: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[], list[list[str]]]]:
    """What the ranks of the engine to be started hold after each round, a list of lines each."""

    def read() -> list[list[str]]:
        # The first rank answers; the second may have yet to write its last line.
        deadline = time.monotonic() + 30
        while True:
            found = [path.read_text().splitlines() for path in sorted(tmp_path.iterdir())]
            if len(set(map(len, found))) == 1 or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK_PROBE_OUT", str(tmp_path))
        patch.syspath_prepend(str(request.config.rootpath / "tests" / "rank_probe"))
        yield read


def params(index: int) -> dict[str, Any]:
    """Modes, sizes, temperatures and ends in turn."""
    return {
        "temperature": (0.0, 0.8, 1.2)[index % 3],
        "max_new_tokens": 12 + index,
        "sampling_seed": index,
        "custom_params": {"smc": KINDS[index // 3 % len(KINDS)]},
        **({"stop": [f"{index % 10} t"]} if index % 4 == 0 else {"ignore_eos": True}),
    }


def answers(running: Any) -> list[tuple[list[int], str]]:
    """Tokens, and why they end, of one batch of requests of all kinds."""
    draw = random.Random(0)
    prompts = [
        [draw.randrange(2, 64) for _ in range(draw.randrange(1, 40))] for _ in range(NUM_REQUESTS)
    ]
    found = running.generate(
        input_ids=prompts, sampling_params=[params(index) for index in range(NUM_REQUESTS)]
    )
    return [(a["output_ids"], a["meta_info"]["finish_reason"]["type"]) for a in found]


@pytest.fixture(scope="module")
def expected(start: Callable[..., Any]) -> list[tuple[list[int], str]]:
    found = answers(start())
    assert {end for _, end in found} == {"stop", "length"}
    return found


def test_two_ranks_agree_and_give_one_ranks_text(
    start: Callable[..., Any], expected: list, ranks: Callable[[], list[list[str]]]
) -> None:
    assert answers(start(tp_size=2)) == expected
    first, second = ranks()
    assert len(first) > 20
    assert first == second


def test_ranks_adapt_alike(start: Callable[..., Any], ranks: Callable[[], list[list[str]]]) -> None:
    """Each rank measures costs, and the clocks differ: one rank's count for both."""
    running = start(tp_size=2, adaptive=True, max_running_requests=12)
    found = answers(running)
    for index, (tokens, end) in enumerate(found):
        assert end == "stop" or len(tokens) == params(index)["max_new_tokens"]
    first, second = ranks()
    assert len(first) > 20
    assert first == second


def test_two_replicas_share_the_requests(
    start: Callable[..., Any], expected: list, ranks: Callable[[], list[list[str]]]
) -> None:
    """Plugins load in the processes of SGLang's data-parallel controller, too."""
    running = start(dp_size=2, load_balance_method="round_robin")
    assert answers(running) == expected
    unseeded = {"max_new_tokens": 16, "ignore_eos": True}
    texts = running.generate(input_ids=[[3, 4]] * 8, sampling_params=unseeded)
    assert len({tuple(answer["output_ids"]) for answer in texts}) == 8, "replicas draw alike"
    (both,) = ranks()  # each replica calls itself rank 0
    assert max(int(line.split()[0]) for line in both) <= NUM_REQUESTS // 2
