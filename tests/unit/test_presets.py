"""Presets as they are declared, and as they are put where a request's own settings would stand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_smc.options.server import SERVER_ARGS_FIELDS, SMCConfig
from sglang_smc.server import presets

SERVER = SMCConfig(num_particles=4, num_steps=3)
KNOWN = {"exact": {"mode": "exact"}, "two": {"num_particles": 2}, "plain": {"num_steps": 0}}
ADAPTERS = ["sql", "poems"]


def arguments(given: Any, **settings: Any) -> SimpleNamespace:
    values = dict.fromkeys(SERVER_ARGS_FIELDS.values())
    values |= {SERVER_ARGS_FIELDS[name]: value for name, value in settings.items()}
    return SimpleNamespace(**values, **{presets.FIELD: given}, disaggregation_mode="null")


def settled(lora_path: Any, params: Any, prompts: Any = "a") -> GenerateReqInput:
    request = GenerateReqInput(text=prompts, sampling_params=params, lora_path=lora_path)
    presets.put_in_place(request, KNOWN, ADAPTERS, SERVER)
    return request


def test_a_text_and_a_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "presets.json"
    file.write_text(json.dumps(KNOWN, indent=2))
    for given in (str(file), "\n" + json.dumps(KNOWN), None):
        assert presets.preset_problems(arguments(given)) == []
        found = presets.as_json(arguments(given))
        assert found is None if given is None else json.loads(found or "") == KNOWN


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"a": {"mode": "exat"}}', ["'a'", "mode='exat'", "one of smc, exact"]),
        ('{"a": {"num_particles": 5}}', ["'a'", "num_particles=5", "from 1 to 4"]),
        ('{"a": 5}', ["'a'", "5", "an object"]),
        ('{"a": null}', ["'a'", "an object"]),
        ('{"a": {}, "a": {}}', ["'a'", "twice"]),
        ('{"a": {"mode": "smc", "mode": "exact"}}', ["'mode'", "twice"]),
        ('{"a:b": {}}', ["'a:b'", "letters"]),
        ('{"a": ', ["JSON object", "cannot be read"]),
        ("/no/such/file.json", ["/no/such/file.json", "No such file"]),
        ('{"plain": {"num_steps": 0, "tilt": 0}}', ["'plain'", "num_steps=0 beside tilt=0;"]),
        (5, ["5", "JSON"]),
    ],
)
def test_what_cannot_be_a_preset_is_said_at_start(given: Any, said: list[str]) -> None:
    (problem,) = presets.preset_problems(arguments(given, num_particles=4))
    assert presets.FLAG in problem
    assert [word for word in said if word not in problem] == []
    each = '{"a": {"mode": "x"}, "b": {}, "c": {"power": -1}}'
    assert len(presets.preset_problems(arguments(each))) == 2


def test_adapters_are_left_to_sglang_beside_presets() -> None:
    own = {"temperature": 0.5, "custom_params": {"smc": {"num_particles": 3}}}
    alone = settled("sql", own)
    assert (alone.lora_path, alone.sampling_params) == ("sql", own)
    batch = settled(["sql", "two", None, "poems"], {}, ["a"] * 4)
    assert batch.lora_path == ["sql", None, None, "poems"]
    assert batch.sampling_params == [{}, {"custom_params": {"smc": KNOWN["two"]}}, {}, {}]
    assert settled(["exact", None], {}, ["a", "b"]).lora_path is None


UNKNOWN = "unknown; presets of this server: 'exact', 'two', 'plain'; LoRA adapters: 'sql', 'poems'"


@pytest.mark.parametrize(
    ("name", "smc", "told"),
    [
        *((name, {}, UNKNOWN) for name in ("exat", 5, "../adapter")),
        ("exact", {"power": 2}, "preset 'exact' together with .* power=2"),
        ("two", {"num_steps": 0}, "preset 'two' together with .* beside num_particles=2; allowed"),
    ],
)
def test_unknown_names_and_keys_that_contradict_are_refused(name: Any, smc: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        settled(name, {"custom_params": {"smc": smc}})
    with pytest.raises(ValueError, match=f"none, until the server is started with {presets.FLAG}"):
        presets.find(name, {}, ())
    request = GenerateReqInput(text="a", lora_id="nobody's")
    with pytest.raises(ValueError, match='lora_id is "nobody\'s"; send a name, as lora_path'):
        presets.put_in_place(request, KNOWN, ADAPTERS, SERVER)


def chat(**fields: Any) -> Any:
    return SimpleNamespace(**{"chat_template_kwargs": None, "lora_path": None, **fields})


def test_a_chat_names_its_preset_where_routers_and_stock_servers_let_it_pass() -> None:
    """Red if a template is shown the name, or loses what else it is given."""
    request = chat(chat_template_kwargs={"smc_preset": "two", "enable_thinking": False})
    presets.take_from_template(request, KNOWN)
    assert (request.lora_path, request.chat_template_kwargs) == ("two", {"enable_thinking": False})
    for other in (chat(), chat(lora_path="sql"), SimpleNamespace()):
        before = dict(vars(other))
        presets.take_from_template(other, KNOWN)
        assert vars(other) == before


@pytest.mark.parametrize(
    ("name", "lora_path", "said"),
    [
        ("sql", None, "is 'sql'; allowed: a preset of this server: 'exact', 'two', 'plain'."),
        (["two"], None, "is ['two']; allowed"),
        ("two", "sql", "is 'two' beside lora_path 'sql'; allowed: one of them."),
    ],
)
def test_what_else_a_chat_names_there_is_refused(name: Any, lora_path: Any, said: str) -> None:
    request = chat(chat_template_kwargs={"smc_preset": name}, lora_path=lora_path)
    with pytest.raises(ValueError) as error:
        presets.take_from_template(request, KNOWN)
    assert said in str(error.value)
