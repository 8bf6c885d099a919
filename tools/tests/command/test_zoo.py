"""Published pairs: what doctor accepts starts, and what a server refuses doctor refuses alike."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zoo
from resolved_args import resolve
from zoo import PAIRS, Pair

from sglang_smc.command import doctor
from sglang_smc.command.machine import FAIL, OK, WARNING, Finding
from sglang_smc_tools import pair_check, start_check
from sglang_smc_tools.plan import shapes

REPOSITORY = Path(__file__).parents[3]
#: Targets that SGLang starts on no CPU.
NOT_HERE = {"gpt-oss-20b", "gpt-oss-120b", "gpt-oss-20b-bf16"}
#: Targets with recurrent states that are refused for them.
RECURRENT = {"nemotron3-nano", "kimi-k3"}
PRETENDED = REPOSITORY / "tests" / "support" / "pretended_gpu.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Configurations alone, by the model's name."""
    base = tmp_path_factory.mktemp("zoo")
    return {name: zoo.write(name, base / str(place)) for place, name in enumerate(zoo.MODELS)}


@pytest.fixture(scope="module")
def servers(folders: dict[str, str]) -> dict[str, str]:
    """By pair, what a server on an H200 says at its start; "" where it starts.

    SGLang's own resolution runs in one process to which torch shows such a GPU.
    """
    keywords = [engine_of(pair, folders) for pair in PAIRS]
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(PRETENDED)],
        input=json.dumps(keywords),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    said = [line.get("refused", "") for line in lines]
    return {pair.name: one for pair, one in zip(PAIRS, said, strict=True)}


def engine_of(pair: Pair, folders: dict[str, str]) -> dict[str, Any]:
    """The keywords of an engine that serves a pair as doctor checks it."""
    found = {"model_path": folders[pair.target], "speculative_algorithm": "SMC"}
    if pair.draft is not None:
        found["speculative_draft_model_path"] = folders[pair.draft]
    settings = {"speculative_num_steps": pair.num_steps, "log_level": "error"}
    return found | settings | {"disable_radix_cache": shapes.is_recurrent(folders[pair.target])}


@pytest.fixture
def resolving() -> Iterator[None]:
    """With SMC's flags, and without what resolving server arguments exports."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with mock.patch.dict(os.environ):
        yield


def doctor_of(pair: Pair, folders: dict[str, str], device: str) -> dict[str, Finding]:
    given = ["--target", folders[pair.target], "--device", device]
    given += [] if pair.draft is None else ["--draft", folders[pair.draft]]
    given += [] if pair.num_steps is None else ["--num-steps", str(pair.num_steps)]
    options = doctor.parser().parse_args(given)
    options.draft = options.draft or shapes.MTP
    pair_check.fill_in(options)
    return {one.about: one for one in start_check.findings(options)}


@pytest.mark.usefixtures("resolving")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_doctor_says_of_another_device_what_a_server_there_says(
    pair: Pair, folders: dict[str, str], servers: dict[str, str]
) -> None:
    """Red where this machine, which has no GPU, decides; or where a pair comes or ceases to run."""
    said = servers[pair.name]
    found = doctor_of(pair, folders, "h200")
    verdict = found[start_check.ABOUT]
    assert bool(said) == bool(pair.refused) and pair.refused in said, said
    assert verdict.level == (FAIL if said else OK), verdict
    if said:
        assert said.partition(": ")[2] == verdict.do
    assert {one.level for one in found.values()} <= {verdict.level, WARNING}
    shorter = found.pop("context of the draft", None)
    assert (shorter is not None) == (pair.trained is not None)
    assert shorter is None or f"texts of up to {pair.trained} tokens" in shorter.do
    unchecked = found.pop("SGLang's own checks", None)
    assert (unchecked is not None) == (pair.target in NOT_HERE and not said)
    assert found.keys() == {start_check.ABOUT}


@pytest.mark.usefixtures("resolving")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_doctor_says_of_this_machine_what_a_server_here_says(
    pair: Pair, folders: dict[str, str]
) -> None:
    """Red where it passes other arguments than a server gets, or hears another error."""
    verdict = doctor_of(pair, folders, "here")[start_check.ABOUT]
    try:
        resolve(**engine_of(pair, folders))
    except Exception as error:
        said = str(error) if isinstance(error, ValueError | OSError) else repr(type(error).__name__)
        assert verdict.level == FAIL and said.strip("'") in verdict.do
        if pair.target in RECURRENT:  # not of the radix cache first
            assert pair.refused in said and "--disable-radix-cache" not in said
    else:
        assert verdict.level == OK
