"""What users hear on an SGLang release that this package does not support.

What the package touches inside those that it does is derived from its source, with
tests/contract/upstream/relied.py, and compared there with what is installed: a check for those who
change the release, not for each start of a server.
"""

import os

from sglang import version

from sglang_smc.upstream import SUPPORTED, release

# For work against another SGLang. A hook that finds no target there still keeps SMC from starting.
SKIP_VERSION_ENV = "SGLANG_SMC_DISABLE_VERSION_CHECK"


def problem() -> str | None:
    """The error for a user who selects SMC on another release; None on a supported one."""
    if release() in SUPPORTED or os.environ.get(SKIP_VERSION_ENV) == "1":
        return None
    return (
        f"--speculative-algorithm SMC cannot run here: sglang {version.__version__} is installed; "
        f"allowed: {', '.join(SUPPORTED)}. Install one of them (pip install "
        f"'sglang=={SUPPORTED[-1]}'), or an sglang-smc made for {release()}. To develop against "
        f"another SGLang, set {SKIP_VERSION_ENV}=1."
    )
