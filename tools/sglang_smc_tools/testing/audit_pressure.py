"""Put a server under audit under more pressure: full contexts, and SMC of all shapes."""

from __future__ import annotations

from itertools import cycle, product

import httpx

from sglang_smc_tools.testing.copies import LENGTH, copies_of
from sglang_smc_tools.testing.endpoint import Endpoint

_FEW = 3  # records, whose prompt's tokens are counted: more than their share of a longer one's


def full_context(endpoint: Endpoint) -> int:
    """Return with how many records the longest prompts of `copies_of` fill a server's context."""
    longest = max((copy.prompt for copy in copies_of(36, _FEW)), key=len)
    body = {"model": endpoint.model, "prompt": [longest], "max_tokens": 1, "temperature": 0.0}
    try:
        limit = endpoint.client.http.get("/v1/models").json()["data"][0]["max_model_len"]
        size = endpoint.client.post("/v1/completions", body)["usage"]["prompt_tokens"]
        return max(_FEW, _FEW * (limit - LENGTH) // size)
    except (LookupError, TypeError, httpx.HTTPError) as error:
        where = "This server does not tell max_model_len and usage. Give a number of records."
        raise ValueError(f"--records full: prompts are to fill the context. {where}") from error


def sweep(endpoint: Endpoint) -> None:
    """Let requests ask for all depths of SMC, with one particle and with all, in turns."""
    if endpoint.smc is None:
        where = "This server does not run SMC. Audit it at each --speculative-num-steps."
        raise ValueError(f"--sweep: a request of SMC has a depth of its own. {where}")
    most = endpoint.smc.settings
    own = endpoint.params.get("custom_params", {}).get("smc", {})
    depths = product(range(1, most["num_steps"] + 1), sorted({1, most["num_particles"]}))
    shapes = [{**own, "num_steps": depth, "num_particles": count} for depth, count in depths]
    turns = [{"custom_params": {"smc": one}} for one in ({"num_steps": 0}, *shapes)]
    endpoint.turns = cycle(turns)  # of a list: threads share it
