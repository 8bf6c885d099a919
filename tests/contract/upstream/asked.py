"""All that this project asks of SGLang."""

from contract.judged import MAY_KEEP_TABLE, METHODS
from contract.symbols import CONTRACT
from contract.upstream import ours
from contract.upstream.check import SERVER_ARGS, Asked, Judged
from request_fields import (
    GENERATE_REQUEST,
    GENERATE_REQUEST_SOME,
    SAMPLING_PARAMS,
    SAMPLING_PARAMS_SOME,
)
from server_arg_fields import LOOKED_AT, SOME_RELEASES
from some_releases import names as names_of

_FIELDS = {
    "sglang.srt.managers.io_struct.GenerateReqInput": (GENERATE_REQUEST, GENERATE_REQUEST_SOME),
    "sglang.srt.sampling.sampling_params.SamplingParams": (SAMPLING_PARAMS, SAMPLING_PARAMS_SOME),
}


def everything() -> Asked:
    """The contract, our files, and what has been judged."""
    sources = ours.sources()
    refused = [use.path for s in sources if s.is_product for use in ours.requirement_fields(s)]
    fields = {SERVER_ARGS: ([*LOOKED_AT, *refused], SOME_RELEASES), **_FIELDS}
    judged = (
        *(
            Judged(path, frozenset(names), "field", frozenset(names_of(some)))
            for path, (names, some) in fields.items()
        ),
        *(Judged(path, frozenset(names.split()), "method") for path, names in METHODS.items()),
    )
    return Asked(CONTRACT, sources, judged, MAY_KEEP_TABLE)
