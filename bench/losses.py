"""What each loss of `sglang_smc.distill` makes of the shipped draft, in the same number of steps.

    python bench/losses.py                    # about 20 minutes on one core
    python bench/losses.py --steps 10         # a look

Beside the tool's own numbers, on held-out samples of the target: the tokens that exact verification
of N = 8 chains of K = 8 tokens adds to a text, by playing rounds behind the same contexts for all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from fidelity.stats import normal_interval
from results import markdown_table, provenance
from study import PAIR, bar
from transformers import AutoModelForCausalLM, DynamicCache

from sglang_smc.distill import cli
from sglang_smc.distill.losses import LOSSES
from sglang_smc.distill.texts import Text, read_texts
from sglang_smc.ops.torch_ops import TORCH
from sglang_smc.smc import exact
from sglang_smc.tokens.distribution import TokenDistribution, sample

GROUPS, CHAINS, COLUMNS = 16, 8, 8
EOS = 1


def tune(loss: str, options: argparse.Namespace) -> dict[str, Any]:
    """The tool's report of one loss; raises SystemExit where the tool could not."""
    files = ["--target", PAIR / "target", "--draft", PAIR / "draft", "--texts", options.texts]
    out = options.output_dir / loss
    words = ["--out", out, "--loss", loss, "--steps", options.steps, "--learning-rate", 0.002]
    failed = cli.main([str(word) for word in [*files, *words, "--held-out", 200]])
    if failed:
        raise SystemExit(failed)
    return json.loads((out / "distill.json").read_text())


def contexts(texts: list[Text], count: int) -> list[list[int]]:
    """Prefixes of held-out answers, of any length but the whole."""
    rng = torch.Generator().manual_seed(0)
    share = torch.rand(count, generator=rng).tolist()
    some = texts[-count:]
    ends = (t.prompt + int(s * (len(t.ids) - t.prompt)) for t, s in zip(some, share, strict=True))
    return [text.ids[:end] for text, end in zip(some, ends, strict=True)]


def tokens_a_pass(folder: Path, behind: list[list[int]]) -> dict[str, float]:
    """Of N = 8 chains, a mean over contexts with its 95 % interval."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32).eval()
        for of in (PAIR / "target", folder)
    )
    rng = torch.Generator().manual_seed(1)
    shown = bar(iterable=behind, desc=folder.name, unit="context")
    return normal_interval([tokens_added(target, draft, one, rng) for one in shown])._asdict()


@torch.inference_mode()
def tokens_added(target: Any, draft: Any, context: list[int], rng: torch.Generator) -> float:
    """Tokens that a round of exact verification adds behind a context, averaged over groups."""
    size = GROUPS * CHAINS
    p_rows, q_rows = (Rows(model, context[:-1], size) for model in (target, draft))
    tokens, q = [torch.full((size,), context[-1])], []
    for _ in range(COLUMNS):
        log_q = q_rows.read(tokens[-1].unsqueeze(1))[:, 0]
        q.append(TokenDistribution.of_log_probs(log_q))
        tokens.append(sample(log_q, torch.rand(size, dtype=torch.float64, generator=rng)))
    p = TokenDistribution.of_log_probs(p_rows.read(torch.stack(tokens, 1)).flatten(0, 1))
    drafted = torch.stack(tokens[1:], 1).unflatten(0, (GROUPS, CHAINS))
    numbers = torch.rand(drafted.shape, dtype=torch.float64, generator=rng)
    found = exact.verify(TORCH, drafted, drafted == EOS, p, q, numbers)
    accepted = torch.arange(COLUMNS) < found.num_columns.unsqueeze(1)
    ended = ((drafted[torch.arange(GROUPS), found.winner] == EOS) & accepted).any(1)
    return float((found.num_columns + (~ended).long()).double().mean())


class Rows:
    """A model that reads texts of one length behind a common beginning."""

    def __init__(self, model: Any, common: list[int], size: int) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        if common:
            self.read(torch.tensor([common]))
            self.cache.batch_repeat_interleave(size)

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities ``[B, T, V]`` of what follows each of the tokens ``[B, T]``."""
        found = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        return found.logits.log_softmax(-1)


def row(name: str, worth: dict[str, Any], tokens: dict[str, float]) -> dict[str, Any]:
    """One draft's numbers; means over the columns of a block."""
    mean = {key: sum(worth[key]) / len(worth[key]) for key in worth if isinstance(worth[key], list)}
    return {
        "loss": name,
        **{key: round(value, 4) for key, value in mean.items()},
        "accepted": worth["accepted"],
        "accepted_error": worth["accepted_error"],
        "tokens_a_pass": {key: round(value, 4) for key, value in tokens.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    heads = ["loss", "KL(p, q)", "log E_q[(p/q)^2]", "rejection", "rejection of 8 at best"]
    heads += ["accepted of 8, N = 1", "tokens a pass, N = 8, exact"]
    keys = ("forward_kl", "chi2", "rejection", "rejection_of_all")
    lines = [
        [
            one["loss"],
            *(f"{one[key]:.4f}" for key in keys),
            f"{one['accepted']:.2f} ± {1.96 * one['accepted_error']:.2f}",
            f"{one['tokens_a_pass']['mean']:.2f} [{one['tokens_a_pass']['low']:.2f}, "
            f"{one['tokens_a_pass']['high']:.2f}]",
        ]
        for one in rows
    ]
    return markdown_table(heads, lines)


def main() -> None:
    """Train with each loss, play rounds, and write what they say."""
    options = _options()
    torch.set_num_threads(1)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    reports = {loss: tune(loss, options) for loss in LOSSES}
    behind = contexts(read_texts(options.texts, 1.0), options.contexts)
    before = next(iter(reports.values()))["before"]
    rows = [row("(the shipped draft)", before, tokens_a_pass(PAIR / "draft", behind))]
    for loss, report in reports.items():
        played = tokens_a_pass(options.output_dir / loss, behind)
        rows.append(row(loss, report["after"], played))
    settings = {"steps": options.steps, "contexts": options.contexts, "temperature": 1.0}
    found = {"provenance": provenance(settings), "rows": rows}
    (options.output_dir / "losses.json").write_text(json.dumps(found, indent=2) + "\n")
    print(table(rows))


def _options() -> argparse.Namespace:
    found = argparse.ArgumentParser(description="Losses of sglang_smc.distill, side by side.")
    found.add_argument("--output-dir", type=Path, default=Path("losses-output"))
    found.add_argument(
        "--texts",
        type=Path,
        required=True,
        help="the target's samples, as bench/pair/heads.py keeps them with the same flag",
    )
    found.add_argument("--steps", type=int, default=100)
    found.add_argument("--contexts", type=int, default=40)
    return found.parse_args()


if __name__ == "__main__":
    main()
