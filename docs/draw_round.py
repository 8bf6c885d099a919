"""Draw `docs/round.svg`: one round of SMC with four particles.

    python docs/draw_round.py

Standard library only, and the same file each time. Tokens and their probabilities are made up;
weights, effective sample size and ancestors are computed from them.
"""

import html
from pathlib import Path
from typing import NamedTuple

OUTPUT = Path(__file__).with_name("round.svg")


class Draft(NamedTuple):
    """K drafted tokens, what target and draft give them, and the bonus tokens that may follow."""

    tokens: tuple[str, ...]
    p: tuple[float, ...]
    q: tuple[float, ...]


PREFIX = "We go to"
DRAFTS = (
    Draft(("Oslo", "for", "fun"), p=(0.1, 0.3, 0.2), q=(0.2, 0.3, 0.5)),
    Draft(("Rome", "in", "May"), p=(0.4, 0.6, 0.26), q=(0.2, 0.6, 0.2)),
    Draft(("Rome", "in", "June"), p=(0.4, 0.6, 0.1), q=(0.2, 0.6, 0.2)),
    Draft(("Bonn", "by", "ship"), p=(0.05, 0.2, 0.1), q=(0.1, 0.5, 0.2)),
)
BONUS = ("or", "and", "with", "if")
ESS_THRESHOLD = 0.5
UNIFORM = 0.6


def weights() -> list[float]:
    """Return the product of p / q along each particle."""
    found = []
    for draft in DRAFTS:
        weight = 1.0
        for p, q in zip(draft.p, draft.q, strict=True):
            weight *= p / q
        found.append(weight)
    return found


def effective_sample_size(values: list[float]) -> float:
    """1 where one particle has all the weight, N where all have the same."""
    return sum(values) ** 2 / sum(value**2 for value in values)


def ancestors(values: list[float], uniform: float) -> list[int]:
    """Systematic resampling: the particles that hold the points (u + i) / N of the weight."""
    size, found = len(values), []
    for slot in range(size):
        point, chosen = (uniform + slot) / size * sum(values), 0
        while point >= sum(values[: chosen + 1]):
            chosen += 1
        found.append(chosen)
    return found


def num_common(texts: list[tuple[str, ...]]) -> int:
    """How many leading tokens all texts share."""
    count = 0
    while all(text[: count + 1] == texts[0][: count + 1] for text in texts):
        count += 1
    return count


STYLE = """
text { font: 14px -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif;
  fill: #1f2328; text-anchor: middle }
.title { font-weight: bold; font-size: 15px }
.note { fill: #59636e; font-size: 13px }
.left { text-anchor: start }
.card { fill: #ffffff; stroke: #d0d7de }
.text { fill: #f6f8fa; stroke: #8c959f }
.draft { fill: #ddf4ff; stroke: #54aeff }
.target { fill: #ffe8cc; stroke: #e8590c }
.pass { fill: none; stroke: #e8590c; stroke-width: 2; stroke-dasharray: 6 4 }
.agreed { fill: none; stroke: #1a7f37; stroke-width: 2 }
.bar { fill: #8250df }
.line { fill: none; stroke: #8c959f; stroke-width: 1.5 }
.heir { fill: none; stroke: #8250df; stroke-width: 2 }
.orange { fill: #bc4c00 } .green { fill: #1a7f37 } .violet { fill: #8250df }
"""
DARK = """
text { fill: #e6edf3 }
.note { fill: #9198a1 }
.card { fill: #0d1117; stroke: #3d444d }
.text { fill: #21262d; stroke: #656c76 }
.draft { fill: #10294a; stroke: #388bfd }
.target { fill: #43230a; stroke: #f0883e }
.pass { stroke: #f0883e }
.agreed { stroke: #3fb950 }
.bar { fill: #a371f7 }
.line { stroke: #656c76 }
.heir { stroke: #a371f7 }
.orange { fill: #f0883e } .green { fill: #3fb950 } .violet { fill: #a371f7 }
"""

WIDTH, HEIGHT = 920, 388
ROW, FIRST_ROW, BOX_HEIGHT = 54, 108, 36
BOX, STEP = 64, 68  # a token's width, and from one token to the next
PREFIX_X, DRAFTS_X, BARS_X, COPIES_X = 20, 152, 388, 608
BAR, BARS_WIDTH = 30.0, 104  # for each unit of weight; with the number behind it
GAP = 12  # between what is agreed on and the tails
BOTTOM = FIRST_ROW + 4 * ROW


def middle(row: float) -> float:
    """Return the height of a row's middle."""
    return FIRST_ROW + row * ROW + BOX_HEIGHT / 2


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words, centred at ``x`` unless ``kind`` says otherwise."""
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{of_kind}>{html.escape(words)}</text>'


def frame(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle with round corners."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="6" class="{kind}"/>'


def token(x: float, row: int, word: str, kind: str) -> str:
    """Return a box with one token in it."""
    box = frame(x, FIRST_ROW + row * ROW, BOX, BOX_HEIGHT, kind)
    return box + text(x + BOX / 2, middle(row) + 5, word)


def curve(x: float, row: float, to_x: float, to_row: float, kind: str) -> str:
    """Return a line from one row to another that leaves and arrives level."""
    y, to_y, bend = middle(row), middle(to_row), (x + to_x) / 2
    path = f"M{x:g} {y:g}C{bend:g} {y:g} {bend:g} {to_y:g} {to_x:g} {to_y:g}"
    return f'<path d="{path}" class="{kind}"/>'


def heading(x: float, title: str, note: str, y: float = 44, kind: str = "title") -> str:
    """Return a step's name, and what it does below it."""
    return text(x, y, title, kind) + text(x, y + 20, note, "note")


def draw_drafts() -> list[str]:
    """Return the prefix, the particles behind it, and the target's pass around them."""
    width = 3 * STEP - 4
    centre = DRAFTS_X + width / 2
    parts = [
        frame(PREFIX_X, middle(1.5) - 34, 94, 68, "text"),
        text(PREFIX_X + 47, middle(1.5) - 4, PREFIX),
        text(PREFIX_X + 47, middle(1.5) + 17, "one KV copy", "note"),
        heading(centre, "1  Draft", "K = 3 tokens each, from q"),
        frame(DRAFTS_X - 9, FIRST_ROW - 9, width + 18, 3 * ROW + BOX_HEIGHT + 18, "pass"),
        heading(centre, "2  Score", "all p in one target pass", BOTTOM + 20, "title orange"),
    ]
    for row, draft in enumerate(DRAFTS):
        parts.append(curve(PREFIX_X + 94, 1.5, DRAFTS_X - 9, row, "line"))
        for column, word in enumerate(draft.tokens):
            parts.append(token(DRAFTS_X + column * STEP, row, word, "draft"))
    return parts


def draw_weights() -> list[str]:
    """Return a bar for each particle's weight."""
    found = weights()
    ess, least = effective_sample_size(found), ESS_THRESHOLD * len(found)
    centre = BARS_X + BARS_WIDTH / 2
    parts = [
        heading(centre, "3  Weigh", "w = product of p/q"),
        heading(centre, f"ESS {ess:.2f}", f"below τN = {least:g}", BOTTOM + 20, "title violet"),
    ]
    for row, weight in enumerate(found):
        length, y = weight * BAR, middle(row)
        bar = f'x="{BARS_X}" y="{y - 9:g}" width="{length:.1f}" height="18"'
        parts.append(f'<rect {bar} class="bar"/>')
        parts.append(text(BARS_X + length + 7, y + 5, f"{weight:.1f}", "left"))
    return parts


def draw_copies() -> list[str]:
    """Who descends from whom, the bonus tokens, and what all agree on."""
    chosen = ancestors(weights(), UNIFORM)
    texts = [(*DRAFTS[index].tokens, word) for index, word in zip(chosen, BONUS, strict=True)]
    common, start, end = num_common(texts), BARS_X + BARS_WIDTH + 14, COPIES_X - 9
    places = [COPIES_X + column * STEP + GAP * (column >= common) for column in range(4)]
    agreed, top = common * STEP - 4, FIRST_ROW - 9
    bonus_x, tails_x = places[-1] + BOX / 2, (places[common] + places[-1] + BOX) / 2
    emitted_x = COPIES_X + agreed / 2
    parts = [
        heading((start + end) / 2, "4  Resample", "by weight"),
        heading(COPIES_X + 1.5 * STEP, "copies", "of pointers, not of KV"),
        heading(bonus_x, "5  Bonus", "from p", kind="title orange"),
        frame(COPIES_X - 9, top, agreed + 18, 3 * ROW + BOX_HEIGHT + 18, "agreed"),
        heading(emitted_x, "6  Commit", "what all share", BOTTOM + 20, "title green"),
        heading(tails_x, "tails", "wait for agreement", BOTTOM + 20),
    ]
    parts += [
        text(start, middle(row) + 5, "\u00d7", "note") for row in range(4) if row not in chosen
    ]
    for row, index in enumerate(chosen):
        parts.append(curve(start, index, end, row, "heir"))
        for column, word in enumerate(texts[row]):
            kind = "draft" if column < len(DRAFTS[index].tokens) else "target"
            parts.append(token(places[column], row, word, kind))
    return parts


def draw() -> str:
    """Return the picture, as SVG."""
    title = "One round: draft, score, weigh, resample, bonus, commit"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}@media (prefers-color-scheme: dark) {{{DARK}}}</style>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" class="card"/>',
        *draw_drafts(),
        *draw_weights(),
        *draw_copies(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")
