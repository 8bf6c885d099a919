"""Check that outputs of a model pair on this machine have the distributions that SMC promises.

The command is ``sglang-smc check``; the same checks as a library::

    from sglang_smc_tools.testing import check_exact_answers, connect

    def test_exact_mode_is_lossless():
        result = check_exact_answers(connect("http://localhost:30000"))
        assert not result.failed, result.note
"""

from sglang_smc_tools.testing.checks import check_draft_law as check_draft_law
from sglang_smc_tools.testing.checks import check_equal_models as check_equal_models
from sglang_smc_tools.testing.checks import check_evidence as check_evidence
from sglang_smc_tools.testing.checks import check_exact_answers as check_exact_answers
from sglang_smc_tools.testing.checks import check_mode as check_mode
from sglang_smc_tools.testing.model import CheckedAnswer as CheckedAnswer
from sglang_smc_tools.testing.model import Model as Model
from sglang_smc_tools.testing.model import Position as Position
from sglang_smc_tools.testing.model import connect as connect
from sglang_smc_tools.testing.model import started as started
from sglang_smc_tools.testing.potential_checks import check_potential as check_potential
from sglang_smc_tools.testing.report import Result as Result
from sglang_smc_tools.testing.report import Verdict as Verdict
