"""The one SGLang release that this package supports, and what its users hear on another.

What the package touches inside that release is written down in tests/contract/symbols.py, and
compared there with what is installed: a check for those who change the release, not for each start
of a server.
"""

import os

import sglang

SUPPORTED_VERSION = "0.5.17"

# For work against another SGLang. A hook that finds no target there still keeps SMC from starting.
SKIP_VERSION_ENV = "SGLANG_SMC_DISABLE_VERSION_CHECK"


def problem() -> str | None:
    """The error for a user who selects SMC on another release; None on the supported one."""
    installed = sglang.__version__
    # A local suffix (0.5.17+cpu) names a build of the same source.
    if installed.partition("+")[0] == SUPPORTED_VERSION or os.environ.get(SKIP_VERSION_ENV) == "1":
        return None
    return (
        f"--speculative-algorithm SMC cannot run here: sglang {installed} is installed; allowed: "
        f"{SUPPORTED_VERSION}. Install it (pip install 'sglang=={SUPPORTED_VERSION}'), or an "
        f"sglang-smc made for {installed}. To develop against another SGLang, set "
        f"{SKIP_VERSION_ENV}=1."
    )
