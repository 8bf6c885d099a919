"""Check the cache, sessions, adapters, and what operators do while requests run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from conformance.checks.registry import check
from conformance.server import AbsentError, CheckedServer, WrongError

from sglang_smc_tools.testing.client import RefusedError

GROUP = "service"
CHATS = 8
TURNS = 4
#: Tokens of a turn before that may be read again: the last has no KV, and drafts read one behind.
MOST_READ_AGAIN = 3
LONG = 160
SPACE = 14  # tokens that the context has left behind a prompt
SPARE = 2  # of these SGLang gives none away
LORA = "lora"


def _greedy(server: CheckedServer, ids: list[int], length: int, **fields: Any) -> dict[str, Any]:
    return server.generate({"input_ids": ids, **fields}, max_new_tokens=length, ignore_eos=True)


@check("prefix cache of growing chats", GROUP)
def prefix_cache(server: CheckedServer) -> str:
    """Check that a turn reads at most `MOST_READ_AGAIN` tokens of those before it again."""
    ids = [list(server.ids(prompt)) for prompt in server.prompts[:CHATS]]
    worst = 0
    before = [0] * CHATS
    for turn in range(TURNS):

        def ask(chat: int) -> dict[str, Any]:
            return _greedy(server, ids[chat], 16)

        for chat, told in enumerate(server.at_once(ask, range(CHATS))):
            again = before[chat] - told["meta_info"]["cached_tokens"]
            worst = max(worst, again) if turn else 0
            before[chat] = len(ids[chat]) + len(told["output_ids"])
            ids[chat] += [*told["output_ids"], 40 + turn, 50 + chat]
    if worst > MOST_READ_AGAIN:
        raise WrongError(f"{worst} tokens of a chat are read again at a turn")
    return f"{CHATS} chats of {TURNS} turns, at most {worst} tokens read again"


@check("sessions", GROUP)
def sessions(server: CheckedServer) -> str:
    """Check that turns of a session give the text of the whole prompt."""
    first, second = [list(server.ids(server.prompts[index])) for index in (1, 2)]
    session = server.sglang.client.post("/open_session", {"capacity_of_str_len": 4096})
    one = _greedy(server, first, 12, session_params={"id": session})
    named = {"id": session, "rid": one["meta_info"]["id"]}
    two = _greedy(server, second, 12, session_params=named)
    whole = _greedy(server, [*first, *one["output_ids"], *second], 12)
    what = f"{two['text']!r} in place of {whole['text']!r}"
    server.check_same(two["output_ids"], whole["output_ids"], what)
    return "2 turns"


@check("adapters", GROUP, LORA)
def adapters(server: CheckedServer) -> str:
    """Check that an adapter's text is what its own scoring finds likeliest, beside others."""
    if not server.adapter:
        raise AbsentError("an adapter")
    ids = list(server.ids(server.prompts[1]))

    def ask(index: int) -> dict[str, Any]:
        lora = {"lora_path": server.adapter} if index % 2 else {}
        return _greedy(server, ids, 12, **lora)

    answers = server.at_once(ask, range(8))
    base = answers[0]
    adapted = answers[1]
    if base["output_ids"] == adapted["output_ids"]:
        raise WrongError("the adapter changes nothing")
    model = server.sglang
    model.lora = server.adapter
    places = model.score([tuple(ids)], [tuple(adapted["output_ids"])])[0]
    model.lora = None
    gaps = [max(place.top.values()) - place.logprob for place in places]
    if max(gaps) > 2 * server.endpoint.rounding:
        raise WrongError(f"a token is {max(gaps):.3f} nats below the adapter's likeliest")
    return f"{len(answers)} answers, half of them adapted"


def _running(server: CheckedServer, disturb: Any) -> list[dict[str, Any]]:
    """Return four long answers that run while ``disturb`` is called."""
    ids = [list(server.ids(prompt)) for prompt in server.prompts[:4]]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(_greedy, server, one, LONG) for one in ids]
        time.sleep(0.5)
        disturb()
        return [answer.result() for answer in answers]


def _unchanged(server: CheckedServer, disturb: Any) -> str:
    expected = _running(server, lambda: None)
    found = _running(server, disturb)
    for one, other in zip(found, expected, strict=True):
        what = f"{one['text']!r:.80} in place of {other['text']!r:.80}"
        server.check_same(one["output_ids"], other["output_ids"], what)
    return f"{len(found)} answers"


@check("pause, retract, continue", GROUP)
def pause(server: CheckedServer) -> str:
    """Check that requests that a pause retracts go on with the same text."""
    client = server.sglang.client

    def disturb() -> None:
        client.http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        time.sleep(0.2)
        client.http.post("/continue_generation", json={}).raise_for_status()

    return _unchanged(server, disturb)


@check("new weights", GROUP)
def new_weights(server: CheckedServer) -> str:
    """Check that weights that are loaded again change no text."""
    client = server.sglang.client
    if server.folder is None:
        raise AbsentError("the checkpoint at hand")
    prompt = list(server.ids(server.prompts[1]))
    before = _greedy(server, prompt, 16)["output_ids"]
    reply = client.post("/update_weights_from_disk", {"model_path": str(server.folder)})
    if not reply["success"]:
        raise WrongError(reply["message"])
    after = _greedy(server, prompt, 16)["output_ids"]
    if after != before:
        raise WrongError("the text is another one")
    return "1 load"


@check("abort", GROUP)
def abort(server: CheckedServer) -> str:
    """Check that an aborted request ends early and says so, and others do not notice."""
    client = server.sglang.client
    ids = list(server.ids(server.prompts[5]))

    def ask() -> dict[str, Any]:
        return _greedy(server, ids, 700, rid="to be aborted")

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        time.sleep(0.5)
        client.http.post("/abort_request", json={"rid": "to be aborted"}).raise_for_status()
        told = answer.result()
    reason = told["meta_info"]["finish_reason"]["type"]
    if reason != "abort" or told["meta_info"]["completion_tokens"] >= 700:
        raise WrongError(f"it ends with {reason!r}")
    return _unchanged(server, lambda: None)


@check("priorities", GROUP)
def priorities(server: CheckedServer) -> str:
    """Check that requests of all priorities have the text that they have alone."""
    ids = [list(server.ids(prompt)) for prompt in server.prompts]
    alone = [_greedy(server, one, 12)["output_ids"] for one in ids]

    def ask(index: int) -> list[int]:
        return _greedy(server, ids[index], 12, priority=index)["output_ids"]

    found = server.at_once(ask, range(len(ids)))
    server.check_same(found, alone, "a text differs from that without a priority")
    return f"{len(ids)} priorities"


@check("the edge of the context", GROUP)
def context_edge(server: CheckedServer) -> str:
    """Check that an answer may fill the context up to its edge, and no more."""
    size = server.sglang.client.http.get("/server_info").json()["context_length"]
    if not size:
        raise AbsentError("a context length that it tells")
    prompt = (list(server.ids(server.prompts[1])) * size)[: size - SPACE]
    told = _greedy(server, prompt, SPACE - SPARE)["meta_info"]["completion_tokens"]
    if told != SPACE - SPARE:
        raise WrongError(f"{told} tokens in place of {SPACE - SPARE}")
    try:
        over = _greedy(server, prompt, 4 * SPACE)["meta_info"]["completion_tokens"]
    except RefusedError:
        return f"{told} tokens up to the edge; more is refused"
    if not told <= over <= SPACE:
        raise WrongError(f"{over} tokens, where {SPACE} fit")
    return f"{told} tokens up to the edge; more is cut at {over}"


@check("batches of mixed settings", GROUP)
def mixed(server: CheckedServer) -> str:
    """Check that texts at temperature 0 are those alone, beside samples and grammars."""
    ids = [list(server.ids(prompt)) for prompt in server.prompts]
    alone = [_greedy(server, one, 16)["output_ids"] for one in ids]

    def ask(index: int) -> list[int]:
        kind = index % 4
        which = index // 4
        if kind == 0:
            return _greedy(server, ids[which], 16)["output_ids"]
        sampled: dict[str, Any] = {"temperature": 1.1, "sampling_seed": index, "top_p": 0.9}
        if kind == 1:
            sampled |= {"presence_penalty": 1.0}
        if kind == 2:
            sampled |= {"regex": "[a-z ]{8,16}"}
        shown = {"return_logprob": True, "top_logprobs_num": 2} if kind == 3 else {}
        return server.generate({"input_ids": ids[which], **shown}, **sampled)["output_ids"]

    found = server.at_once(ask, range(4 * len(ids)))[::4]
    differing = sum(one != other for one, other in zip(found, alone, strict=True))
    server.check_same(differing, 0, f"{differing} of {len(ids)} texts differ from those alone")
    return f"{len(ids)} texts in a crowd of {4 * len(ids)}"
