"""Check what answers tell beside their text: log-probabilities, counts, states."""

from __future__ import annotations

import math
from typing import Any

from conformance.checks.registry import check
from conformance.server import AbsentError, CheckedServer, WrongError

GROUP = "outputs"
TOKENS = 20
TOP = 4
LISTED = 3
HIDDEN = "hidden states"
EMBEDDINGS = "embeddings"


def _near(server: CheckedServer, found: float, expected: float, what: str) -> None:
    if abs(found - expected) > 2 * server.endpoint.rounding:
        raise WrongError(f"{what}: {found:.4f} in place of {expected:.4f}")


def _told(server: CheckedServer, **asked: Any) -> dict[str, Any]:
    """Return a sampled answer of SGLang's own route with its log-probabilities."""
    prompt = server.ids(server.prompts[1])
    body = {"input_ids": list(prompt), "return_logprob": True, **asked}
    return server.generate(body, temperature=1.0, max_new_tokens=TOKENS, sampling_seed=7)


def _scored(server: CheckedServer, told: dict[str, Any]) -> list[Any]:
    """Return the distributions behind each prefix of an answer, by a prefill of its whole text."""
    prompt = server.ids(server.prompts[1])
    return server.sglang.score([prompt], [tuple(told["output_ids"])])[0]


@check("log-probabilities of sampled tokens", GROUP)
def own_logprobs(server: CheckedServer) -> str:
    """Check that each token's own is that of a plain pass over the finished text."""
    told = _told(server)
    entries = told["meta_info"]["output_token_logprobs"]
    if [token for _, token, _ in entries] != told["output_ids"]:
        raise WrongError("the list's tokens are not the answer's")
    for (value, _, _), place in zip(entries, _scored(server, told), strict=True):
        _near(server, value, place.logprob, f"token {place.token}")
    return f"{len(entries)} tokens"


@check("log-probabilities of the likeliest", GROUP)
def top_logprobs(server: CheckedServer) -> str:
    told = _told(server, top_logprobs_num=TOP)
    tops = told["meta_info"]["output_top_logprobs"]
    for top, place in zip(tops, _scored(server, told), strict=True):
        expected = sorted(place.top.values(), reverse=True)[:TOP]
        for (value, _, _), other in zip(top, expected, strict=True):
            _near(server, value, other, "one of the likeliest")
    return f"{len(tops)} tokens"


@check("log-probabilities of listed tokens", GROUP)
def listed_logprobs(server: CheckedServer) -> str:
    likeliest = server.sglang.following([server.ids(server.prompts[1])])[0]
    asked = list(likeliest)[:LISTED]
    told = _told(server, token_ids_logprob=asked)
    lists = told["meta_info"]["output_token_ids_logprobs"]
    compared = 0
    for listed, place in zip(lists, _scored(server, told), strict=True):
        if [token for _, token, _ in listed] != asked:
            raise WrongError(f"{listed} in place of those of {asked}")
        for value, token, _ in listed:
            if token in place.top:  # of large vocabularies only the likeliest are told
                _near(server, value, place.top[token], f"token {token}")
                compared += 1
    return f"{compared} values"


@check("log-probabilities of the prompt", GROUP)
def prompt_logprobs(server: CheckedServer) -> str:
    """Check that those beside an answer are those of scoring the prompt alone."""
    told = _told(server, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    prompt = server.ids(server.prompts[1])
    scored = server.sglang.score([prompt[:1]], [prompt[1:]])[0]
    for (value, token, _), place in zip(told[1:], scored, strict=True):
        if token != place.token:
            raise WrongError(f"token {token} in place of {place.token}")
        _near(server, value, place.logprob, f"token {token}")
    return f"{len(scored)} tokens"


@check("log-probabilities, streamed", GROUP)
def streamed_logprobs(server: CheckedServer) -> str:
    """Check that a stream's entries join to the whole answer's, and none is lost."""
    asked = server.body(server.prompts[1], TOKENS, temperature=0.0, logprobs=2)
    whole = server.client.post("/v1/completions", asked)["choices"][0]["logprobs"]
    values: list[float] = []
    for chunk in server.client.stream("/v1/completions", asked):
        for choice in chunk["choices"]:
            told = choice.get("logprobs") or {"token_logprobs": []}
            values += told["token_logprobs"]
    if whole is None:
        raise AbsentError("log-probabilities")
    if len(values) != len(whole["token_logprobs"]):
        raise WrongError(f"{len(values)} entries in place of {len(whole['token_logprobs'])}")
    for found, expected in zip(values, whole["token_logprobs"], strict=True):
        _near(server, found, expected, "a streamed entry")
    return f"{len(values)} entries"


@check("usage", GROUP)
def usage(server: CheckedServer) -> str:
    """Check that prompt and answer are counted, in a stream too."""
    asked = server.body(server.prompts[1], TOKENS, temperature=0.0, ignore_eos=True)
    whole = server.client.post("/v1/completions", asked)["usage"]
    shown = {"stream_options": {"include_usage": True}}
    chunks = list(server.client.stream("/v1/completions", {**asked, **shown}))
    streamed = chunks[-1].get("usage") or {}
    if whole["completion_tokens"] != TOKENS:
        raise WrongError(f"{whole['completion_tokens']} tokens of the answer")
    for name in ("completion_tokens", "prompt_tokens"):
        if streamed.get(name) != whole[name]:
            raise WrongError(f"{name}: {whole[name]}, streamed {streamed.get(name)}")
    if server.model and whole["prompt_tokens"] != len(server.ids(server.prompts[1])):
        raise WrongError(f"{whole['prompt_tokens']} tokens of the prompt")
    return f"{TOKENS} tokens"


@check("scores of items", GROUP)
def scores(server: CheckedServer) -> str:
    """Check that `/v1/score` has the probabilities of labels behind query and item."""
    sglang = server.sglang
    query = list(server.ids(server.prompts[1]))
    items = [[20, 30], [40]]
    body = {"model": server.endpoint.model, "query": query, "items": items}
    tops = sglang.following([(*query, *item) for item in items])
    labels = [token for token in tops[0] if token in tops[1]][:2]
    asked = {**body, "label_token_ids": labels, "apply_softmax": True}
    found = server.client.post("/v1/score", asked)["scores"]
    for row, top in zip(found, tops, strict=True):
        masses = [math.exp(top[token]) for token in labels]
        for value, mass in zip(row, masses, strict=True):
            _near(server, value, mass / sum(masses), "a score")
    return f"{len(items)} items"


@check("input embeddings", GROUP, EMBEDDINGS)
def input_embeddings(server: CheckedServer) -> str:
    """Check that a prompt's own embeddings give the text of its token ids."""
    if server.folder is None:
        raise AbsentError("the checkpoint at hand, for its embeddings")
    from safetensors.torch import load_file

    ids = list(server.ids(server.prompts[1]))
    weights = load_file(server.folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"][ids].float().tolist()
    expected = server.generate({"input_ids": ids})["text"]
    found = server.generate({"input_embeds": rows})["text"]
    if found != expected:
        raise WrongError(f"{found!r} in place of {expected!r}")
    return "1 prompt"


@check("hidden states", GROUP, HIDDEN)
def hidden_states(server: CheckedServer) -> str:
    """Check that each token has the state that a prefill of the whole text has."""
    ids = list(server.ids(server.prompts[1]))[::-1]  # which no cache has
    asked = {"input_ids": ids, "return_hidden_states": True}
    told = server.generate(asked, max_new_tokens=6, ignore_eos=True)
    states = [row for part in told["meta_info"]["hidden_states"] for row in _rows(part)]
    if len(states) < len(ids) + 5:
        raise WrongError(f"{len(states)} states for {len(ids)} + 6 tokens")
    server.client.http.post("/flush_cache").raise_for_status()
    again = {"input_ids": [*ids, *told["output_ids"]], "return_hidden_states": True}
    whole = server.generate(again, max_new_tokens=1)["meta_info"]["hidden_states"]
    expected = [row for part in whole for row in _rows(part)]
    for found, other in zip(states[len(ids) :], expected[len(ids) :], strict=False):
        if max(abs(a - b) for a, b in zip(found, other, strict=True)) > 1e-2:
            raise WrongError("a state differs from that of a prefill")
    return f"{len(states)} states"


def _rows(part: list[Any]) -> list[list[float]]:
    return part if isinstance(part[0], list) else [part]
