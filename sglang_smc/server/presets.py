"""Resolve presets: named SMC settings, which a request selects by the name of its model.

Proxies and `/v1/messages` drop `custom_params`, and pass on the model's name. SGLang parses
`model:name` as a model and a LoRA adapter, and puts the adapter's name into `lora_path`. The name
may be a preset's there, and no name is both. A prefill server without SMC refuses it there: chats
may have it in `chat_template_kwargs`, which templates do not look at.

An operator declares presets with `--speculative-smc-presets`; they are validated when the server
starts. A request's own keys override those of its preset; both are validated together.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_smc import upstream
from sglang_smc.options.request import CUSTOM_PARAMS, chosen_keys, request_config
from sglang_smc.options.server import FIELDS, SMCConfig, flag_of, out_of_range
from sglang_smc.printable import shown
from sglang_smc.server import refusals
from sglang_smc.upstream import Arguments

FLAG = flag_of("presets")
FIELD = FIELDS["presets"]

TEMPLATE_KEY = "smc_preset"
"""Key of `chat_template_kwargs`, which SGLang's router passes on, with the name of a preset."""

Presets = Mapping[str, dict[str, Any]]

# A colon ends a model's name, and SGLang strips spaces around it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def preset_problems(server_args: Arguments) -> list[str]:
    """Return what is wrong with the flag's presets, a sentence each."""
    given = getattr(server_args, FIELD)
    if given is None:
        return []
    try:
        found = _parsed(given)
    except ValueError as error:
        return [str(error)]
    server = SMCConfig.from_server_args(server_args)
    problems = (_problem(name, own, server, server_args) for name, own in found.items())
    return [problem for problem in problems if problem]


def as_json(server_args: Arguments) -> str | None:
    """Return the flag's presets, which `preset_problems` has accepted, as JSON."""
    given = getattr(server_args, FIELD)
    return None if given is None else json.dumps(_parsed(given))


def of(server_args: Arguments) -> Presets:
    return _read(getattr(upstream.resolved(server_args), FIELD))


def same_name(name: str) -> str:
    """Return the error for a LoRA adapter with the name of a preset."""
    return (
        f"A LoRA adapter and a preset ({FLAG}) are both named {name!r}, and a request names "
        "either in the same place. Rename one of them."
    )


def find(name: Any, presets: Presets, adapters: Collection[str]) -> dict[str, Any] | None:
    """Return the settings of a preset; None for an adapter.

    Raises ValueError listing both, for another name.
    """
    if isinstance(name, str) and (name in presets or name in adapters):
        return presets.get(name)
    there = ", ".join(map(repr, presets)) or f"none, until the server is started with {FLAG}"
    loaded = ", ".join(map(repr, adapters)) or "none, until it is started with --enable-lora"
    raise ValueError(
        f"The name {shown(name)} (lora_path, or what follows the model's name and a colon) is "
        f"unknown; presets of this server: {there}; LoRA adapters: {loaded}."
    )


def take_from_template(request: Any, presets: Presets) -> None:
    """Move the preset's name that a chat has in ``chat_template_kwargs`` to its ``lora_path``.

    Raises ValueError for another name, or beside a name in the model or in ``lora_path``.
    """
    fields = vars(request)
    kwargs = fields.get("chat_template_kwargs") or {}
    if TEMPLATE_KEY not in kwargs:
        return
    name = kwargs[TEMPLATE_KEY]
    if not (isinstance(name, str) and name in presets):
        there = ", ".join(map(repr, presets)) or f"none, until the server is started with {FLAG}"
        raise ValueError(
            f"chat_template_kwargs[{TEMPLATE_KEY!r}] is {name!r:.100}; allowed: a preset of this "
            f"server: {there}."
        )
    if fields.get("lora_path"):
        raise ValueError(
            f"chat_template_kwargs[{TEMPLATE_KEY!r}] is {name!r} beside lora_path "
            f"{fields['lora_path']!r:.100}; allowed: one of them. Leave one out."
        )
    request.chat_template_kwargs = {k: v for k, v in kwargs.items() if k != TEMPLATE_KEY}
    request.lora_path = name


def put_in_place(
    request: GenerateReqInput, presets: Presets, adapters: Collection[str], server: SMCConfig
) -> None:
    """Merge the presets that a request's ``lora_path`` names into its sampling parameters.

    ``lora_path`` is a name, or a list of a name or None for each prompt, and has the names of
    ``adapters`` alone afterwards.

    Raises ValueError if a name is unknown, or a preset and the request's own keys conflict.
    """
    if request.lora_id is not None:  # SGLang would hand it on, to a scheduler that may lack it
        raise ValueError(f"lora_id is {shown(request.lora_id)}; send a name, as lora_path.")
    names = request.lora_path
    params = request.sampling_params
    if not names:
        return
    is_batch = isinstance(names, list) or isinstance(params, list)
    size = len(params) if isinstance(params, list) else 1
    each_name = names if isinstance(names, list) else [names] * size
    each = params if isinstance(params, list) else [params] * len(each_name)
    found = {name: find(name, presets, adapters) for name in each_name if name}
    merged = [_with(one, name, found, server) for one, name in zip(each, each_name, strict=True)]
    left = [name if name in adapters else None for name in each_name]
    request.sampling_params = merged if is_batch else merged[0]
    request.lora_path = (left if is_batch else left[0]) if any(left) else None


def _with(params: Any, name: str | None, found: Any, server: SMCConfig) -> dict[str, Any]:
    """Return sampling parameters with a preset merged in; the caller's are not modified."""
    params = params or {}
    preset = found.get(name)
    if preset is None:
        return params
    custom = params.get("custom_params") or {}
    settings = {"smc": {**preset, **chosen_keys(custom)}}
    request_config(server, settings, where=f"The preset {name!r} together with {CUSTOM_PARAMS}")
    return {**params, "custom_params": {**custom, **settings}}


@lru_cache(maxsize=1)
def _read(text: str | None) -> Presets:
    return {} if text is None else json.loads(text)


def _parsed(given: Any) -> dict[str, Any]:
    """Parse a flag's value: JSON, or the path of a JSON file."""
    if not isinstance(given, str):
        raise ValueError(out_of_range("presets", given))
    is_text = given.lstrip().startswith("{")
    try:
        text = given if is_text else Path(given).read_text(encoding="utf-8")
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{FLAG} is {given!r:.200}; allowed: a JSON object, or the path of a file with one. "
            f"{'It' if is_text else 'That file'} cannot be read: {error}."
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{FLAG} has {text!r:.200}; allowed: an object of names and settings.")
    return found


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands there twice")
        found[key] = value
    return found


def _problem(name: str, settings: Any, server: SMCConfig, server_args: Arguments) -> str | None:
    if not _NAME.fullmatch(name):
        return f"{FLAG} has a preset {name!r}; allowed: names of letters, digits, '.', '_' and '-'."
    where = f"{FLAG}: the preset {name!r}"
    if not isinstance(settings, dict):
        return f"{where} is {settings!r}; allowed: an object with the keys of {CUSTOM_PARAMS}."
    try:
        asked = request_config(server, {"smc": settings}, where=where)
        refusals.check_offered(asked, server_args, where)
    except ValueError as error:
        return str(error)
    return None
