"""SGLang's own test kits against SMC servers; left_out.toml lists those that do not run.

The kits are mixins for unittest. What a kit lets its user set is set here for a CPU and two
tiny models; what it fixes too large is patched smaller.
"""

import random
import unittest
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import openai
import pytest

from kits.by_heart import VOCAB_SIZE
from sglang_smc.upstream import IS_NEWEST

if not IS_NEWEST:
    pytest.skip("the kits of SGLang 0.5.23; older ones differ", allow_module_level=True)

from sglang.test import kl_test_utils
from sglang.test.kits import (
    abort_timeout_kit,
    anthropic_messages_kit,
    basic_api_contract_kit,
    basic_decode_correctness_kit,
    basic_scheduler_stress_kit,
    cache_hit_kit,
    ebnf_constrained_kit,
    json_constrained_kit,
    json_mode_kit,
    kl_divergence_kit,
    matched_stop_kit,
    pause_generation_kit,
    radix_cache_server_kit,
    reasoning_kit,
    regex_constrained_kit,
    spec_decoding_kit,
    spec_server_kits,
    streaming_session_kit,
    unified_radix_cache_kit,
)
from sglang.test.kl_multiturn_utils import default_decode_cache_assert
from sglang.test.server_fixtures import streaming_session_fixture
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase
from transformers import LlamaForCausalLM

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]


class Case(unittest.TestCase):
    """What the kits expect of a class; conftest.py starts the server of its ``kind``."""

    kind = "plain"
    base_url: str
    model: str
    tokenizer: Any
    process: Any

    def setUp(self) -> None:
        random.seed(0)


class FewIds(random.Random):
    """Draws no token that the tiny models lack; the kits' models have 32,000."""

    def randint(self, a: int, b: int) -> int:
        return super().randint(a, min(b, VOCAB_SIZE - 1))


def random_prompts(number: int, length: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(number)]


class TestAnthropicMessages(anthropic_messages_kit.AnthropicMessagesMixin, Case):
    api_key = "none"


class TestJSONMode(json_mode_kit.JSONModeMixin, Case):
    def setUp(self) -> None:
        super().setUp()
        self.client = openai.Client(base_url=f"{self.base_url}/v1", api_key="none")
        self.addCleanup(self.client.close)


class TestAsTheyAre(
    basic_api_contract_kit.BasicAPIContractMixin,
    basic_decode_correctness_kit.BasicDecodeCorrectnessMixin,
    matched_stop_kit.MatchedStopMixin,
    spec_server_kits.SpecCorrectnessKit,
    ebnf_constrained_kit.EBNFConstrainedMixin,
    json_constrained_kit.JSONConstrainedMixin,
    spec_server_kits.SpecGrammarKit,
    Case,
):
    """No two of these kits name anything alike."""


class TestStressAndRegex(
    basic_scheduler_stress_kit.BasicSchedulerStressMixin,
    regex_constrained_kit.RegexConstrainedMixin,
    Case,
):
    """These name what kits above do, each for itself."""


class TestAbortAll(abort_timeout_kit.AbortAllMixin, Case):
    abort_all_max_new_tokens = 2000


class TestPause(pause_generation_kit.PauseResumeInPlaceMixin, Case):
    pause_num_requests = 8
    pause_max_new_tokens = 2000  # all 8 have 256 in the second before the pause
    pause_ignore_eos = True
    pause_duration = 2


class TestSpecSpeed(spec_decoding_kit.SpecDecodingMixin, Case):
    accept_length_thres = 3.0
    bs_1_speed_thres = 1.0  # a CPU's speed says nothing

    def flush_cache_for_spec_benchmark(self) -> None:
        """Wait for the round that overlapped the last answer."""
        url = f"{self.base_url}/flush_cache?timeout=60"
        assert httpx.post(url, timeout=90).status_code == 200


class TestSpecParity(spec_server_kits.SpecParityKit, Case):
    @classmethod
    def setUpClass(cls) -> None:
        """Take the reference from transformers: SGLang's would be one more server."""
        model = LlamaForCausalLM.from_pretrained(cls.model)

        def greedy(prompt: str) -> str:
            asked = cls.tokenizer(prompt, return_tensors="pt").input_ids
            ids = model.generate(asked, do_sample=False, max_new_tokens=48)[0, asked.shape[1] :]  # type: ignore[operator]
            return cls.tokenizer.decode(ids, skip_special_tokens=True)

        cls.parity_ref_outputs = {prompt: greedy(prompt) for prompt in cls.parity_prompts}


class TestSpecFeatures(spec_server_kits.SpecFeatureKit, Case):
    send_request = SpecEagleServerBase.send_request
    send_requests_abort = SpecEagleServerBase.send_requests_abort

    def test_radix_attention(self) -> None:
        smaller = partial(radix_cache_server_kit.gen_radix_tree, num_nodes=60, chunk_len=64)
        with (
            mock.patch.object(radix_cache_server_kit, "random", FewIds(0)),
            mock.patch.object(radix_cache_server_kit, "gen_radix_tree", smaller),
        ):
            super().test_radix_attention()


class TestSpecPenalties(spec_server_kits.SpecPenaltyKit, Case):
    run_decode = SpecEagleServerBase.run_decode


class TestSpecLogprobs(spec_server_kits.SpecLogprobKit, Case):
    logprob_match_delta = 1e-3  # the kit's 0.5 is for bfloat16


class TestKLDivergence(kl_divergence_kit.KLDivergenceMixin, Case):
    kl_div_thres = 1e-8  # float32 stays below 1e-11
    kl_div_max_samples = 8
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = 32

    def setUp(self) -> None:
        """Random ids as prompts, instead of a download."""
        super().setUp()
        prompts = random_prompts(self.kl_div_max_samples, 300)
        given = mock.patch.object(kl_test_utils, "get_input_ids", lambda **_: prompts)
        given.start()
        self.addCleanup(given.stop)


@mock.patch.object(unified_radix_cache_kit, "random", SimpleNamespace(Random=FewIds))
class TestMultiturnCache(unified_radix_cache_kit.UnifiedRadixTreeTestMixin, Case):
    test_gsm8k = test_mmlu = None  # type: ignore[assignment]
    kl_threshold = 1e-8
    max_new_tokens = 32
    input_ids = random_prompts(4, 512)

    @staticmethod
    def decode_cache_assert(result: dict, history_len: int, output_len: int, label: str) -> None:
        """All but the last two tokens, as above."""
        default_decode_cache_assert(result, history_len, output_len - 2, label)


class TestCacheHit(Case):
    def test_multiturn_cache_hit(self) -> None:
        """Random ids, in place of a download; the draft has not read the last token but one."""
        ids = partial(cache_hit_kit.sample_random_requests, random_sample=False)
        with mock.patch.object(cache_hit_kit, "sample_random_requests", ids):
            cache_hit_kit.run_multiturn_cache_hit_test(
                self.base_url, self.model, num_clients=4, request_length=64, miss_tolerance=2
            )


class TestStreamingSessions(streaming_session_kit.StreamingSessionKitMixin, Case):
    kind = "sessions"
    # The draft has not read the last token but one, where that is not the prompt's.
    kv_inherit_offsets = (-2, -1)

    def test_leak_logprob_concurrent(self) -> None:
        with mock.patch.object(streaming_session_fixture, "CONCURRENT_LOGPROB_ROUNDS", 2):
            super().test_leak_logprob_concurrent()


class TestReasoningTokens(reasoning_kit.ReasoningTokenUsageMixin, Case):
    kind = "sessions"
    reasoning_parser_name = "qwen3"

    @classmethod
    def setUpClass(cls) -> None:
        cls.init_reasoning_token_verifier()


class TestSeparateReasoning(reasoning_kit.SeparateReasoningMixin, Case):
    kind = "sessions"
    api_key = "none"


class TestWaitingTimeout(abort_timeout_kit.WaitingTimeoutMixin, Case):
    kind = "short wait"


class TestRunningTimeout(abort_timeout_kit.RunningTimeoutTwoWaveMixin, Case):
    kind = "short run"
    running_timeout_sleep = 2


class TestSessionLeaks(streaming_session_kit.AbortLeakReproKitMixin, Case):
    kind = "short run"

    def test_abort_heavy_chunked_prefill_does_not_leak(self) -> None:
        with (
            mock.patch.object(streaming_session_fixture, "ABORT_REPRO_ABORT_TOKENS", 4500),
            mock.patch.object(streaming_session_fixture, "ABORT_REPRO_ROUNDS", 3),
        ):
            super().test_abort_heavy_chunked_prefill_does_not_leak()
