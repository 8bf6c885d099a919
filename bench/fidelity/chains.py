"""How many tokens lossless verification gets out of 72 scored rows, by how they are drafted.

    python bench/fidelity/chains.py                 # some 10 minutes on one core; resumes
    python bench/fidelity/chains.py --contexts 4    # a look

All layouts are drafted behind the same contexts, prefixes of the target's own answers, and verified
by `sglang_smc.smc.exact`. A round's tokens are those that it adds to the text: what is accepted and
one more, or what is accepted where that ends the text.

chains    N independent chains of K tokens: N (K + 1) rows.
stop      8 chains of up to 16 that stop where the draft is unsure of the next token (entropy), or
          of all that it has drafted (path). The threshold makes 72 rows on average. What decides is
          the text so far, so that chains with one text stop together, which is lossless.
trunk     t tokens drafted once, then N independent branches: 1 + t + N (K - t) rows. In the trunk
          verification has one chain.
merged    N independent chains of which equal prefixes are scored once: as many rows as the tree
          has. The plugin's target pass cannot do that.

"At most" holds for any lossless verification of the same drafts (optimal transport of prefixes):

    P(tokens > t) <= 1 - q(B)^N + p(A)    for any set A of unended prefixes of t tokens,

with B all of A and what has ended: if all chains lie in B, the text must lie in A. A are those with
p/q below a threshold, chosen on one half of the chains and held to on the other. For "stratified"
siblings, whose uniforms are spread evenly in the first column or in all, q(B)^N is the share of
rounds whose chains all lie in B: a bound, without a rule that reaches it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Python has put this folder first; the benchmarks import each other from the one above.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from fidelity.chain_layouts import (
    Round,
    at_most,
    doubts,
    draft,
    independent,
    play,
    play_merged,
    play_stopped,
    play_trunk,
    pool,
    spread,
    threshold,
    trunk,
)
from fidelity.cuts import TEMPERATURE, load_pair, plain
from fidelity.reference import Models, ancestral
from fidelity.simulate import Pair
from fidelity.stats import normal_interval
from pair.task import held_out, messages
from results import Interval, interval_cell, markdown_table, provenance
from study import PAIR, Log, bar, code_fingerprint, digest, parser, positive

FIRST_PROBLEM = 40_000
LONGEST = 17  # tokens of a chain
SIZE, FEWER = 64, 32  # groups of 8 chains; of those that serve one layout alone
CHAINS = [(8, 8), (6, 11), (5, 13), (4, 17), (9, 7), (12, 5)]
MERGED = [(8, 8), (18, 8), (10, 11), (8, 12), (6, 15)]
TRUNKS = [(4, 8, 12), (7, 8, 15)]  # t, N, K
STRATIFIED = {"stratified, first column": 1, "stratified, all columns": 8}
DRAFT_COSTS = {"1/8": 1 / 8, "1/32": 1 / 32}  # of a draft pass, in passes of the target
BASE = "chains N=8 K=8"

#: What a layout comes to at one context: tokens, rows, draft passes and a bound of the tokens.
Point = dict[str, float]


def context(models: Models, pair: Pair, index: int, generator: torch.Generator) -> list[int]:
    """A prefix of the target's answer to a problem, of any length but the whole."""
    prompt = models.prompt_ids(messages(held_out(FIRST_PROBLEM + index)))
    answer = ancestral(models.target, prompt, pair.eos, TEMPERATURE, generator)
    cut = int(torch.randint(1, max(2, len(answer)), (), generator=generator))
    return prompt + answer[:cut]


def point(found: Round, bound: float | None = None) -> Point:
    """Means over groups."""
    means = {name: float(of.double().mean()) for name, of in found._asdict().items()}
    return means if bound is None else {**means, "at_most": bound}


def measure(pair: Pair, text: Sequence[int], generator: torch.Generator) -> dict[str, Point]:
    """Play all layouts behind one context, but for chains that stop."""
    uniforms = partial(torch.rand, dtype=torch.float64, generator=generator)
    chains = pool(pair, text, SIZE, 8, LONGEST, independent(uniforms))
    weights = chains.log_weights.flatten(0, 1)
    found: dict[str, Point] = {}
    for count, steps in CHAINS:
        played = play(chains.grouped(count, steps), uniforms)
        found[f"chains N={count} K={steps}"] = point(played, at_most(weights[:, :steps], count))
    for count, steps in MERGED:
        played = play_merged(chains.grouped(count, steps), uniforms)
        found[f"merged N={count} K={steps}"] = point(played)
    for length, count, steps in TRUNKS:
        drafts = pool(pair, text, FEWER, count, steps, trunk(length, uniforms))
        played = play_trunk(drafts, length, uniforms)
        found[f"trunk t={length} N={count} K={steps}"] = point(played)
    for name, columns in STRATIFIED.items():
        drafts = pool(pair, text, FEWER, 8, 8, spread(columns, uniforms))
        found[name] = {"at_most": at_most(weights[:, :8], 8, drafts.log_weights)}
    return found


def measure_stops(
    pair: Pair, texts: Sequence[Sequence[int]], seed: int
) -> tuple[dict[str, float], list[dict[str, Point]]]:
    """Chains of 16 that stop: where, for `ROWS` rows on average, and what that gives."""
    uniforms = partial(
        torch.rand, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    points = independent(uniforms)
    some = [draft(pair, text, 8, 8, 16, points) for text in texts]
    thresholds = {name: threshold(some, name) for name in ("entropy", "path")}
    entries = []
    for text in bar(iterable=texts, desc="stops", unit="context"):
        drafts = pool(pair, text, FEWER, 8, 16, points)
        of = doubts(drafts)
        played = {name: play_stopped(drafts, of[name], thresholds[name], uniforms) for name in of}
        entries.append({f"stop by {name}": point(found) for name, found in played.items()})
    return thresholds, entries


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """A mean difference over contexts, with its 95 % interval."""
    return normal_interval([a - b for a, b in zip(ours, theirs, strict=True)])


def summary(entries: Sequence[dict[str, Point]]) -> list[dict[str, Any]]:
    """A row for each layout; gains are over N = K = 8, at the same contexts."""
    rows = []
    for name in entries[0]:
        row: dict[str, Any] = {"name": name}
        for key in ("rows", "draft_passes", "tokens", "at_most"):
            if key in entries[0][name]:
                row[key] = normal_interval([entry[name][key] for entry in entries])
        key = "tokens" if "tokens" in row else "at_most"
        ours, base = ([entry[one][key] for entry in entries] for one in (name, BASE))
        row["gain"] = paired(ours, base)
        for cost, of_pass in DRAFT_COSTS.items():
            if "tokens" in row:
                time = 1 + of_pass * row["draft_passes"].mean
                row[f"passes_per_token_{cost}"] = time / row["tokens"].mean
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    times = [f"passes_per_token_{cost}" for cost in DRAFT_COSTS]
    heads = ["", "rows", "draft passes", "tokens", "gain", "at most"]
    heads += [f"passes a token, draft {cost}" for cost in DRAFT_COSTS]
    lines = []
    for row in rows:
        counts = [f"{row[key].mean:.1f}" if key in row else "" for key in ("rows", "draft_passes")]
        cells = [interval_cell(row.get(key), ".2f") for key in ("tokens", "gain", "at_most")]
        spent = [f"{row[key]:.3f}" if key in row else "" for key in times]
        lines.append([row["name"], *counts, *cells, *spent])
    return markdown_table(heads, lines)


def main() -> None:
    """Complete the contexts, and write what they say."""
    options = _options()
    torch.set_num_threads(1)
    models, pair = load_pair(PAIR, TEMPERATURE)
    here = Path(__file__).parent
    code = digest([here / "simulate.py", here / "chain_layouts.py"])
    log = Log(
        options.output_dir / "contexts.jsonl",
        {**code_fingerprint(), "study": code, "seed": options.seed},
    )
    done, texts = len(log.read()), []
    with log.writing() as write:
        for index in bar(iterable=range(options.contexts), desc="contexts", unit="context"):
            generator = torch.Generator().manual_seed(options.seed * 1_000_003 + index)
            texts.append(context(models, pair, index, generator))
            if index >= done:
                write(measure(pair, texts[-1], generator))
    thresholds, stops = measure_stops(pair, texts, options.seed)
    rows = summary([one | stop for one, stop in zip(log.read(), stops, strict=False)])
    settings = {"contexts": options.contexts, "seed": options.seed, "temperature": TEMPERATURE}
    results = {
        "provenance": provenance(settings),
        "thresholds": thresholds,
        "rows": [plain(row) for row in rows],
    }
    (options.output_dir / "chains.json").write_text(json.dumps(results, indent=2) + "\n")
    print(table(rows))


def _options() -> argparse.Namespace:
    found = parser("fidelity/chains.py", "Tokens out of 72 scored rows, losslessly.")
    found.set_defaults(output_dir=Path("chains-output"))
    found.add_argument("--contexts", type=positive, default=25, help="at least 2")
    found.add_argument("--seed", type=int, default=0)
    return found.parse_args()


if __name__ == "__main__":
    main()
