"""Stock SGLang on the CPU platform, plain and with its own speculative decoding."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from baselines import cpu_speculation
from in_process import Reply, Server
from laws import enumerate_law, next_probs, p_value
from published_drafts import rewrite
from transformers import AutoTokenizer, LlamaForCausalLM

from sglang_smc import upstream
from sglang_smc.cpu.platform import PlainCpuPlatform
from sglang_smc_tools import convert
from sglang_smc_tools.pair.task import held_out, messages

pytestmark = pytest.mark.skipif(
    not upstream.NEWEST.is_installed, reason="this SGLang asks no platform for its workers"
)

PAIR = Path(__file__).parents[2] / "bench" / "pair"
ALPHA = 1e-4
EOS = 1
GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
CHUNKS = {"chunked_prefill_size": 64}
#: One token, and others; some are prefilled in chunks. The last answer fills the context.
PROMPTS = [[5], [9] * 20, [8, 1, 30], [2, 44] * 35, ([*range(2, 60), *range(60, 1, -1)] * 2)[:231]]
TOY = {"vocab_size": 4, "scale": 0.5}


def asked(prompt: list[int], **params: Any) -> dict[str, Any]:
    own = {"input_ids": prompt, "return_logprob": True}
    return {**own, "sampling_params": {**GREEDY, **params}}


@pytest.fixture(scope="module", autouse=True)
def own_speculation() -> Iterator[None]:
    """The platform runs SGLang's own, as in the benchmarks' servers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, method in cpu_speculation.METHODS.items():
            patch.setattr(PlainCpuPlatform, name, method)
        yield


@pytest.fixture(scope="module")
def target(tiny: Callable[..., str]) -> str:
    return tiny(seed=3, vocab_size=64)


@pytest.fixture(scope="module")
def plain(start: Callable[..., Server], target: str) -> Server:
    return start(model_path=target, page_size=4, **CHUNKS)


@pytest.fixture(scope="module")
def answers(plain: Server, target: str) -> list[tuple[dict[str, Any], Reply]]:
    """Requests that end in each way, one by one; their first texts are transformers'."""
    model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    given = []
    for prompt in PROMPTS:
        found = plain.generate(**asked(prompt))
        size = len(prompt)
        tokens = found.output_ids
        logits = model(torch.tensor([prompt + tokens])).logits[0, size - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
        assert found.logprobs == pytest.approx(wanted, abs=1e-4)
        ends = [
            {},
            {"max_new_tokens": 1},
            {"max_new_tokens": 6},
            {"stop": found.text.split()[7]},
            {"stop_token_ids": [tokens[5]]},
            {"regex": "(t7|t8){5}"},
            {"logit_bias": {str(EOS): 5.0}},
        ]
        given += [asked(prompt, **end) for end in ends]
    replies = [plain.generate(**one) for one in given]
    assert {reply.why for reply in replies} == {"stop", "length"}
    assert any(reply.output_ids[-1] == EOS for reply in replies)
    return list(zip(given, replies, strict=True))


def same_answers(server: Server, answers: list[tuple[dict[str, Any], Reply]]) -> float:
    """Ask all at once, so that rows come and go; tokens of a verification."""
    replies = server.play([request for request, _ in answers], every=0)
    for reply, (_, known) in zip(replies, answers, strict=True):
        assert (reply.output_ids, reply.end) == (known.output_ids, known.end)
        assert reply.logprobs == pytest.approx(known.logprobs, abs=1e-4)
    rounds = [reply.meta.get("spec_verify_ct", 0) for reply in replies]
    emitted = [len(reply.output_ids) - 1 for reply in replies]
    return sum(emitted) / max(sum(rounds), 1)


def test_company_the_cache_and_grammars_change_no_text(plain: Server, answers: list) -> None:
    same_answers(plain, answers)
    unseen = [0, *PROMPTS[3]]
    first = plain.generate(**asked(unseen))
    second = plain.generate(**asked(unseen))
    assert first.meta["cached_tokens"] == 0
    assert second.meta["cached_tokens"] == (len(unseen) - 1) // 4 * 4
    assert first.output_ids == second.output_ids
    bound = [known for request, known in answers if "regex" in request["sampling_params"]]
    assert all(set(reply.output_ids[:5]) <= {7, 8} for reply in bound)


def chain(target: str, draft: str, steps: int = 3, topk: int = 1, nodes: int = 4) -> dict[str, Any]:
    return {
        "model_path": target,
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
        **CHUNKS,
    }


@pytest.mark.parametrize(
    ("shape", "least"), [((3, 1, 4), 1.5), ((1, 1, 2), 1.3), ((3, 4, 8), 1.3)], ids=str
)
def test_standalone_gives_the_text_of_its_target(
    answers: list, start: Callable[..., Server], target: str, shape: tuple, least: float
) -> None:
    server = start(**chain(target, target, *shape))
    assert same_answers(server, answers) > least
    again = server.generate(**asked(PROMPTS[-1]))
    assert again.meta["cached_tokens"] == len(PROMPTS[-1]) - 1
    assert again.output_ids == answers[-7][1].output_ids


def test_ngram_gives_the_text_of_its_target(
    answers: list, start: Callable[..., Server], target: str
) -> None:
    speculation = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    server = start(model_path=target, **speculation, **CHUNKS)
    same_answers(server, answers)
    assert same_answers(server, answers) > 2, "the texts are known by now"


@pytest.mark.parametrize(("topk", "nodes"), [(1, 4), (4, 8)])
def test_eagle_gives_the_text_of_its_target(
    answers: list, start: Callable, target: str, tmp_path: Path, topk: int, nodes: int
) -> None:
    """With a draft of random weights, whose tokens seldom are the target's."""
    config = json.loads(Path(target, "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = chain(target, str(tmp_path), 3, topk, nodes)
    settings |= {"speculative_algorithm": "EAGLE", "speculative_draft_load_format": "dummy"}
    # SGLang keeps the context's end free from requests to such a server.
    same_answers(start(**settings), [one for one in answers if len(one[0]["input_ids"]) < 200])


def test_a_converted_head_drafts(start: Callable[..., Server], tmp_path: Path) -> None:
    """Red where `sglang-smc convert` leaves out, or ties, weights: 3.3 tokens become 1 to 2.3."""
    published = rewrite(PAIR / "eagle3", tmp_path / "published")
    stock = str(tmp_path / "stock")
    assert convert.main([published, stock]) == 0
    target = str(PAIR / "target")
    server = start(**chain(target, stock) | {"speculative_algorithm": "EAGLE3"})
    tokenizer = AutoTokenizer.from_pretrained(target)
    tasks = [messages(held_out(number)) for number in range(6)]
    shown: Any = {"add_generation_prompt": True, "return_dict": False}
    prompts: Any = [tokenizer.apply_chat_template(task, **shown) for task in tasks]
    replies = server.play([asked(prompt) for prompt in prompts], every=0)
    model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    for prompt, reply in zip(prompts, replies, strict=True):
        text = torch.tensor([prompt + reply.output_ids])
        logits = model(text).logits[0, len(prompt) - 1 : -1]
        assert reply.output_ids == logits.argmax(-1).tolist()
    emitted = sum(len(reply.output_ids) - 1 for reply in replies)
    assert emitted / sum(reply.meta["spec_verify_ct"] for reply in replies) > 2.5


@pytest.mark.parametrize(("topk", "nodes"), [(1, 4), (2, 6)], ids=["chain", "tree"])
def test_samples_follow_the_target(
    start: Callable[..., Server], tiny: Callable[..., str], topk: int, nodes: int
) -> None:
    """Texts of three tokens against all that there are, with each limit beside the others."""
    pair = (tiny(seed=1, **TOY), tiny(seed=2, **TOY))
    prompt = [3, 2, 3]
    server = start(**chain(*pair, topk=topk, nodes=nodes), max_running_requests=256)
    limits: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.3}]
    own = [{"temperature": 1.0, "max_new_tokens": 3, **limit} for limit in limits]
    requests = [{"input_ids": prompt, "sampling_params": params} for params in own]
    torch.manual_seed(0)
    replies = server.play(requests * 500, every=0)
    for place, limit in enumerate(limits):
        probs = next_probs(pair[0], prompt, **limit)
        law = enumerate_law(3, EOS, lambda _, probs=probs: probs)
        assert p_value((tuple(reply.output_ids) for reply in replies[place::3]), law) > ALPHA
    assert sum(reply.meta["spec_num_correct_drafts"] for reply in replies) > 300
