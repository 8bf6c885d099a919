"""Write the results of an audit as one HTML file."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from string import Template

from sglang_smc_tools.testing.report import Result, Verdict, false_alarm

_BINS = 20
_WIDTH = 300
_HEIGHT = 90

_PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: light-dark(#1b2430, #e7ebf1); --bar: light-dark(#aabfdd,
  #38506f); --soft: light-dark(#5d6878, #98a4b5); --line: light-dark(#e2e7ed, #29313d); --band:
  light-dark(#e8f3e9, #1b3322); --pass: light-dark(#1a7f37, #4ac26b); --fail: light-dark(#c93c2a,
  #ff7565); }
body { margin: 24px auto; padding: 0 20px; max-width: 1080px; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: light-dark(#fff, #10141a); }
h1 { font-size: 20px; } h2 { font-size: 16px; margin: 0; } article p { margin: 4px 0; }
article { display: grid; grid-template-columns: 1fr ${width}px; gap: 8px 32px; padding: 14px 0;
  border-top: 1px solid var(--line); }
.about, .numbers, .verdict { color: var(--soft); font-variant-numeric: tabular-nums; }
.verdict { margin-left: 10px; font-weight: 400; } .pass .verdict { color: var(--pass); }
.fail .verdict { color: var(--fail); font-weight: 650; } svg { width: 100%; max-width: ${width}px; }
.band { fill: var(--band); } .bar { fill: var(--bar); } text { fill: var(--soft); font-size: 10px; }
@media (max-width: 700px) { article { grid-template-columns: 1fr; } }
</style>
<h1>$title</h1>
<p class="about">$about</p>
$articles
</html>
""")


def page_of(
    results: Sequence[Result], ranks: Mapping[str, Sequence[float]], title: str, about: str
) -> str:
    """Return the document: an article for each result, with a histogram of its ranks."""
    chance = f"Chance that a correct server fails any check: at most {false_alarm(results):.2g}."
    return _PAGE.substitute(
        title=html.escape(title),
        about=html.escape(f"{about} {chance}"),
        width=_WIDTH,
        articles="\n".join(_article(one, ranks.get(one.check, ())) for one in results),
    )


def _article(result: Result, ranks: Sequence[float]) -> str:
    kind = result.verdict.value if result.verdict in (Verdict.PASS, Verdict.FAIL) else "other"
    numbers = ""
    if result.estimate is not None:
        error = f" ± {2 * result.standard_error:.3f}" if result.standard_error else ""
        numbers = f"{result.statistic}: {result.estimate:.4g}{error}"
    if result.p_value is not None:
        numbers += f"; p = {result.p_value:.2g}, fails below {result.alpha:.2g}"
    numbers += f"; {result.num_answers} answers"
    return (
        f'<article class="{kind}"><div><h2>{html.escape(result.check)}'
        f'<span class="verdict">{result.verdict.value}</span></h2>'
        f"<p>{html.escape(result.proves)}.</p><p>{html.escape(result.note)}</p>"
        f'<p class="numbers">{html.escape(numbers.lstrip("; "))}</p></div>{_histogram(ranks)}'
        "</article>"
    )


def _histogram(ranks: Sequence[float]) -> str:
    """Return a picture of ranks in bins, with the band in which 95 % of flat bins lie."""
    if not ranks:
        return "<div></div>"
    counts = [0] * _BINS
    for rank in ranks:
        counts[min(int(rank * _BINS), _BINS - 1)] += 1
    mean = len(ranks) / _BINS
    spread = 1.96 * math.sqrt(mean * (1 - 1 / _BINS))
    scale = _HEIGHT / max(*counts, mean + spread)
    bars = "".join(
        f'<rect class="bar" x="{index * _WIDTH / _BINS + 1:.1f}" width="{_WIDTH / _BINS - 2:.1f}" '
        f'y="{_HEIGHT - count * scale:.1f}" height="{count * scale:.1f}"/>'
        for index, count in enumerate(counts)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 14}" role="img" aria-label="Histogram of ranks">'
        f'<rect class="band" width="{_WIDTH}" y="{_HEIGHT - (mean + spread) * scale:.1f}" '
        f'height="{2 * spread * scale:.1f}"/>{bars}'
        f'<text y="{_HEIGHT + 12}">likeliest</text>'
        f'<text y="{_HEIGHT + 12}" x="{_WIDTH}" text-anchor="end">rarest</text></svg>'
    )
