"""All that this project asks of SGLang."""

from contract.judged import MAY_KEEP_TABLE, methods
from contract.symbols import contract
from contract.upstream import ours
from contract.upstream.check import SERVER_ARGS, Asked, Judged
from request_fields import GENERATE_REQUEST, SAMPLING_PARAMS
from server_arg_fields import LOOKED_AT

_FIELDS = {
    "sglang.srt.managers.io_struct.GenerateReqInput": GENERATE_REQUEST,
    "sglang.srt.sampling.sampling_params.SamplingParams": SAMPLING_PARAMS,
}


def everything(newer: bool) -> Asked:
    """The contract, our files, and what has been judged, for the newer releases or the older."""
    sources = ours.sources(newer)
    refused = [use.path for s in sources if s.is_product for use in ours.requirement_fields(s)]
    fields = {SERVER_ARGS: [*LOOKED_AT, *refused], **_FIELDS}
    judged = (
        *(Judged(path, frozenset(names), "field") for path, names in fields.items()),
        *(Judged(path, frozenset(names), "method") for path, names in methods(newer).items()),
    )
    return Asked(contract(newer), sources, judged, MAY_KEEP_TABLE)
