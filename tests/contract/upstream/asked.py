"""All that this project asks of SGLang."""

from contract.judged import MAY_KEEP_TABLE, methods
from contract.symbols import contract
from contract.upstream import ours, release
from contract.upstream.check import SERVER_ARGS, Asked, Judged
from request_fields import (
    GENERATE_REQUEST,
    GENERATE_REQUEST_SOME,
    SAMPLING_PARAMS,
    SAMPLING_PARAMS_SOME,
)
from server_arg_fields import LOOKED_AT, SOME_RELEASES

_FIELDS = {
    "sglang.srt.managers.io_struct.GenerateReqInput": (GENERATE_REQUEST, GENERATE_REQUEST_SOME),
    "sglang.srt.sampling.sampling_params.SamplingParams": (SAMPLING_PARAMS, SAMPLING_PARAMS_SOME),
}


def everything(version: str) -> Asked:
    """The contract, our files, and what has been judged, as they are for a release.

    One that is not supported is expected to have what the last one has.
    """
    newer, last = release.is_newer(version), release.supported()[-1]
    known = version if version in release.supported() else last
    newest = release.is_newest(version)
    sources = ours.sources(newer, newest=newest)
    refused = [use.path for s in sources if s.is_product for use in ours.requirement_fields(s)]
    fields = {SERVER_ARGS: ([*LOOKED_AT, *refused], SOME_RELEASES), **_FIELDS}
    judged = (
        *(
            Judged(path, frozenset(names), "field", _elsewhere(some, known))
            for path, (names, some) in fields.items()
        ),
        *(
            Judged(path, frozenset(names), "method")
            for path, names in methods(newer, newest).items()
        ),
    )
    return Asked(contract(newer, newest), sources, judged, MAY_KEEP_TABLE)


def _elsewhere(some: dict[str, str], version: str) -> frozenset[str]:
    """Of names that some releases have, those that this one has not."""
    others = (names for releases, names in some.items() if version not in releases.split())
    return frozenset(name for names in others for name in names.split())
