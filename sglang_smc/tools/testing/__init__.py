"""Check that outputs of a model pair on this machine have the distributions that SMC promises.

The command is ``python -m sglang_smc.tools.testing``; the same checks as a library::

    from sglang_smc.tools.testing import check_exact_answers, connect

    def test_exact_mode_is_lossless():
        result = check_exact_answers(connect("http://localhost:30000"))
        assert not result.failed, result.note
"""

from sglang_smc.tools.testing.checks import (
    check_draft_law,
    check_equal_models,
    check_evidence,
    check_exact_answers,
    check_mode,
)
from sglang_smc.tools.testing.model import Answer, Model, Position, connect, started
from sglang_smc.tools.testing.potential_checks import check_potential
from sglang_smc.tools.testing.report import Result, Verdict

__all__ = [
    "Answer",
    "Model",
    "Position",
    "Result",
    "Verdict",
    "check_draft_law",
    "check_equal_models",
    "check_evidence",
    "check_exact_answers",
    "check_mode",
    "check_potential",
    "connect",
    "started",
]
