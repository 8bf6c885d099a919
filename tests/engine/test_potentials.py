"""Potentials through a real engine: their law, their mistakes, and who notices."""

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import Law, Sequence, enumerate_law, next_probs
from steered import log_phi
from tiny_models import smc_arguments
from trace_replay import read, replay

from sglang_smc.view.record import Trace

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("schedule")]

PAGE = Path(__file__).parents[2] / "docs" / "potentials.md"
PYTHON = re.compile(r"```python\n(.*?)```", re.S)
SIZE = 1500
PROMPT = [3, 2, 3]
EOS = 1
TOKENS = 4
MODEL = {"vocab_size": 4, "scale": 0.5}
ROOM = {"max_running_requests": 64, "max_total_tokens": 40_000, "max_lag": 8}
POTENTIALS = [
    "count=steered:Count",
    "offset=steered:Count(offset=0.5)",
    "slow=steered:Slow",
    "broken=steered:Broken",
]


@pytest.fixture
def pair(tiny: Callable[..., str]) -> tuple[str, str]:
    return tiny(seed=1, **MODEL), tiny(seed=2, **MODEL)


@pytest.fixture
def running(engine: Callable[..., Any], pair: tuple[str, str]) -> Any:
    given = {"potential": POTENTIALS, "potential_timeout": 2.0}
    return engine(**smc_arguments(*pair, num_particles=8, num_steps=2, **given, **ROOM))


def asks(seed: int, smc: dict[str, Any], **params: Any) -> dict[str, Any]:
    own = {"max_new_tokens": TOKENS, "sampling_seed": seed, "temperature": 2.0}
    return {**own, "custom_params": {"smc": smc}, **params}


def named(name: str = "count", **more: Any) -> dict[str, Any]:
    return {"potentials": [{"name": name, **more}]}


def generate(engine: Any, params: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return engine.generate(input_ids=[PROMPT] * len(params), sampling_params=params)


def each_outcome(engine: Any, params: list[dict[str, Any]]) -> list[Any]:
    """Answers of one batch, or the errors that came in their place, as the page says to ask."""
    (code,) = [one for one in PYTHON.findall(PAGE.read_text()) if "async def each" in one]
    exec(code, page := {})
    asked = [{"input_ids": PROMPT, "sampling_params": one} for one in params]
    return engine.loop.run_until_complete(page["each"](engine, asked))


def masses(pair: tuple[str, str], tokens: int = TOKENS, power: float = 1.0) -> Law:
    p = next_probs(pair[0], PROMPT, temperature=2.0)
    law = enumerate_law(tokens, EOS, lambda _: p)
    return {text: mass**power * math.exp(log_phi(text)) for text, mass in law.items()}


def assert_properly_weighted(answers: list[dict[str, Any]], masses: Law) -> None:
    """E[Z-hat f(x)] = the sum of p phi f, for f = 1 and each of the eight texts that come out most:
    within 4.5 standard errors, together an error probability of 6e-5. It is what
    tests/property/test_potential_law.py holds, too."""
    infos = [answer["meta_info"] for answer in answers]
    evidence = torch.tensor([info["spec_smc_log_evidence"] for info in infos]).double().exp()
    texts: list[Sequence] = [tuple(answer["output_ids"]) for answer in answers]
    assert all(masses[text] > 0 for text in texts)
    likely = [text for text in texts if masses[text] > 0]
    often = [text for text, _ in Counter(likely).most_common(8)]
    picked = [evidence * torch.tensor([text == one for text in texts]) for one in often]
    wanted = [sum(masses.values()), *(masses[one] for one in often)]
    for found, mass in zip([evidence, *picked], wanted, strict=True):
        error = found.std() / math.sqrt(len(found))
        assert abs(found.mean() - mass) < 4.5 * error, (float(found.mean()), mass, float(error))


@pytest.mark.parametrize(
    ("smc", "tokens", "power"),
    [
        (named(), TOKENS, 1.0),
        (named(name="offset", when={"delimiter": "t2"}), TOKENS, 1.0),
        ({**named(when="end"), "power": 1.5}, TOKENS, 1.5),
        (named(), 1, 1.0),
    ],
    ids=["round", "delimiter", "power", "one-token"],
)
def test_texts_follow_p_times_phi(
    running: Any, pair: tuple[str, str], smc: dict[str, Any], tokens: int, power: float
) -> None:
    """A fifth of the batch are requests without."""
    params = [
        asks(seed, smc if seed % 5 else {"evidence_threshold": 0}, max_new_tokens=tokens)
        for seed in range(SIZE)
    ]
    answers = generate(running, params)
    steered = [answer for seed, answer in enumerate(answers) if seed % 5]
    assert_properly_weighted(steered, masses(pair, tokens, power))
    alone = generate(running, params[:40:5])
    for answer, same in zip(answers[:40:5], alone, strict=True):
        assert answer["output_ids"] == same["output_ids"]


def test_retracted_requests_go_on_by_the_same_law(
    engine: Callable[..., Any], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so many particles texts follow p phi closely; who loses his particles loses no phi.

    A value that stayed behind from before the retraction would count twice or not at all.
    """
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "3")
    sizes = {"num_particles": 32, "num_steps": 1, **ROOM, "max_lag": 4}
    running = engine(**smc_arguments(*pair, potential=POTENTIALS[:1], **sizes))
    answers = generate(running, [asks(seed, named()) for seed in range(SIZE)])
    retracted = [a for a in answers if a["meta_info"]["spec_smc_log_evidence"] is None]
    assert len(retracted) > 20
    law = masses(pair)
    total = sum(law.values())
    mean = sum(mass * text.count(2) for text, mass in law.items()) / total
    plain = {text: mass * math.exp(-log_phi(text)) for text, mass in law.items() if mass}
    without = sum(mass * text.count(2) for text, mass in plain.items()) / sum(plain.values())
    found = torch.tensor([float(answer["output_ids"].count(2)) for answer in answers])
    print("of the token", mean, "without phi", without, "found", float(found.mean()))
    assert abs(float(found.mean()) - mean) < 0.25 * abs(mean - without)


def test_a_mistake_ends_its_own_request(running: Any) -> None:
    """In one batch: those that fail, each with its sentence, and those that must not notice.

    A grammar beside a potential that forbids all is not the cause.
    """
    fails = {
        "raise": "RuntimeError: the oracle is silent",
        "exit": "SystemExit: the oracle has left",
        "write": "TypeError: 'tuple' object does not support item assignment",
        "nan": "gave nan",
        "forbid": "forbid the texts of all",
    }
    well = [asks(seed, named("broken", args={"does": "nothing"})) for seed in range(4)]
    plain = [asks(seed, {}) for seed in range(4)]
    bad = [asks(9, named("broken", args={"does": does}), ignore_eos=True) for does in fails]
    bad.append({**bad[-1], "regex": "[t23 ]*"})
    answers = each_outcome(running, [*well, *plain, *bad])
    for answer, sentence in zip(answers[8:], [*fails.values(), fails["forbid"]], strict=True):
        assert sentence in str(answer)
    again = generate(running, [*well, *plain])
    assert [one["output_ids"] for one in answers[:8]] == [one["output_ids"] for one in again]


def test_who_is_late_ends_and_no_other(running: Any) -> None:
    late = asks(1, named("slow", args={"seconds": 5.0}), ignore_eos=True)
    quick = asks(1, named("count", when="end"), ignore_eos=True)
    answers = each_outcome(running, [late, quick, asks(1, {}, ignore_eos=True)])
    assert "503" in str(answers[0]) and "took more than 2 s" in str(answers[0])
    assert [len(answer["output_ids"]) for answer in answers[1:]] == [TOKENS, TOKENS]


@pytest.mark.parametrize(
    ("smc", "told"),
    [
        (named("none"), "potential 'none', which is unknown; allowed: 'count', 'offset'"),
        (named(args={"tokn": 3}), "unknown field `tokn`; allowed: token: int, weight: float"),
        (named(when="often"), "potential 'count' with when='often'; allowed"),
        (named(exponent=-1), "exponent=-1.0; allowed: a finite number >= 0"),
        ({**named(), "mode": "exact"}, "has no effect in mode 'exact'; allowed: mode 'smc'"),
        ({**named(), "evidence_threshold": 0.5}, "beside potentials; allowed"),
        ({"selection": "vote"}, "answer_pattern=None"),
        ({"selection": "vote", "answer_pattern": "("}, "does not parse"),
        ({"answer_pattern": "a"}, "selection='sample' and answer_pattern='a'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told(running: Any, smc: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as error:
        running.generate(input_ids=PROMPT, sampling_params=asks(0, smc))
    assert told in str(error.value)


def test_all_particles_come_with_their_weights(running: Any) -> None:
    """Those of the end, not resampled once more: with phi of whole texts in their weights."""
    params = asks(3, {**named(when="end"), "return_particles": True}, ignore_eos=True)
    info = generate(running, [params])[0]["meta_info"]
    particles = info["spec_smc_particles"]
    assert len(particles) == 8
    assert len({tuple(one["output_ids"]) for one in particles}) > 4
    assert len({one["output_ids"][0] for one in particles}) > 1, "each began with its own token"
    mean = sum(math.exp(one["log_weight"]) for one in particles) / 8
    assert math.log(mean) <= info["spec_smc_log_evidence"] + 1e-6


def test_a_trace_tells_what_potentials_added(running: Any) -> None:
    """All its fields agree, log Z-hat too; along the answer's line the gains add up to log phi."""
    params = [asks(seed, {**named(), "trace": True}, ignore_eos=True) for seed in range(8)]
    for answer in generate(running, params):
        trace = read(answer["meta_info"])
        replayed = replay(trace, tolerance=1e-5)
        assert replayed.output_ids == answer["output_ids"]
        found = answer["meta_info"]["spec_smc_log_evidence"]
        assert replayed.log_evidence == pytest.approx(found, abs=1e-5)
        assert gains_of_answer(trace) == pytest.approx(log_phi(answer["output_ids"]), abs=1e-9)


def gains_of_answer(trace: Trace) -> float:
    """What potentials added along the line of the particle that answers."""
    place, total = 0, 0.0
    for record in reversed(trace.rounds):
        place = place if record.narrowed_to is None else record.narrowed_to[place]
        place = record.ancestors[place]
        assert record.log_potentials is not None
        total += record.log_potentials[place] or 0.0
    return total


def test_a_vote_is_taken(running: Any) -> None:
    """The answer is how the text ends: it is the one that weighs most among all particles."""
    smc = {
        **named(),
        "selection": "vote",
        "answer_pattern": r"t\d$",
        "return_particles": True,
    }
    params = [asks(seed, smc, ignore_eos=True) for seed in range(20)]
    for answer in generate(running, params):
        shares: dict[int, float] = {}
        for one in answer["meta_info"]["spec_smc_particles"]:
            last = last_word(one["output_ids"])
            shares[last] = shares.get(last, 0.0) + one["weight"]
        shares.pop(0, None)
        assert last_word(answer["output_ids"]) == max(shares, key=lambda token: shares[token])


@pytest.mark.thorough  # two engines
def test_all_ranks_hear_what_the_first_was_told(
    engine: Callable[..., Any], pair: tuple[str, str]
) -> None:
    """One rank asks; with other values ranks would part, and SGLang's checks find their KV."""
    found = []
    for ranks in (1, 2):
        running = engine(**smc_arguments(*pair, potential=POTENTIALS[:1], **ROOM), tp_size=ranks)
        answers = generate(running, [asks(seed, named(), max_new_tokens=12) for seed in range(6)])
        found.append([answer["output_ids"] for answer in answers])
        running.shutdown()
    assert found[0] == found[1]


def last_word(output: list[int]) -> int:
    """The last token that reads anything; 0 where none does."""
    return next((token for token in reversed(output) if token > EOS), 0)
