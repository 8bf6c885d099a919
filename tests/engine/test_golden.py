"""Answers of engines equal those of the package's own rounds over the same models in transformers.

Each engine answers some thirty requests, of all modes, in one batch, behind cache hits and with
prompts in pieces: tokens are equal, and log-evidence within 1e-4. The rounds that they
are held against are those whose laws tests/property proves. So an engine need prove no law, and a
wrong one shows in a single text: whatever the logits of a model, the slots of a particle, a mask
or a state of it have wrong changes some weight in the third digit.

Some run in a scheduler of the test's own process, without the rest of an engine, whose start takes
longer than its answers. Images and adapters need an engine, whose client's side takes part.

By seeds: no number that is drawn lies so near a border that rounding of float32 moves it.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from audit.adapters import MODULES, PREFIX, make_adapter
from checkpoint_rounds import Answer, CheckpointRounds, check
from head_laws import (
    APART,
    BLOCKS,
    DFLASH,
    DFLASH2,
    DOMINO,
    DSPARK,
    EAGLE3,
    GATED,
    HOT,
    KINDS,
    LILICORR,
    NARROW,
    PART,
    Draft,
    MTPDraft,
)
from model_families import MTP, make_model
from published_heads import EAGLE, EAGLE_QWEN2, FULL, LATENT, PUBLISHED, PublishedDraft
from safetensors.torch import load_file
from seen_images import add_processor, check_images, with_names
from sglang.srt.managers import scheduler as sglang_scheduler
from tiny_models import smc_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_smc import upstream
from sglang_smc.options.server import CPU_OVERLAP_ENV

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_STEPS = 3
RETRACT_EVERY = 9  # passes of the scheduler
ROOM = {"chunked_prefill_size": 16}
LENGTHS = [1, 2, 7, 16, 30, 45]  # of prompts: some longer than a window, and than a chunk, or two
#: What a request asks for: `custom_params.smc` and sampling parameters.
ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"evidence_threshold": 0, "ess_threshold": 1.0}, {}),
    ({"evidence_threshold": 0, "num_particles": 1}, {}),
    ({"evidence_threshold": 0, "num_particles": 2, "draft_temperature": 2.0}, {"top_k": 9}),
    ({"resample_at": "token", "resampling_method": "multinomial"}, {"temperature": 1.7}),
    ({"resample_at": "token", "ess_threshold": 1.0, "max_lag": 1}, {}),
    ({"selection": "argmax", "num_steps": 1}, {"top_p": 0.9, "min_p": 0.02}),
    ({"power": 2.0, "proposal": "draft"}, {}),
    ({"ess_threshold": 1.0, "power": 1.5}, {}),
    ({"proposal": "verified", "num_particles": 3}, {"temperature": 1.7, "top_p": 0.9}),
    ({"mode": "exact"}, {}),
    ({"mode": "exact", "num_particles": 1}, {"temperature": 1.7, "top_k": 5}),
    ({"mode": "exact", "num_particles": 3, "num_steps": 2}, {"temperature": 0.3}),
    ({"mode": "auto", "evidence_threshold": 0.9}, {"frequency_penalty": 0.7}),
    ({"mode": "auto"}, {"logit_bias": {"9": 3.0}, "min_new_tokens": 8}),
    ({"mode": "auto", "num_particles": 2}, {"temperature": 1.7}),
    ({"num_steps": 0}, {"temperature": 1.7}),
]
#: Of next turns; at temperature 0 no draft changes a text or its evidence.
NEXT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"mode": mode}, {"temperature": 0}) for mode in ("smc", "exact", "auto")),
    ({"mode": "exact"}, {}),
    ({}, {}),
]


class Case(NamedTuple):
    """A pair of models, and how a server runs them."""

    target: str
    draft: str
    arguments: dict[str, Any] = {}  # noqa: RUF012
    retracts: bool = True  # requests, now and then
    num_particles: int = 4
    adapters: tuple[str, ...] = ()  # of LoRA, between which requests take turns, and none
    seed: int = 3  # of the target's weights
    positions: int | None = None  # that the draft says it has; None: as many as the target
    in_process: bool = False  # in a scheduler of this process, not an engine


SHORT = 16  # of positions: fewer than most texts have tokens

RECURRENT = {"disable_radix_cache": True}
#: Of the draft's attention: less than most texts, with first keys.
LIMIT = {"speculative_draft_window_size": 6, "speculative_draft_sink_size": 2}
CASES = {
    "windows and caps": Case("gemma2", "gemma3_text", in_process=True),
    "latents": Case("deepseek_v3", "deepseek_v2", in_process=True),
    "experts, on both sides": Case("mixtral", "glm4_moe", in_process=True),
    "images": Case("qwen3_vl", "mistral3"),
    "padding of the target": Case("padded", "llama", positions=SHORT, in_process=True),
    "padding of the draft": Case("llama", "padded", in_process=True),
    "8 bits": Case(
        "llama", "llama", {"kv_cache_dtype": "fp8_e5m2"}, retracts=False, in_process=True
    ),
    EAGLE3: Case("llama", EAGLE3, in_process=True),
    HOT: Case("llama", HOT, positions=SHORT, in_process=True),
    APART: Case("llama", APART),
    PART: Case("llama", PART, positions=SHORT),
    "adapters": Case("llama", FULL, {"max_loras_per_batch": 3}, adapters=("a", "b")),
    "a window": Case("llama", "llama", LIMIT | {"page_size": 4}, in_process=True),
    "a window of an MTP layer": Case("qwen2", MTP, LIMIT, in_process=True),
    "an EAGLE head": Case("llama", EAGLE),
    "an MTP layer over latents": Case("deepseek_v3", MTP),
    # More particles than columns: their states find no room among those of columns.
    "an MTP layer beside recurrent states": Case(
        "qwen3_5_text", MTP, RECURRENT, num_particles=6, seed=4
    ),
}
OTHERS = {
    "windows on both sides": Case("gemma3_text", "cohere2"),
    "latents of a later family": Case("glm4_moe_lite", "minicpm3", seed=4),
    "latents before plain keys": Case("minicpm3", "llama"),
    "latents behind plain keys": Case("llama", "deepseek_v2", seed=4),
    "learned positions": Case("gpt2", "mixtral"),
    "fused projections": Case("phi3", "gpt2"),
    "experts that would be layers": Case("qwen3_moe", "qwen3_moe"),
    "other 8 bits": Case("llama", "llama", {"kv_cache_dtype": "fp8_e4m3"}, retracts=False),
    "an MTP layer": Case("glm4_moe", MTP),
    "an MTP layer behind dense layers": Case("qwen2", MTP),
    "an MTP layer over latents of a later family": Case("glm4_moe_lite", MTP),
    "a model beside recurrent states": Case("qwen3_5_text", "llama", RECURRENT | {"page_size": 4}),
    "an EAGLE head with biases": Case("qwen2", EAGLE_QWEN2),
    "an EAGLE-3 head over latents": Case("deepseek_v3", LATENT),
    "a head beside recurrent states": Case("qwen3_5_text", EAGLE3, RECURRENT),
    "a DFlash block": Case("llama", DFLASH),
    "a DFlash2 block": Case("llama", DFLASH2),
    "a Domino block": Case("llama", DOMINO),
    "a LiLiCorr block": Case("llama", LILICORR),
    "a DSpark block": Case("llama", DSPARK),
    "a gated DSpark block": Case("llama", GATED),
    "a block beside recurrent states": Case("qwen3_5_text", DFLASH, RECURRENT),
    "recurrent states and experts": Case("qwen3_5_moe_text", MTP, RECURRENT),
    "text of images": Case("qwen2_5_vl", "qwen2_vl"),
}


def merge(folder: Path, target: str, adapter: str) -> str:
    """The model that an adapter makes of a checkpoint: its product is added to the weights."""
    model = AutoModelForCausalLM.from_pretrained(target)
    weights = load_file(Path(adapter, "adapter_model.safetensors"))
    for name, module in model.named_modules():
        if name.endswith(MODULES):
            down, up = (weights[f"{PREFIX}{name}.lora_{side}.weight"] for side in "AB")
            module.weight.data += 2 * up @ down  # alpha / rank
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return str(folder)


def shorten(file: Path, positions: int) -> None:
    """Have a configuration say so many positions: rotations in transformers have no end."""
    told = json.loads(file.read_text())
    layers = told.get("transformer_layer_config", told)
    layers["max_position_embeddings"] = positions
    file.write_text(json.dumps(told))


def generate(
    own: dict[str | None, CheckpointRounds], prompts: list[Any], params: list[Any], names: list[Any]
) -> list[Answer]:
    """Answer each request by the rounds over its own model: no batch changes a text."""
    found: dict[int, Answer] = {}
    for name, rounds in own.items():
        mine = [i for i, its in enumerate(names) if its == name]
        answers = rounds.generate([prompts[i] for i in mine], [params[i] for i in mine])
        found |= zip(mine, answers, strict=True)
    return [found[i] for i in range(len(prompts))]


def requests(
    asked: list[tuple[dict[str, Any], dict[str, Any]]], last: int
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Two of each kind, over six prompts of which some hold the ``last`` id."""
    draw = random.Random(0)
    texts = [[draw.randrange(2, 64) for _ in range(length)] for length in LENGTHS]
    texts[2][3] = texts[5][7] = last
    prompts = list(itertools.islice(itertools.cycle(texts), 2 * len(asked)))
    own = {"temperature": 1.0, "max_new_tokens": 24}
    params = [
        {**own, **other, "sampling_seed": seed, "custom_params": {"smc": smc}}
        for seed, (smc, other) in enumerate(asked * 2)
    ]
    return prompts, params


@pytest.fixture(
    params=[*CASES, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)]
)
def case(request: pytest.FixtureRequest) -> Case:
    return {**CASES, **OTHERS}[request.param]


#: An engine says None of some that a scheduler leaves out.
NONE = dict.fromkeys(("spec_smc_log_evidence", "spec_smc_watched_ct"))


class InProcess:
    """A scheduler in this process, asked as an engine is."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def generate(
        self,
        input_ids: list[list[int]],
        sampling_params: list[dict[str, Any]],
        lora_path: Sequence[None],
        return_logprob: bool = False,
        logprob_start_len: list[int] | None = None,
    ) -> list[dict[str, Any]]:
        assert not any(lora_path), "adapters are asked of an engine"
        starts = logprob_start_len or [-1] * len(input_ids)
        asked = [
            {
                "input_ids": tokens,
                "sampling_params": params,
                "return_logprob": return_logprob,
                "logprob_start_len": start,
            }
            for tokens, params, start in zip(input_ids, sampling_params, starts, strict=True)
        ]
        replies = self.server.play(asked, every=0)
        return [{"output_ids": one.output_ids, "meta_info": NONE | one.meta} for one in replies]


@pytest.fixture
def begin(engine: Callable[..., Any], case: Case) -> Iterator[Callable[..., Any]]:
    """Start what is asked; results reach its scheduler one round late, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv(CPU_OVERLAP_ENV, "1")
        if case.retracts:
            patch.setenv("SGLANG_TEST_RETRACT", "1")
            patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", str(RETRACT_EVERY))
            patch.setattr(sglang_scheduler, "TEST_RETRACT", True)  # as these names are read
            patch.setattr(sglang_scheduler, "TEST_RETRACT_INTERVAL", RETRACT_EVERY)

        def start(**arguments: Any) -> Any:
            if not case.in_process or not upstream.IS_NEWER:  # older ones have no such scheduler
                return engine(**arguments)
            import in_process

            running = in_process.running(overlap=True, **arguments)
            return InProcess(stack.enter_context(running))

        yield start


def test_answers_are_those_of_rounds_over_transformers(
    begin: Callable[..., Any], tmp_path: Path, case: Case
) -> None:
    if case.arguments is RECURRENT and not upstream.IS_NEWEST:
        pytest.skip("older releases are refused")
    if case.draft in (DFLASH2, DOMINO) and not upstream.IS_NEWER:
        pytest.skip("older releases have no class of it")
    if case.draft == LILICORR and not upstream.IS_NEWEST:
        pytest.skip("older releases have another class of it")
    target = make_model(tmp_path / "target", case.target, case.seed)
    draft = make_model(tmp_path / "draft", case.draft, 2, target)
    whole_text = {}
    if case.positions is not None:  # the rounds have no window, which is the default there
        whole_text = {"speculative_draft_window_size": 0}
        shorten(Path(draft, "config.json"), case.positions)
    sees = case.target == "qwen3_vl" and upstream.IS_NEWER
    if sees:
        add_processor(target, case.target)
        with_names(case.target).save_pretrained(draft)
    asked: list[Any] = ASKED
    known: dict[str, Any] = {}
    settings = {"num_particles": case.num_particles, "num_steps": NUM_STEPS, "max_lag": 16}
    if case.draft in NARROW:  # weights alone would never reach what it does not know
        asked = [each for each in ASKED if not {"evidence_threshold", "power"} & {*each[0]}]
        known = {"drafts_all": False}
    if case.draft in BLOCKS:  # the law here has as many masks as the server's K
        asked = [each for each in asked if "num_steps" not in each[0]]
    attention = case.arguments.get("kv_cache_dtype", "eager")
    limit = tuple(case.arguments[name] for name in LIMIT) if {*LIMIT} <= {*case.arguments} else None
    targets: dict[str | None, str] = {None: target}
    paths = {
        name: make_adapter(tmp_path / name, target, rank=2 + rank, seed=rank)
        for rank, name in enumerate(case.adapters)
    }
    targets |= {name: merge(tmp_path / f"{name}+", target, path) for name, path in paths.items()}

    def rounds(target: str) -> CheckpointRounds:
        law: Any = draft
        if case.draft in KINDS:
            law = Draft(case.draft, target, draft, NUM_STEPS)
        elif case.draft in PUBLISHED:
            law = PublishedDraft(target, draft, NUM_STEPS)
        elif case.draft == MTP:
            law = MTPDraft(target, NUM_STEPS, limit or (None, 0))
        sizes = settings | known, 2 * len(asked + NEXT)
        return CheckpointRounds(target, law, *sizes, attention=attention, limit=limit)

    own = {name: rounds(target) for name, target in targets.items()}
    last = own[None].vocab_size - 1
    arguments = case.arguments | whole_text | ({"lora_paths": paths} if paths else {})
    arguments |= {"enable_multimodal": True} if sees else {}
    given = None if case.draft == MTP else draft
    running = begin(**smc_arguments(target, given, **settings, **ROOM, **arguments))
    prompts, params = requests(asked, last)
    # Each prompt with each adapter: the cache must tell them apart.
    names = [[*targets][i // len(LENGTHS) % len(targets)] for i in range(len(prompts))]
    expected = generate(own, prompts, params, names)
    answers = running.generate(input_ids=prompts, sampling_params=params, lora_path=names)
    # Rounding may move a key of 8 bits by a step.
    within = {"tolerance": 1e-4 if attention == "eager" else 3e-4}
    compared = check(answers, expected, **within)
    first = answers
    # Next turns, behind what the cache keeps of the first; half of them are read anew, for scores.
    turns = zip(prompts, expected, strict=True)
    prompts = [[*prompt, *answer.output_ids, last] for prompt, answer in turns][: 2 * len(NEXT)]
    _, params = requests(NEXT, last)
    names = [[*targets][i % len(targets)] for i in range(len(prompts))]  # some are others now
    expected = generate(own, prompts, params, names)
    scored = {"return_logprob": True, "logprob_start_len": [0, -1] * len(NEXT)}
    answers = running.generate(input_ids=prompts, sampling_params=params, lora_path=names, **scored)
    compared += check(answers, expected, **within)
    if sees:
        check_images(running, case.target)
    if paths:  # one adapter leaves and comes back under another name, beyond what fits a batch
        assert running.unload_lora_adapter("b").success
        for name in ("c", "d"):
            assert running.load_lora_adapter(name, paths["b"]).success
        others = [name if name != "b" else "cd"[i % 2] for i, name in enumerate(names)]
        asked_of = {"input_ids": prompts, "sampling_params": params}
        compared += check(running.generate(**asked_of, lora_path=others), expected)
        with pytest.raises(ValueError, match=r"'e' .* presets of this server: none.*'a', .*'d'"):
            running.generate("t3", lora_path="e")
    for asking, answer, wanted in zip(params, answers, expected, strict=True):
        if asking["temperature"] == 0:  # there is nothing to draw anew
            assert answer["output_ids"] == wanted.output_ids
    infos = [answer["meta_info"] for answer in first + answers]
    assert compared > len(asked)
    assert any(info["num_retractions"] for info in infos) == case.retracts
    if not case.arguments.get("disable_radix_cache"):
        assert any(info["cached_tokens"] for info in infos)
    for each in own.values():
        each.check_owned()
