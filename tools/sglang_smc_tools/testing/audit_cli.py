"""Run ``sglang-smc audit URL``: do a server's answers follow the distribution that it claims?"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_smc.command.program import command, number, positive
from sglang_smc_tools.commands import bar, prompts_in, told_by
from sglang_smc_tools.testing import report
from sglang_smc_tools.testing.audit import audit, most_answers
from sglang_smc_tools.testing.audit_page import page_of
from sglang_smc_tools.testing.audit_pressure import full_context, sweep
from sglang_smc_tools.testing.audit_texts import LENGTH, WIDTHS
from sglang_smc_tools.testing.checks import MOST_OF_EVIDENCE, PROMPTS
from sglang_smc_tools.testing.cli import run
from sglang_smc_tools.testing.copies import LENGTH as COPY_LENGTH
from sglang_smc_tools.testing.copies import copies_of
from sglang_smc_tools.testing.endpoint import Endpoint, open_endpoint
from sglang_smc_tools.testing.model import SMCPair, check_folder, launched


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="sglang-smc audit",
        description="Audits a server from outside: are its answers samples of the target, whatever "
        "it speculates with, and does load leave them as they are? For SGLang, vLLM, and any "
        "server with OpenAI's completions route and log-probabilities. Exit status: 0 if no check "
        "failed, 1 if one did, 2 without an audit.",
    )
    add = result.add_argument
    add("url", help="of the server, such as http://localhost:30000")
    add("--reference", metavar="URL", help="a plain server of the model; it scores the answers")
    add("--target", metavar="DIR", help="the model's folder, for a reference that is started here")
    add("--model", default="", help="its name in requests; default: the first of /v1/models")
    add("--chat", action="store_true", help="ask by the chat route, each prompt as one message")
    add("--api-key", help="of the server, where it has one")
    more = 'added to each request, such as {"custom_params": {"smc": {"mode": "exact"}}}'
    add("--params", type=_object, default={}, metavar="JSON", help=more)
    add("--prompts", type=Path, help="a text file, one prompt a line")
    add("--answers", type=positive, default=400, help="of all checks together; default 400")
    many = "identifiers in a prompt, more in each fourth; full: as many as fit there; default 8"
    add("--copies", type=number(int, 0), default=300, help="of identifiers; default 300; 0: none")
    add("--records", type=_records, default=8, metavar="NUMBER", help=many)
    add("--adapters", nargs="+", default=(), metavar="NAME", help="LoRA adapters of others beside")
    add("--updates", action="store_true", help="SGLang loads its weights again between copies")
    add("--sweep", action="store_true", help="SMC's depths and numbers of particles, in turns")
    add("--minutes", type=number(float, 0.1), default=30.0, help="at most; default 30")
    add("--seed", type=int, default=0, help="of the tests' own randomness; default 0")
    add("--page", type=Path, metavar="FILE", help="write an HTML page with histograms there")
    add("--json", type=Path, metavar="FILE", help="write all numbers there")
    return result


def _object(text: str) -> dict[str, Any]:
    if isinstance(found := json.loads(text), dict):
        return found
    raise ValueError


_object.__name__ = "JSON object"  # as argparse names what is none


def _records(text: str) -> int:
    return 0 if text == "full" else number(int, 3)(text)


def _run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if a check failed, else 0."""
    if options.reference and options.target:
        raise ValueError("--reference and --target are two references. Leave one of them out.")
    prompts = prompts_in(options.prompts) if options.prompts else PROMPTS
    begin = time.monotonic()
    settings = {name: getattr(options, name) for name in ("model", "chat", "params", "adapters")}
    endpoint = open_endpoint(options.url, options.api_key, **settings)
    endpoint.client.deadline = begin + 2 * 60 * options.minutes  # of answers that never end
    if options.sweep:
        sweep(endpoint)
    if options.updates:
        told = told_by(options.url, "/server_info", "model_path", options.api_key)
        endpoint.weights = told["model_path"]
    num_records = options.records or full_context(endpoint)
    copies = copies_of(math.ceil(options.copies / len(WIDTHS)), num_records, options.seed)
    total = most_answers(options.answers, prompts, len(copies))
    total += (len(WIDTHS) - 1) * len(options.adapters and copies)  # one of an adapter beside each
    print(
        f"At most {total} answers of {LENGTH} tokens, of {COPY_LENGTH} where identifiers are copied"
        f"{f', {MOST_OF_EVIDENCE} short ones of SMC' if endpoint.smc else ''}"
        f"; after {options.minutes:g} minutes a check asks for one at most, after twice as many "
        "nothing is read.",
        flush=True,
    )
    with _reference(endpoint, options), bar(total=total, unit=" answers", disable=None) as line:
        endpoint.deadline = begin + 60 * options.minutes
        endpoint.on_answers = line.update
        how = {"num_answers": options.answers, "seed": options.seed}
        results, ranks = audit(endpoint, prompts, copies, **how)
        results += _evidence(endpoint, prompts, options.seed)
    how = "a reference" if options.reference or options.target else "the server itself"
    if endpoint.score is None:
        how = f"the {endpoint.client.top} log-probabilities that come with the answers"
    about = f"Model {endpoint.model}, answers of at most {LENGTH} tokens, scored by {how}."
    if endpoint.smc and not options.params:
        mode = endpoint.smc.settings["mode"]
        about += f" It runs SMC in mode {mode}; all but exact are approximate (docs/fidelity.md)."
    seconds = time.monotonic() - begin
    print(f"{report.as_text(results)} {seconds:.0f} s.\n{about}")
    if options.page:
        options.page.write_text(page_of(results, ranks, f"Audit of {options.url}", about))
    if options.json:
        facts = {"url": options.url, "model": endpoint.model, "scored_by": how}
        told = report.as_dict(results, **facts, seconds=round(seconds, 1), seed=options.seed)
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    return int(any(result.failed for result in results))


def _evidence(endpoint: Endpoint, prompts: Sequence[str], seed: int) -> list[report.Result]:
    """Check that E[Z] = 1 of a server that runs SMC, if the time that is left is enough."""
    endpoint.client.deadline = endpoint.deadline
    try:
        if endpoint.smc and time.monotonic() < endpoint.deadline:
            return run(SMCPair(endpoint.smc), prompts, ("evidence",), seed=seed)
    except ValueError:
        if time.monotonic() < endpoint.deadline:
            raise
    note = "No time was left. Give more --minutes, or ask for fewer --answers."
    lacks = report.Result("evidence", "E[Z] = 1", report.Verdict.NOT_ENOUGH_DATA, note)
    return [lacks] if endpoint.smc else []


@contextlib.contextmanager
def _reference(endpoint: Endpoint, options: argparse.Namespace) -> Iterator[None]:
    """Let a plain server score the answers for the ``with`` block, where one is asked for."""
    with contextlib.ExitStack() as servers:
        if options.target:
            check_folder("--target", options.target)
            (url,) = servers.enter_context(launched(options.target, log_level="warning"))
            _score_by(endpoint, open_endpoint(url))
        if options.reference:
            _score_by(endpoint, open_endpoint(options.reference, options.api_key))
        yield


def _score_by(endpoint: Endpoint, reference: Endpoint) -> None:
    if reference.score is None:
        raise ValueError(
            f"{reference.client.url}: this server does not score token ids (SGLang's "
            "/generate, or vLLM's prompt_logprobs). Give one that does, or leave --reference out."
        )
    reference.client.deadline = endpoint.client.deadline
    endpoint.score = reference.score
    endpoint.rounding = reference.rounding


main = command(parser, _run)
