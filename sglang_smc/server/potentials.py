"""Potentials as the flags declare them and as requests name them, checked before they are used."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_smc.options.request import CUSTOM_PARAMS, POTENTIALS_KEY, RequestConfig
from sglang_smc.potentials.declared import FLAG, choose, load
from sglang_smc.potentials.declared import problems as problems_of
from sglang_smc.process import potentials_of
from sglang_smc.upstream import Arguments, resolved

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput


def problems(server_args: Arguments) -> list[str]:
    """What is wrong with the potentials that were given, a sentence each."""
    given = server_args.speculative_smc_potential  # pyright: ignore[reportAttributeAccessIssue] -- ours
    if given is None:
        return []
    if not (isinstance(given, (list, tuple)) and all(isinstance(one, str) for one in given)):
        return [f"{FLAG} is {given!r}; allowed: a list of texts NAME=package.module:factory."]
    found = problems_of(given)
    if given and server_args.skip_tokenizer_init:
        found.append(
            f"{FLAG} is given with --skip-tokenizer-init; allowed: one of both, since potentials "
            "read texts. Leave --skip-tokenizer-init out."
        )
    seconds = server_args.speculative_smc_potential_timeout  # pyright: ignore[reportAttributeAccessIssue] -- ours
    watchdog = server_args.watchdog_timeout
    if seconds is not None and watchdog and seconds >= watchdog:
        found.append(
            f"--speculative-smc-potential-timeout is {seconds:g} with --watchdog-timeout "
            f"{watchdog:g}; allowed: less, since SGLang ends a server whose batch takes that long."
        )
    return found


def check(asked: RequestConfig, server_args: Arguments, where: str = CUSTOM_PARAMS) -> None:
    """Raise ValueError where a request names potentials or arguments that the server has not.

    Args:
        asked: without conflicts of its own.
        server_args: of the server, resolved or not.
        where: what errors are to call the place of these settings.
    """
    if asked.votes and resolved(server_args).skip_tokenizer_init:
        raise ValueError(
            f"{where} has selection='vote'; allowed: 'sample' and 'argmax', since this server runs "
            "with --skip-tokenizer-init and cannot read texts."
        )
    potentials: Mapping[str, Any] = load(potentials_of(server_args)) if asked.potentials else {}
    for one in asked.potentials:
        try:
            choose(one, potentials)
        except ValueError as error:
            raise ValueError(f"{where} has {error}") from error


def pack(request: "GenerateReqInput") -> None:
    """Put the potentials that a request names into texts: SGLang carries nothing deeper.

    What is no request is left for others to refuse; what the caller holds stays as it is.
    """
    params = request.sampling_params
    is_batch = isinstance(params, list)
    request.sampling_params = [_packed(one) for one in params] if is_batch else _packed(params)  # pyright: ignore[reportAttributeAccessIssue] -- of what came in


def _packed(params: Any) -> Any:
    custom = params.get("custom_params") if isinstance(params, dict) else None
    smc = custom.get("smc") if isinstance(custom, dict) else None
    given = smc.get(POTENTIALS_KEY) if isinstance(smc, dict) else None
    if custom is None or smc is None or not isinstance(given, (list, tuple)):
        return params
    try:
        text = json.dumps(given)
    except (TypeError, ValueError, RecursionError):
        return params
    return {**params, "custom_params": {**custom, "smc": {**smc, POTENTIALS_KEY: text}}}
