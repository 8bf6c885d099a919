"""SGLang's server arguments, resolved: as they are built in the oldest release, later on demand."""

import argparse
from typing import Any

from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_smc import upstream


def resolve(**keywords: Any) -> ServerArgs:
    """Server arguments as a launcher has them; ValueError where SGLang or SMC refuse them."""
    server_args = ServerArgs(**keywords)
    if upstream.IS_NEWER:
        server_args.resolve_once()
    return server_args


def with_other(server_args: ServerArgs, **values: Any) -> Any:
    """The same with fields that have other values by now, to be read."""
    if not upstream.IS_NEWER:
        server_args.override("test", **values)
        return server_args
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    declare_resolution(server_args, "test", **values)
    return resolving_view(server_args)


def options() -> set[str]:
    """Return the options of a server's command line, SMC's among them."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return set(parser._option_string_actions)


def field_names(server_args: type | None = None) -> list[str]:
    """The names of all fields, of the class in force where none is given."""
    found = server_args or ServerArgs
    return list(found.__struct_fields__ if upstream.IS_NEWER else found.__dataclass_fields__)


def resolved_of(words: list[str]) -> ServerArgs:
    """Server arguments of a command line, as a launcher resolves them; ValueError if refused."""
    server_args = prepare_server_args(words)
    if upstream.IS_NEWER:
        server_args.resolve_once()
    return server_args
