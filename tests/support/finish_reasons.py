"""Records of an abort that SGLang makes, by the function that makes them."""

from typing import Any

from sglang_smc.state.failures import ERROR_TYPE

_ERROR = {"type": "abort", "status_code": 503, "message": "why"}
#: The newest supported release's; `contract/test_finish_reasons.py` reads them from its source.
PRODUCERS: dict[str, dict[str, Any]] = {
    "schedule_batch.FINISH_ABORT.to_json": {**_ERROR, "err_type": None},
    "scheduler.Scheduler._handle_generate_request": _ERROR,
    "scheduler.Scheduler._set_or_validate_priority": _ERROR,
    "scheduler.Scheduler._abort_on_queued_limit": _ERROR,
    "scheduler.Scheduler._poll_timeout_aborts": _ERROR,
    "tokenizer_manager.TokenizerManager._handle_abort_req": {"type": "abort", "message": "why"},
}
#: As `sglang_smc.state.failures.end_request` makes it.
OWN = {**_ERROR, "err_type": ERROR_TYPE}
