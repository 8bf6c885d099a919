"""The flags behave as SGLang's own, and a server that SMC cannot run on does not start."""

import copy
import dataclasses
import json
import logging
import os
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
from programs import printed
from resolved_args import field_names, options, resolve
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_smc import upstream
from sglang_smc.options import server
from sglang_smc.options.server import FIELDS, SETTINGS, Range, SMCConfig
from sglang_smc.patches.server_args import FLAG_FIELDS
from sglang_smc.server import arguments

PAIR = Path(__file__).parents[2] / "bench" / "pair"


def another(allowed: Range) -> Any:
    """Return a value that is allowed, and no default."""
    return (
        allowed.choices[-1] if allowed.choices else {bool: True, int: 4, float: 0.9}[allowed.kind]
    )


#: Of each flag a value; those of a new one follow from its range.
GIVEN = {
    FIELDS[name]: another(setting.allowed)
    for name, setting in SETTINGS.items()
    if name not in ("num_steps", "tilt", "ngram_matches", "draft_class", "potential", "presets")
} | {
    "speculative_smc_mode": "smc",
    "speculative_smc_proposal": "draft",
    "speculative_smc_power": 2.0,
    "speculative_smc_evidence_threshold": 0,
    "speculative_smc_potential": ["count=steered:Count", "offset=steered:Count(offset=0.5)"],
    "speculative_smc_presets": '{"paper": {"evidence_threshold": 0}}',
}
#: Which goes with no mode that has a power.
TILT = {"speculative_smc_tilt": 0.1}
#: Which go with no draft model.
MATCHES = {"speculative_smc_ngram_matches": True}
DRAFTER = {"speculative_smc_draft_class": "sglang_smc.proposers.ngram:UniformDraft"}
OURS = GIVEN | dict.fromkeys(TILT | DRAFTER) | dict.fromkeys(MATCHES, False)
DEFAULTS = {field: getattr(server.DEFAULTS, name) for name, field in FIELDS.items()}


def ours(server_args: ServerArgs) -> dict[str, Any]:
    settled = upstream.resolved(server_args)
    return {name: getattr(settled, name) for name in FLAG_FIELDS}


def command_line(keywords: dict[str, Any]) -> list[str]:
    """A switch stands alone, other flags before their values, once for each of several."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in keywords.items()}
    several = [(k, one) for k, v in flags.items() for one in (v if isinstance(v, list) else [v])]
    return [part for k, v in several for part in ([k] if v is True else [k, str(v)])]


def test_flags_come_by_keyword_by_command_line_and_from_resolved_arguments(smc: dict) -> None:
    """SGLang's tools build an engine from what another one was built with."""
    args = resolve(**smc, **GIVEN)
    as_dict = args.resolved_dict if upstream.IS_NEWER else partial(dataclasses.asdict, args)
    told = prepare_server_args(command_line(smc | GIVEN))
    upstream.resolve_now(told)
    assert ours(args) == ours(told) == ours(resolve(**as_dict())) == OURS
    short = [*command_line(smc), "--speculative-smc-num", "4", "--speculative-smc-ess=0.25"]
    found = {"speculative_smc_num_particles": 4, "speculative_smc_ess_threshold": 0.25}.items()
    assert found <= ours(prepare_server_args(short)).items()


def test_engine_validates_before_it_starts_anything(smc: dict) -> None:
    with pytest.raises(ValueError, match="--speculative-smc-max-lag is 0; allowed"):
        sglang.Engine(**smc, speculative_smc_max_lag=0)


def test_a_tilt_implies_the_mode_that_follows_it(smc: dict) -> None:
    found = ours(resolve(**smc, **TILT))
    assert (found["speculative_smc_mode"], found["speculative_smc_tilt"]) == ("auto", 0.1)


def test_stock_abbreviations_stay_unique() -> None:
    """All but one, where there is a `--speculative-skip-dp-mlp-sync` to tell from ours."""
    every = [o for o in options() if o.startswith("--")]
    stock = [o for o in every if not o.startswith("--speculative-smc-")]
    lost = {
        option[:end]
        for option in stock
        for end in range(3, len(option))
        if sum(o.startswith(option[:end]) for o in stock) == 1
        and sum(o.startswith(option[:end]) for o in every) > 1
    }
    has_another = "--speculative-skip-dp-mlp-sync" in stock
    assert lost == ({"--speculative-s"} if has_another else set())


@pytest.mark.parametrize(
    ("given", "resolved"),
    [({}, (8, 9, 48)), ({"speculative_num_steps": 3, "max_running_requests": 5}, (3, 4, 5))],
)
def test_settings_are_resolved_and_users_win(smc: dict, given: dict, resolved: tuple) -> None:
    args = resolve(**smc, **given)
    expected = DEFAULTS | {"speculative_smc_round_graph": "off"}  # there is no GPU
    assert ours(args) == {name: expected[name] for name in FLAG_FIELDS}
    args = upstream.resolved(args)
    steps = args.speculative_num_steps
    width = args.speculative_num_draft_tokens
    assert (steps, width, args.max_running_requests) == resolved
    assert args.speculative_eagle_topk == 1 and args.disable_overlap_schedule


@pytest.mark.parametrize(
    ("given", "sizes", "told"),
    [
        ({}, (8, 8), "K = 8 tokens for each of N = 8 particles: an EAGLE head, in mode smc"),
        ({"speculative_smc_mode": "exact"}, (8, 16), "at most K = 16 tokens for each of N = 8"),
        ({"speculative_smc_tilt": 0.1}, (8, 16), "(bench/results/load/load.md)"),
        ({"speculative_smc_mode": "exact", "speculative_smc_adaptive": "off"}, (8, 8), "K = 8"),
        ({"speculative_smc_mode": "exact", "speculative_num_steps": 5}, (8, 5), "K as given; an"),
        ({"speculative_smc_num_particles": 2, "speculative_num_steps": 5}, (2, 5), "as given. --"),
    ],
)
def test_n_and_k_are_chosen_where_they_are_not_given(
    given: dict[str, Any],
    sizes: tuple[int, int],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the first line of SMC's log says which, and why."""
    pair = {"model_path": PAIR / "target", "speculative_draft_model_path": PAIR / "eagle3"}
    keywords = {**{name: str(path) for name, path in pair.items()}, "device": "cpu"}
    with caplog.at_level(logging.INFO, "sglang_smc"):
        args = upstream.resolved(resolve(**keywords, speculative_algorithm="SMC", **given))
    assert (args.speculative_smc_num_particles, args.speculative_num_steps) == sizes
    first = next(one for one in caplog.messages if "SMC" in one)
    assert told in first and first.startswith("SMC drafts")


@pytest.mark.parametrize(
    ("flag", "expected"), [([], "auto"), ([""], "on"), (["off"], "off"), (["auto"], "auto")]
)
def test_a_bare_adaptive_flag_is_on(smc: dict, flag: list[str], expected: str) -> None:
    more = ["--speculative-smc-adaptive", *filter(None, flag)] if flag else []
    args = prepare_server_args([*more, *command_line(smc)])
    upstream.resolve_now(args)
    assert ours(args)["speculative_smc_adaptive"] == expected


@pytest.mark.parametrize(
    ("device", "kernels", "decode_graphs", "captures"),
    [
        ("cuda", "auto", "full", True),
        ("cuda", "triton", "full", True),
        ("cuda", "torch", "full", False),
        ("cuda", "auto", "disabled", False),
        ("cpu", "auto", "full", False),
    ],
)
def test_rounds_are_captured_where_they_can_be(
    device: str, kernels: str, decode_graphs: str, captures: bool
) -> None:
    """SGLang's --disable-cuda-graph turns ours off, too."""
    graphs = SimpleNamespace(decode=SimpleNamespace(backend=decode_graphs))
    given = {"device": device, "enable_lora": None, "lora_paths": None}
    server_args: Any = SimpleNamespace(cuda_graph_config=graphs, **given)
    assert arguments._captures(SMCConfig(kernels=kernels), server_args) is captures
    server_args.lora_paths = ["a=/adapter"]
    assert not arguments._captures(SMCConfig(kernels=kernels), server_args)


@pytest.mark.nightly
@pytest.mark.skipif(not upstream.IS_NEWEST, reason="trtllm_mha has pages, which this refuses")
def test_blackwell_prefills_as_plain_decoding_does() -> None:
    """Red where SGLang learns of the draft's top-k after it has chosen its attention.

    And where ranks exchange logits in float32, twice the bytes.
    """
    plain = {"model_path": str(PAIR / "target")}
    smc = {"speculative_algorithm": "SMC", "speculative_draft_model_path": str(PAIR / "draft")}
    script = Path(__file__).parents[1] / "support" / "pretended_gpu.py"
    asked = json.dumps([plain, plain | smc, plain | smc | {"tp_size": 2}])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = sys.executable, "-W", "ignore", script, "sm_100"
    told = printed(*words, input=asked, env=environment)
    found = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert [one["attention"] for one in found] == ["trtllm_mha"] * 3
    assert [one["float32_logits"] for one in found] == [False, True, False]


def test_flags_are_read_only_and_in_the_config_namespace(smc: dict) -> None:
    args = resolve(**smc)
    with pytest.raises(AttributeError, match="read-only"):
        args.speculative_smc_num_particles = 2  # type: ignore[attr-defined]
    assert {namespace_of(ServerArgs)[name] for name in FLAG_FIELDS} == {"spec"}


def test_drafts_are_chains_before_anything_is_resolved(smc: dict) -> None:
    """SGLang chooses its attention by it, on sm_100, before an algorithm resolves its own."""
    chosen = [
        ServerArgs(**smc, **given).speculative_eagle_topk
        for given in ({}, {"speculative_eagle_topk": 2})
    ]
    assert chosen == [1 if upstream.IS_NEWEST else None, 2]
    assert ServerArgs(model_path=smc["model_path"]).speculative_eagle_topk is None


def test_flag_without_smc_is_refused(model_path: str) -> None:
    for name, value in (GIVEN | TILT | MATCHES | DRAFTER).items():
        flag = re.escape(f"--{name.replace('_', '-')} {value}")
        with pytest.raises(ValueError, match=f"{flag} given, but --speculative-algorithm is None"):
            ServerArgs(model_path=model_path, **{name: value})


def test_server_without_smc_is_as_stock_makes_it(model_path: str) -> None:
    keywords = {"model_path": model_path, "random_seed": 0, "port": 30000, "nccl_port": 30001}
    hooked = ServerArgs(**keywords)
    stock = stock_args(**keywords)
    assert set(ours(hooked).values()) == {None}
    given = {name: getattr(stock, name) for name in field_names(type(stock))}
    without = {name: getattr(hooked, name) for name in given.keys() - set(FLAG_FIELDS)}
    assert without == {name: given[name] for name in without}
    assert set(field_names(type(hooked))) - without.keys() == set(FLAG_FIELDS)


def stock_args(**keywords: Any) -> ServerArgs:
    """What they would be if this package were not installed."""
    if upstream.IS_NEWER:
        return ServerArgs.__mro__[1](**keywords)
    stock = object.__new__(ServerArgs)
    ServerArgs.__init__.__wrapped__(stock, **keywords)  # type: ignore[attr-defined]
    return stock


#: What a server does not start with, and what is said of it.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculative_num_draft_tokens": 8}, r"--speculative-num-draft-tokens is 8; allowed: .* = 9"),
    ({"speculative_smc_kernels": "triton"}, "TRITON_INTERPRET"),
    ({"speculative_smc_mode": "mixed"}, "-mode is 'mixed'; allowed: one of smc, exact, auto"),
    (  # all reasons are given at once
        {
            "speculative_draft_model_path": None,
            "enable_waterfill": True,
            "preferred_sampling_params": "{}",
        },
        "(?s)--speculative-draft-model-path is missing.*--enable-waterfill is True; allowed: False"
        ", .* Leave it out.*--preferred-sampling-params is '{}'",
    ),
    ({"speculative_smc_round_graph": "on"}, "--speculative-smc-round-graph is 'on'"),
    ({"speculative_smc_round_graph": "on", "enable_lora": True}, "is 'on' with LoRA adapters"),
    # Variables: no plugins would be loaded; 1.7 GB would be reserved for graphs that there are not.
    ({"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER is set; allowed: "),
    ({"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}, "SIZING is set; allowed: false.* Unset it"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_a_server_does_not_start(smc: dict, given: dict[str, Any], said: str) -> None:
    os.environ.update({name: value for name, value in given.items() if name.isupper()})
    with pytest.raises(ValueError, match=said):
        resolve(**smc | {name: value for name, value in given.items() if name.islower()})


@pytest.mark.skipif(not upstream.IS_NEWER, reason="this SGLang runs no adapters")
def test_an_adapter_starts_unless_it_has_the_name_of_a_preset(smc: dict) -> None:
    for name in ("a", "b"):
        named = {"lora_paths": [f"{name}=/adapter"], "speculative_smc_presets": '{"a": {}}'}
        args = resolve(**smc, **named)
        refused = pytest.raises(ValueError, match=r"preset .* both named 'a'")
        with refused if name == "a" else nullcontext():
            args.check_server_args()


@pytest.mark.parametrize(("draft", "kept"), [("draft", True), ("eagle3", False), ("dflash", False)])
def test_no_prefill_graphs_are_captured_where_a_head_drafts(
    smc: dict, draft: str, kept: bool, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None would be replayed: they keep no states of the prompt's tokens."""
    original = arguments.resolve

    def as_on_a_gpu(server_args: Any) -> None:
        graphs = copy.deepcopy(server_args.cuda_graph_config)
        graphs.prefill.backend = "breakable"
        server_args.cuda_graph_config = graphs
        original(server_args)

    monkeypatch.setattr(arguments, "resolve", as_on_a_gpu)
    caplog.set_level(logging.INFO)
    pair = {"model_path": str(PAIR / "target"), "speculative_draft_model_path": str(PAIR / draft)}
    found = resolve(**smc | pair, device="cpu")
    graphs = upstream.resolved(found).cuda_graph_config
    assert graphs is not None
    assert graphs.prefill.backend == ("breakable" if kept else "disabled")
    assert ("prefill graphs are disabled" in caplog.text) is not kept
