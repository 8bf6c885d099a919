"""A decode server with SMC goes on from what a stock prefill server has read.

Both run on this machine, with SGLang's own transfer of KV over a stand-in for Mooncake's engine.
The draft is a copy of the target: in mode `exact` all its tokens are kept, if it has read the same.
"""

import json
import os
import random
import signal
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from http_server import Server, running_router, running_server
from server.target import Target
from server.test_target import assert_greedy
from tiny_models import smc_arguments

from sglang_smc.upstream import IS_NEWEST
from sglang_smc_tools.demo.serving import free_port

if not IS_NEWEST:
    pytest.skip("older releases are refused", allow_module_level=True)

from sglang.test.kits import pd_parity_kit

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VOCAB = 64
EOS = 1
NEAR = 2e-4
NUM_STEPS = 3
MODES = ("exact", "smc", "auto")
EDITS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 1.0, "logit_bias": {"5": 2.0}},
    {"repetition_penalty": 1.3, "min_new_tokens": 8},
    {"stop": ["7 t", "t9"]},
]
#: Each eighth pass one request is retracted, by SGLang's own means of testing that.
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "8"}
LONG = {"max_new_tokens": 200, "ignore_eos": True}
LISTED = [5, 9]


class Pair(NamedTuple):
    """Both servers, as a router knows them."""

    prefill: Server
    decode: Server
    port: int  # at which they meet

    def met(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return requests with a number each, by which the servers know them."""
        meet = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port}
        return [{**one, **meet, "bootstrap_room": random.getrandbits(31)} for one in requests]

    def generate(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send requests to both at once, and return what the decode server answers."""
        sent = self.met(requests)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.prefill.outcomes, sent)
            return self.decode.generate(sent)

    def update(self, path: str) -> None:
        """Load other weights of the target into both."""
        for server in self[:2]:
            found = server.post("/update_weights_from_disk", model_path=path)
            assert found.status_code == 200, found.text


@pytest.fixture(scope="module")
def path(tiny: Callable[..., str]) -> str:
    return tiny(seed=1, vocab_size=VOCAB, scale=0.3)


@pytest.fixture(scope="module")
def pair(
    schedule: dict[str, str], path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    port = free_port()
    path_of = str(Path(__file__).parent / "transfer"), os.environ.get("PYTHONPATH")
    found = {"PYTHONPATH": os.pathsep.join(filter(None, path_of))}
    shared: dict[str, Any] = {
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_bootstrap_port": port,
        "page_size": 4,
    }
    # On a CPU SGLang sends no prompt in parts.
    alone = {"disable_radix_cache": True, "chunked_prefill_size": -1}
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    shared["chat_template"] = str(template)
    reads = {**shared, **alone, "model_path": path, "disaggregation_mode": "prefill"}
    known = json.dumps({"two": {"mode": "exact", "num_particles": 2}})
    sizes = {"num_particles": 4, "num_steps": NUM_STEPS, "max_lag": 8}
    decodes = smc_arguments(path, path, **sizes, presets=known)
    decodes |= shared | {
        "disaggregation_mode": "decode",
        "chunked_prefill_size": 16,  # in which the draft reads
        "num_reserved_decode_tokens": 1,  # at least an arena all the same
        "max_total_tokens": 700,  # too few for all requests at once
    }
    with (
        running_server(folder / "prefill", found, **reads) as prefill,
        running_server(folder / "decode", found | schedule | RETRACTING, **decodes) as decode,
    ):
        yield Pair(prefill, decode, port)


def asked(index: int) -> dict[str, Any]:
    draw = random.Random(index)
    params = {
        "temperature": (0.0, 1.0)[index % 2],
        "max_new_tokens": 24 + 3 * index if index else 1,
        "ignore_eos": index % 5 != 4,
        "sampling_seed": index,
        "custom_params": {"smc": {"mode": MODES[index // 2 % 3]}},
        **EDITS[index // 8 % 4],
    }
    prompt = [draw.randrange(2, VOCAB) for _ in range(draw.randrange(2, 40))]
    scored = {"return_logprob": True, "token_ids_logprob": LISTED} if index % 3 == 0 else {}
    return {"input_ids": prompt, "sampling_params": params, **scored}


def test_texts_are_the_targets_and_drafts_are_kept(pair: Pair, path: str) -> None:
    requests = [asked(index) for index in range(32)]
    target = Target(path, EOS)
    answers = pair.generate(requests)
    for request, answer in zip(requests, answers, strict=True):
        check(target, request, answer)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


def check(target: Target, request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Compare a text's end, tokens, log-probabilities and rounds with the target's."""
    output = answer["output_ids"]
    info = answer["meta_info"]
    params = request["sampling_params"]
    stops = info["finish_reason"]["type"] == "stop"
    assert stops or len(output) == params["max_new_tokens"]
    assert not stops or "stop" in params or output[-1] == EOS
    if params["temperature"] == 0:
        assert_greedy(target, "", request, output)
    if "return_logprob" in request:
        wanted = target.log_probs(request, output)
        told = [(value, token) for value, token, _ in info["output_token_logprobs"]]
        assert [token for _, token in told] == output
        each = [wanted[i, token].item() for i, token in enumerate(output)]
        assert [value for value, _ in told] == pytest.approx(each, abs=NEAR)
        rows = info["output_token_ids_logprobs"][1:]  # those of the first token are not sent
        listed = [[value for value, *_ in row] for row in rows]
        assert listed == [pytest.approx(row, abs=NEAR) for row in wanted[1:, LISTED].tolist()]
    if info["spec_smc_mode"] == "exact" and not stops:
        rounds = info["spec_smc_rounds_ct"]
        assert rounds <= -(-(len(output) - 1) // (NUM_STEPS + 1)) + info["num_retractions"]


def test_what_the_first_token_cannot_follow_is_http_400(pair: Pair) -> None:
    own = [
        {"custom_params": {"smc": {key: value}}} for key, value in (("power", 2.0), ("trace", True))
    ]
    for params in (*own, {"regex": "t1 t2"}):
        found = pair.decode.post("/generate", input_ids=[3, 4], sampling_params=params)
        assert found.status_code == 400 and "--disaggregation-mode decode" in found.text


def test_requests_end_where_they_are_aborted(pair: Pair) -> None:
    """In the middle of a text, and as KV is waited for that does not come."""
    one, other = pair.met([{"input_ids": [3, 4, 5], "sampling_params": LONG}] * 2)
    with ThreadPoolExecutor(2) as pool:
        with pair.decode.stream(**one, rid="decodes") as chunks:
            pool.submit(pair.prefill.outcomes, [one])
            next(chunks)
            pair.decode.post("/abort_request", rid="decodes")
            assert [*chunks][-1]["meta_info"]["finish_reason"]["type"] == "abort"
        waits = pool.submit(pair.decode.post, "/generate", **other, rid="waits")
        while not waits.done():
            pair.decode.post("/abort_request", rid="waits")
            time.sleep(0.1)
        assert "abort" in waits.result().text.lower()
    assert pair.generate([asked(1)])[0]["output_ids"]


def test_new_weights_are_decoded_from(pair: Pair, path: str, tiny: Callable[..., str]) -> None:
    other = tiny(seed=2, vocab_size=VOCAB, scale=0.3)
    target = Target(other, EOS)
    requests = [asked(index) for index in range(2, 10)]
    pair.update(other)
    for request, answer in zip(requests, pair.generate(requests), strict=True):
        check(target, request, answer | {"meta_info": answer["meta_info"] | {"spec_smc_mode": ""}})
    pair.update(path)


class Parity(pd_parity_kit.PDLogprobParityMixin, unittest.TestCase):
    """SGLang's kit, on the servers of this module and a router before them."""

    __test__ = False  # here; it is called below
    parity_logprob_delta = NEAR

    def __init__(self, pair: Pair, router: Server, target: Target) -> None:
        super().__init__()
        self.process_prefill = pair.prefill.process
        self.prefill_url = pair.prefill.url
        self.process_decode = pair.decode.process
        self.decode_url = pair.decode.url
        self.process_lb = router.process
        self.lb_url = router.url
        self.parity_prompts = [[1 + i % (VOCAB - 1) for i in range(many)] for many in (3, 200)]
        self.target = target

    def launch_all(self) -> None:
        """Start nothing more."""

    def _collect_references(self) -> list[dict[str, Any]]:
        """Continue the prompts by transformers, instead of by one more server."""
        return [self.continued(prompt) for prompt in self.parity_prompts]

    def continued(self, prompt: list[int]) -> dict[str, Any]:
        request: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"temperature": 0}}
        found: list[tuple[float, int, None]] = []
        for _ in range(self.parity_max_new_tokens):
            log_p = self.target.log_probs(request, [*(token for _, token, _ in found), 0])[-1]
            found.append((log_p.max().item(), int(log_p.argmax()), None))
        return {"output_token_logprobs": found}


@pytest.mark.nightly
def test_sglangs_router_brings_requests_to_both(pair: Pair, path: str, tmp_path: Path) -> None:
    workers = ["--pd-disaggregation", "--prefill", pair.prefill.url, str(pair.port)]
    workers += ["--decode", pair.decode.url]
    with running_router(tmp_path, workers, 2) as router:
        Parity(pair, router, Target(path, EOS)).test_logprob_parity()
        check_settings(router, pair.decode)


def check_settings(router: Server, decode: Server) -> None:
    """Check what comes through both a router and a prefill server that know no presets.

    Red where none of a request's settings does, which is what docs/operations.md would have to say.
    """
    shared: dict[str, Any] = {"model": "default", "max_tokens": 12, "ignore_eos": True}
    shared["return_meta_info"] = True
    own = {"custom_params": {"smc": {"mode": "exact", "num_particles": 2}}}
    chat = {"messages": [{"role": "user", "content": "t5 t6"}]}
    named = {"chat_template_kwargs": {"smc_preset": "two"}}
    found = router.post("/v1/completions", **shared, prompt="t5 t6", **own)
    info = found.json()["choices"][0]["meta_info"]
    assert (info["spec_smc_mode"], info["spec_smc_num_particles"]) == ("exact", 2)
    before = totals_of(decode)
    answer = router.post("/v1/chat/completions", **shared, **chat, **named)
    assert answer.status_code == 200, answer.text
    after = totals_of(decode)
    assert after["particles"] - before["particles"] == 2 * (after["rounds"] - before["rounds"]) > 0


def totals_of(server: Server) -> dict[str, Any]:
    return server.get("/server_info").json()["internal_states"][0]["smc"]["since_start"]


def test_a_lost_prefill_server_ends_requests_and_not_the_decode_server(pair: Pair) -> None:
    """One that decodes goes on; one whose KV is yet to come ends with a sentence. The last test."""
    long = pair.met([{"input_ids": [3, 4, 5], "sampling_params": LONG}] * 2)
    with ThreadPoolExecutor(1) as pool, pair.decode.stream(**long[0]) as chunks:
        pool.submit(pair.prefill.outcomes, long[:1])
        next(chunks)
        os.killpg(pair.prefill.process.pid, signal.SIGKILL)
        assert len([*chunks][-1]["output_ids"]) == LONG["max_new_tokens"]
    found = pair.decode.post("/generate", **long[1])
    assert found.status_code == 500 and "prefill" in found.text
    assert pair.decode.get("/health_generate").status_code == 200
