"""Parse the command line of ``python -m sglang_smc.tools.testing`` and run the checks."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_smc.tools.commands import positive
from sglang_smc.tools.testing import checks, connection, draft_checks, report
from sglang_smc.tools.testing.connection import Pair
from sglang_smc.tools.testing.prompts import PROMPTS, read_prompts
from sglang_smc.tools.testing.result import Result

TOTAL_ALPHA = 1e-3
MODES = ("exact", "smc", "mixed", "auto")
TESTS = ("evidence", "draft-law", "exact-answers", "law-of-exact")  # those with a p-value
NAMES = ("equal-models", *TESTS, *(f"law-of-{mode}" for mode in MODES if mode != "exact"))
_FEW = 4  # number of prompts for checks that need many answers to each


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if nothing failed, 1 if a check failed, 2 for invalid arguments."""
    arguments = parser().parse_args(argv)
    begin = time.monotonic()
    try:
        _check(arguments)
        prompts = read_prompts(arguments.prompts) if arguments.prompts else PROMPTS
        with _models(arguments) as pair:
            results = run(pair, prompts, arguments.only, arguments.scale, arguments.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - begin
    print(f"{report.as_text(results)} {seconds:.0f} s.")
    if arguments.json:
        about = {"seed": arguments.seed, "scale": arguments.scale, "seconds": round(seconds, 1)}
        arguments.json.write_text(json.dumps(report.as_dict(results, **about), indent=2) + "\n")
    return int(any(result.failed for result in results))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang_smc.tools.testing",
        description="Checks that SMC gives the texts it promises, with your pair of models: on a "
        "running server (--url), or in engines of its own (--target and --draft).",
    )
    result.add_argument("--url", help="a running SMC server, such as http://localhost:30000")
    result.add_argument("--draft-url", help="a server of the draft alone: two checks say more")
    result.add_argument("--api-key", help="of the server, where it has one")
    result.add_argument("--target", help="a model folder, for engines that this command starts")
    result.add_argument("--draft", help="the same")
    result.add_argument("--device", help="of these engines; default: what SGLang finds")
    result.add_argument("--dtype", default="auto", help="likewise; default auto")
    result.add_argument("--tp-size", type=positive, default=1, help="likewise; default 1")
    result.add_argument("--num-particles", type=positive, default=8, help="likewise; default 8")
    result.add_argument("--num-steps", type=positive, default=8, help="likewise; default 8")
    result.add_argument("--prompts", type=Path, help="a text file, one prompt a line")
    result.add_argument(
        "--only", type=_names, default=NAMES, help=f"of {', '.join(NAMES)}; default all"
    )
    result.add_argument(
        "--scale",
        type=_scale,
        default=1.0,
        help="so many times the answers: 4 halves every error; default 1",
    )
    result.add_argument("--seed", type=int, default=0, help="of the answers; default 0")
    result.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    return result


def run(
    pair: Pair,
    prompts: Sequence[str] = PROMPTS,
    only: Sequence[str] = NAMES,
    scale: float = 1.0,
    seed: int = 0,
) -> list[Result]:
    """Run the checks ``only``, in the order of `NAMES`, with a progress bar on a terminal."""
    from tqdm import tqdm

    chosen = [name for name in NAMES if name in only]
    alpha = TOTAL_ALPHA / len(TESTS)
    results = []
    with tqdm(total=len(chosen), unit="check", disable=None, leave=False) as bar:
        count = _counter(bar)
        for model in filter(None, pair):
            model.on_answers = count
        for name in chosen:
            bar.set_description(name)
            results.append(_CHECKS[name](pair, prompts, scale, alpha, seed))
            bar.update()
    return results


_Check = Callable[[Pair, Sequence[str], float, float, int], Result]


def _evidence(pair: Pair, prompts: Sequence[str], scale: float, alpha: float, seed: int) -> Result:
    return checks.check_evidence(
        pair.smc, prompts, num_answers=round(1536 * scale), alpha=alpha, seed=seed
    )


def _equal_models(
    pair: Pair, prompts: Sequence[str], scale: float, alpha: float, seed: int
) -> Result:
    """Check the pair if its models are equal, else the draft's own engine."""
    twins = pair.draft if pair.draft and pair.draft.settings else pair.smc
    model = pair.smc if pair.smc.same_models else twins
    return draft_checks.check_equal_models(model, prompts, seed=seed + 40_000_000)


def _draft_law(pair: Pair, prompts: Sequence[str], scale: float, alpha: float, seed: int) -> Result:
    return draft_checks.check_draft_law(
        pair.smc,
        prompts[:_FEW],
        draft=pair.draft,
        num_answers=round(2048 * scale),
        alpha=alpha,
        seed=seed + 30_000_000,
    )


def _exact_answers(
    pair: Pair, prompts: Sequence[str], scale: float, alpha: float, seed: int
) -> Result:
    return checks.check_exact_answers(
        pair.smc,
        prompts[:_FEW],
        num_answers=round(2048 * scale),
        alpha=alpha,
        seed=seed + 10_000_000,
    )


def _law_of(mode: str) -> _Check:
    def check(pair: Pair, prompts: Sequence[str], scale: float, alpha: float, seed: int) -> Result:
        return checks.check_mode(
            pair.smc,
            mode,
            prompts,
            draft=pair.draft,
            num_answers=round(128 * scale),
            alpha=alpha,
            seed=seed + 20_000_000,
        )

    return check


_CHECKS: dict[str, _Check] = {
    "equal-models": _equal_models,
    "evidence": _evidence,
    "draft-law": _draft_law,
    "exact-answers": _exact_answers,
    **{f"law-of-{mode}": _law_of(mode) for mode in MODES},
}


@contextlib.contextmanager
def _models(arguments: argparse.Namespace) -> Iterator[Pair]:
    if arguments.url:
        key = arguments.api_key
        smc = connection.connect(arguments.url, api_key=key)
        draft = None
        if arguments.draft_url:
            draft = connection.connect(arguments.draft_url, api_key=key, needs_smc=False)
        yield Pair(smc, draft)
        return
    given: dict[str, Any] = {
        "dtype": arguments.dtype,
        "tp_size": arguments.tp_size,
        "speculative_num_steps": arguments.num_steps,
        "speculative_smc_num_particles": arguments.num_particles,
    }
    if arguments.device:
        given["device"] = arguments.device
    with connection.started(arguments.target, arguments.draft, **given) as pair:
        yield pair


def _check(arguments: argparse.Namespace) -> None:
    engines = bool(arguments.target), bool(arguments.draft)
    if bool(arguments.url) == any(engines) or any(engines) != all(engines):
        raise ValueError(
            "needed: either --url of a running SMC server, or both --target and --draft, for "
            "engines that this command starts."
        )
    if arguments.draft_url and not arguments.url:
        raise ValueError("--draft-url goes with --url; engines know their draft. Leave it out.")


def _counter(bar: Any) -> Callable[[int], None]:
    total = 0

    def count(answers: int) -> None:
        nonlocal total
        total += answers
        bar.set_postfix_str(f"{total} answers")

    return count


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(NAMES)}")
    return names


def _scale(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 1000")
    return value
