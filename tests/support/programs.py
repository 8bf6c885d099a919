"""Programs that have to end well."""

import os
import subprocess
from typing import Any

OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


def printed(*command: object, timeout: float | None = 900, **how: Any) -> str:
    """Return what a command prints; ``how`` is as `subprocess.run` takes it."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **how)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr[-3000:]}"
    return done.stdout
