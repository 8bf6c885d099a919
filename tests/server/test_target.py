"""At temperature 0 texts are the target's own; log-probabilities always are."""

import itertools
from typing import Any

import pytest
import torch
import xgrammar
from http_server import Server
from spelling import GRAMMARS, IS_LEGAL, VOCAB, tokenizer

from server.kinds import CHOICES, EDITS, EOS, KINDS, MODES, PROMPT, asked, constrained, edited
from server.target import Target

LISTED = [3, 9]
TOP = 3
NEAR = 2e-4


def greedy() -> dict[str, dict[str, Any]]:
    cold: dict[str, Any] = {"temperature": 0.0}
    found = {f"choice {i}": asked(choice, **cold) for i, choice in enumerate(CHOICES)}
    for mode in MODES:
        smc = {"mode": mode}
        long = {"max_new_tokens": 48, **cold}
        found |= {f"{name}, {mode}": edited(name, smc, **long) for name in EDITS}
        found |= {f"{kind}, {mode}": constrained(kind, smc, **cold) for kind in GRAMMARS}
    return found


def allowed(kind: str, output: list[int]) -> torch.Tensor:
    """Tokens ``[L, V]`` that a grammar leaves in each place, by xgrammar."""
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer(), vocab_size=VOCAB, stop_token_ids=[EOS]
    )
    compiler = xgrammar.GrammarCompiler(info)
    ((how, text),) = GRAMMARS[kind].items()
    compiled = {
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "json_schema": lambda schema: compiler.compile_json_schema(schema, any_whitespace=False),
        "structural_tag": compiler.compile_structural_tag,
    }[how](text)
    matcher = xgrammar.GrammarMatcher(compiled)
    rows = []
    for token in output:
        bitmask = xgrammar.allocate_token_bitmask(1, VOCAB)
        matcher.fill_next_token_bitmask(bitmask)
        bits = bitmask[0][:, None] >> torch.arange(32) & 1
        rows.append(bits.flatten()[:VOCAB].bool())
        assert matcher.accept_token(token)
    return torch.stack(rows)


def assert_greedy(target: Target, name: str, request: dict[str, Any], output: list[int]) -> None:
    """Each token is the likeliest of those that its request leaves."""
    logits = target.logits(request, output)
    kind = name.partition(",")[0]
    if kind in GRAMMARS:
        logits = logits.masked_fill(~allowed(kind, output), -torch.inf)
    own = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (own >= logits.amax(1) - NEAR).all(), name


def test_at_temperature_0_texts_are_the_targets(server: Server, target: Target) -> None:
    """Whatever is chosen, penalized, biased, banned or spelled: a verified tree, and no alarm."""
    requests = greedy()
    answers = dict(zip(requests, server.generate(list(requests.values())), strict=True))
    for name, answer in answers.items():
        assert_greedy(target, name, requests[name], answer["output_ids"])
        info = answer["meta_info"]
        assert info["spec_smc_num_particles"] == info["spec_smc_particles_mean"]
        if name != f"choice {len(CHOICES) - 1}":
            assert info["spec_smc_exact_ct"] == info["spec_smc_rounds_ct"]
        assert info["spec_smc_all_zero_ct"] == 0, "wrong drafts are no alarm"
    chosen = [answers[f"choice {i}"] for i in range(len(CHOICES))]
    sizes = [choice.get("num_particles", 4) for choice in CHOICES[:-1]]
    assert [one["meta_info"]["spec_smc_num_particles"] for one in chosen] == [*sizes, 1]
    (shown,) = {str(answer["output_ids"]) for answer in chosen}
    for name in EDITS:
        assert not str(answers[f"{name}, smc"]["output_ids"]).startswith(shown[:-1]), name
    last = chosen[-1]
    (alone,) = last["meta_info"]["spec_smc_particles"]
    whole = {"output_ids": last["output_ids"], "text": last["text"]}
    whole["finish_reason"] = last["meta_info"]["finish_reason"]
    assert alone == {**whole, "weight": 1.0, "log_weight": 0.0}


def test_a_text_goes_on_to_the_end_of_the_context(server: Server, target: Target) -> None:
    """Drafts that would stand beyond the model's last position change nothing before it."""
    requests = []
    for length in range(494, 506):
        request = asked(temperature=0.0, max_new_tokens=512 - length)
        requests.append(request | {"input_ids": [2 + i % 60 for i in range(length)]})
    for request, answer in zip(requests, server.generate(requests), strict=True):
        # SGLang leaves the last two positions of a context free.
        assert len(answer["output_ids"]) == 510 - len(request["input_ids"])
        assert_greedy(target, "", request, answer["output_ids"])


def assert_scored(target: Target, request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Its tokens', the likeliest and the listed ones' log-probabilities are the target's."""
    output = answer["output_ids"]
    info = answer["meta_info"]
    wanted = target.log_probs(request, output)
    assert info["output_token_logprobs_length"] == len(output)
    token, top, listed = (info[f"output_{kind}_logprobs"] for kind in ("token", "top", "token_ids"))
    assert [one[1] for one in token] == output
    assert all([one[1] for one in few] == LISTED for few in listed)
    likeliest = wanted.topk(TOP).values
    for place, few in enumerate(zip(token, top, listed, strict=True)):
        told = [few[0], *few[1], *few[2]]
        own = wanted[place, [one[1] for one in told]].tolist()
        assert [one[0] for one in told] == pytest.approx(own, abs=NEAR)
        values = [one[0] for one in few[1]]
        assert values == pytest.approx(likeliest[place].tolist(), abs=NEAR)


def test_log_probabilities_are_the_targets(
    server: Server, crowd: dict[str, dict[str, Any]], target: Target
) -> None:
    """Of sampled texts in every mode, filtered and edited ones too, whole and streamed."""
    scored = {name: one for name, one in KINDS.items() if "return_logprob" in one}
    for name, request in scored.items():
        assert_scored(target, request, crowd[name])
    for name in list(scored)[::4]:
        with server.stream(**scored[name]) as stream:
            chunks = list(stream)
        shown = [chunk["meta_info"]["output_token_logprobs"] for chunk in chunks]
        assert [len(few) for few in shown] == [len(chunk["output_ids"]) for chunk in chunks]
        for few, more in itertools.pairwise(shown):
            assert more[: len(few)] == few
        assert_scored(target, scored[name], chunks[-1])


def test_prompts_are_scored_with_and_without_generation(server: Server, target: Target) -> None:
    """What `logprob_start_len` returns does not depend on what follows the prompt."""
    whole = [*PROMPT, 9, 33, 20]
    fields = {"return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": TOP}
    requests = [asked(fields=fields, max_new_tokens=size) | {"input_ids": whole} for size in (0, 7)]
    scored, generated = (answer["meta_info"] for answer in server.generate(requests))
    assert [len(info["output_token_logprobs"]) for info in (scored, generated)] == [0, 7]
    plain = {"input_ids": whole[:2], "sampling_params": {"temperature": 1.0}}
    wanted = target.log_probs(plain, whole[2:])
    for info in (scored, generated):
        assert [one[1] for one in info["input_token_logprobs"]] == whole[2:]
        values = [one[0] for one in info["input_token_logprobs"]][1:]
        own = wanted.gather(1, torch.tensor(whole[2:])[:, None])[1:, 0]
        assert values == pytest.approx(own.tolist(), abs=NEAR)
        assert len(info["input_top_logprobs"]) == len(whole) - 2


def test_constrained_texts_are_legal(crowd: dict[str, dict[str, Any]]) -> None:
    """In every mode, hot and filtered or not, beside requests without a grammar."""
    told = set()
    for kind, mode in itertools.product(GRAMMARS, MODES):
        answer = crowd[f"{kind} in mode {mode}"]
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer
        assert IS_LEGAL[kind](answer["text"]), answer["text"]
        told.add(answer["text"])
    assert len(told) > len(GRAMMARS)
