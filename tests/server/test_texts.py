"""Where texts end, what is cached of them, and what streams and samples of them show."""

import itertools
import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from http_server import Server
from spelling import tokenizer

from server.kinds import EOS, MODES, PLAIN, asked

NUM_STEPS = 4


def prompts(number: int) -> list[list[int]]:
    draw = random.Random(number)
    lengths = [draw.randrange(1, 60) for _ in range(number)]
    return [[draw.randrange(2, 500) for _ in range(length)] for length in lengths]


def chunks(server: Server, request: dict[str, Any]) -> list[dict[str, Any]]:
    with server.stream(**request) as stream:
        return list(stream)


def test_texts_end_by_length_and_stop_in_every_column(server: Server) -> None:
    """Stops, patterns, least lengths, limits of 0 to three rounds: all in one crowd."""
    ends = list(range(300, 360))
    limited = [asked(max_new_tokens=limit) for limit in range(1, 3 * (NUM_STEPS + 1) + 2)]
    stopped = [
        asked(stop_token_ids=ends, temperature=1.5, sampling_seed=seed, ignore_eos=False)
        | {"input_ids": prompt}
        for seed, prompt in enumerate(prompts(64))
    ]
    foreign = [-1, 2**40]  # beside a least length SGLang indexes logits with each
    late = [
        asked(stop_token_ids=ends + foreign, min_new_tokens=9, sampling_seed=seed, ignore_eos=False)
        for seed in range(12)
    ]
    shown = {"no_stop_trim": True, "skip_special_tokens": False, "max_new_tokens": 60}
    endings = [({"stop": ["ar", "1"]}, "ar|1"), ({"stop_regex": "[aeiou]n"}, "[aeiou]n")]
    matched = [
        asked(**stop, **shown, temperature=1.5, sampling_seed=seed)
        for stop, _ in endings
        for seed in range(12)
    ]
    answers = iter(server.generate([*limited, *stopped, *late, *matched]))
    for limit, answer in enumerate(itertools.islice(answers, len(limited)), 1):
        assert len(answer["output_ids"]) == limit
        info = answer["meta_info"]
        assert info["finish_reason"]["type"] == "length" and info["spec_smc_num_particles"] == 4
        assert limit > 2 or info["spec_smc_rounds_ct"] == limit - 1
    columns = set()
    for answer in itertools.islice(answers, len(stopped)):
        *before, last = answer["output_ids"]
        assert not set(before) & {*ends, EOS}
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert last in {*ends, EOS}
            columns.add(len(before) % (NUM_STEPS + 1))
        else:
            assert len(before) == 23
    assert columns == set(range(NUM_STEPS + 1))  # the prefill's, a bonus, each drafted one
    for answer in itertools.islice(answers, len(late)):
        assert len(answer["output_ids"]) >= 10
        assert not set(answer["output_ids"][:9]) & {*ends, EOS}
    decode = tokenizer().decode
    for _, pattern in endings:
        reasons = []
        for answer in itertools.islice(answers, 12):
            reasons.append(answer["meta_info"]["finish_reason"]["type"])
            assert bool(re.search(pattern, answer["text"])) == (reasons[-1] == "stop")
            assert not re.search(pattern, decode(answer["output_ids"][:-1]))
        assert reasons.count("stop") > 5
    assert next(answers, None) is None


STOP_IDS = list(range(300, 360))
ENDS: list[dict[str, Any]] = [
    {"stop": ["ar", "1"]},
    {"stop": ["n ", "e"], "no_stop_trim": True},
    {"stop_regex": "[aeiou]n"},
    {"stop_token_ids": STOP_IDS, "ignore_eos": False},
    {
        "stop_token_ids": STOP_IDS,
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    },
    {"ignore_eos": False, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"stop": ["ar"], "stop_regex": "t[a-z]", "stop_token_ids": STOP_IDS, "ignore_eos": False},
]


def test_particles_end_and_read_as_answers_do(server: Server) -> None:
    """For each way to end, one of them is the answer to the letter, and none has a stop's text.

    Red where a particle's text is that of all its tokens.
    """
    smc = {"return_particles": True}
    requests = [
        asked(smc, **{"max_new_tokens": 20, **end}, temperature=1.3, sampling_seed=seed)
        for end in ENDS
        for seed in range(6)
    ]
    reasons = set()
    for request, answer in zip(requests, server.generate(requests), strict=True):
        particles = answer["meta_info"]["spec_smc_particles"]
        told = {"text": answer["text"], "output_ids": answer["output_ids"]}
        told["finish_reason"] = answer["meta_info"]["finish_reason"]
        assert told in [{name: one[name] for name in told} for one in particles]
        params = request["sampling_params"]
        for one in particles:
            reason = one["finish_reason"]
            reasons.add((reason["type"], type(reason.get("matched"))))
            shows = params.get("no_stop_trim", False) and reason.get("matched") in params.get(
                "stop", ()
            )
            assert not shows or one["text"].endswith(reason["matched"])
            for stop in () if shows else params.get("stop", ()):
                assert stop not in one["text"]
    assert reasons == {("length", type(None)), ("stop", str), ("stop", int)}
    assert "spec_smc_detokenization" not in answer["meta_info"]


def counts(server: Server) -> dict[str, int]:
    state = server.get("/server_info").json()["internal_states"][0]
    return state["smc"]["since_start"]


def test_tokens_of_short_answers_are_counted_up_to_their_ends(server: Server) -> None:
    """Red where drafted columns after an answer's end count, or where they are no tokens of it."""
    ends = [
        {"max_new_tokens": 3},
        {"stop": ["e", "a"]},
        {"stop_token_ids": STOP_IDS, "ignore_eos": False},
    ]
    for mode, end in itertools.product(MODES, ends):
        before = counts(server)
        smc = {"mode": mode} | ({"max_lag": 1} if mode == "smc" else {})
        requests = [
            asked(smc, **{"max_new_tokens": 12, **end}, sampling_seed=seed) for seed in range(50)
        ]
        infos = [answer["meta_info"] for answer in server.generate(requests)]
        after = counts(server)
        rounds, tokens, kept = (
            after[name] - before[name] for name in ("rounds", "emitted_tokens", "kept_columns")
        )
        assert tokens == sum(info["completion_tokens"] for info in infos) - len(infos)
        assert rounds == sum(info["spec_smc_rounds_ct"] for info in infos)
        assert kept == sum(info.get("spec_num_correct_drafts", 0) for info in infos)
        assert kept == tokens - rounds or (mode == "smc" and tokens - rounds < kept < tokens)
        for info in (info for info in infos if info["spec_smc_rounds_ct"]):
            assert info["spec_accept_length"] == info["completion_tokens"] / info["spec_verify_ct"]


def test_each_chunk_of_a_stream_goes_on_from_the_one_before(server: Server) -> None:
    request = asked(max_new_tokens=240, temperature=0.0)
    with server.stream(**request) as stream:
        first = next(stream)
        server.generate([asked(max_new_tokens=n) for n in range(2, 9)])  # some end with a chunk
        *early, last = [first, *stream]
    texts = [chunk["text"] for chunk in (*early, last)]
    assert len(texts) > 1
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    (whole,) = server.generate([request])
    assert texts[-1] == whole["text"]
    assert isinstance(last["meta_info"]["spec_smc_log_evidence"], float)
    assert not any(name.startswith("spec_smc_") for one in early for name in one["meta_info"])


def test_a_stop_string_is_cut_wherever_parts_of_an_answer_leave(server: Server) -> None:
    """Red if an answer keeps the beginning of one: SGLang forwards whole ones every 50 tokens."""
    for smc in (PLAIN, *({"mode": mode} for mode in MODES)):
        free = asked(smc, max_new_tokens=110, temperature=0.0)
        (whole,) = server.generate([free])
        text = whole["text"]
        decode = tokenizer().decode
        places = [len(decode(whole["output_ids"][:count])) for count in (50, 100)]
        stops = [text[place - before :][:8] for place in places for before in range(8)]
        stopped = [asked(smc, max_new_tokens=110, temperature=0.0, stop=stop) for stop in stops]
        answers = server.generate(stopped)
        for stop, answer in zip(stops, answers, strict=True):
            assert answer["meta_info"]["finish_reason"].get("matched") == stop
            assert answer["text"] == text[: text.find(stop)]
        with ThreadPoolExecutor() as pool:
            streams = pool.map(partial(chunks, server), stopped[::3])
        for each, answer in zip(streams, answers[::3], strict=True):
            last = each[-1]
            assert last["text"] == answer["text"]
            assert all(last["text"].startswith(chunk["text"]) for chunk in each)


def test_settings_that_mean_the_same_give_the_same_text(server: Server) -> None:
    """No tilt is exact; a tilt is the threshold that it came to, whatever was learned since."""
    choices = ({"tilt": 0}, {"mode": "exact"}, {"tilt": 0.1})
    none, exact, tilted = (answer for c in choices for answer in server.generate([asked(c)]))
    assert none["output_ids"] == exact["output_ids"]
    assert none["meta_info"].get("spec_smc_evidence_threshold") is None
    assert none["meta_info"]["spec_smc_exact_ct"] == none["meta_info"]["spec_smc_rounds_ct"] > 0
    threshold = tilted["meta_info"]["spec_smc_evidence_threshold"]
    assert tilted["meta_info"]["spec_smc_mode"] == "auto" and threshold >= 0
    (again,) = server.generate([asked({"mode": "auto", "evidence_threshold": threshold})])
    assert again["output_ids"] == tilted["output_ids"]
