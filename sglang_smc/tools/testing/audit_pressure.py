"""Put a server under audit under more pressure: full contexts, new weights, SMC of all shapes."""

from __future__ import annotations

from itertools import cycle, product

import httpx

from sglang_smc.tools.commands import told_by
from sglang_smc.tools.testing.copies import LENGTH, copies_of
from sglang_smc.tools.testing.endpoint import Endpoint

_FEW = 3  # records, of which a prompt's tokens are counted
_FILLED = 0.95  # of the context, at most: identifiers take more and less tokens


def full_context(endpoint: Endpoint) -> int:
    """Return with how many records the longest prompts of `copies_of` fill a server's context."""
    longest = max(copies_of(36, _FEW), key=lambda copy: len(copy.prompt.encode()))
    body = {"model": endpoint.model, "prompt": longest.prompt, "max_tokens": 1}
    try:
        limit = endpoint.client.http.get("/v1/models").json()["data"][0]["max_model_len"]
        size = endpoint.client.post("/v1/completions", body)["usage"]["prompt_tokens"]
        return max(_FEW, int(_FEW * (_FILLED * limit - LENGTH) / size))
    except (LookupError, TypeError, httpx.HTTPError) as error:
        raise ValueError(
            "--records full: this server does not tell max_model_len in /v1/models, and usage in "
            "its answers. Give the number of records."
        ) from error


def update_weights(endpoint: Endpoint, api_key: str | None) -> None:
    """Let a server of SGLang load its weights again beside each 32nd copy, and empty its cache."""
    told = told_by(endpoint.client.url, "/server_info", "model_path", api_key)
    endpoint.weights = told["model_path"]


def sweep(endpoint: Endpoint) -> None:
    """Let requests ask for all depths of SMC, with one particle and with all, in turns."""
    if endpoint.smc is None:
        raise ValueError(
            "--sweep: this server does not run SMC, so a request has no depth of its own. Audit "
            "it once for each --speculative-num-steps."
        )
    most = endpoint.smc.settings
    own = endpoint.params.get("custom_params", {}).get("smc", {})
    depths = product(range(1, most["num_steps"] + 1), sorted({1, most["num_particles"]}))
    shapes = [{**own, "num_steps": depth, "num_particles": count} for depth, count in depths]
    turns = [{"custom_params": {"smc": one}} for one in ({"num_steps": 0}, *shapes)]
    endpoint.turns = cycle(turns)  # of a list: threads share it
