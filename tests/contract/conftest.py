"""A process in which SGLang has loaded its plugins, as every server process does."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from toy_plans import LLAMA_CONFIG

LLAMA = {**LLAMA_CONFIG, "model_type": "llama", "max_position_embeddings": 256}


@pytest.fixture(scope="session", autouse=True)
def _plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    gc.freeze()  # what SGLang has imported stays: collections need not look at it again


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Resolving server arguments exports some of them as environment variables."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model's config.json, all that resolving server arguments reads."""
    folder: Path = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture
def smc(model_path: str) -> dict[str, Any]:
    return {
        "model_path": model_path,
        "speculative_algorithm": "SMC",
        "speculative_draft_model_path": model_path,
        "random_seed": 0,
    }
