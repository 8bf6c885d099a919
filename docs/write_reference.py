"""Writes the tables of settings, and of N and K by draft; run it after a change of these."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sglang_smc.drafts.sizes import MIXTURE, ROWS, WEIGHED, SizesRow
from sglang_smc.options.request import KEYS, UP_TO_SERVER
from sglang_smc.options.server import LONG_LAG, MODES, SETTINGS, Setting, flag_of, values_of

FOLDER = Path(__file__).parent
END = "<!-- end -->"
#: Where pages have more of a flag, and of a key.
MORE = {
    "num_steps": "expect.md#which-n-and-k",
    "num_particles": "expect.md#which-n-and-k",
    "mode": "algorithm.md#the-modes-as-one-dial",
    "proposal": "whole-texts.md#verified-proposals",
    "power": "powers.md",
    "resampling_method": "powers.md#what-lowers-the-variance",
    "evidence_threshold": "algorithm.md#evidence-and-where-a-block-is-cut",
    "tilt": "fidelity.md#one-dial",
    "draft_temperature": "drafts.md#beside-sglangs-trees",
    "ngram_matches": "drafts.md#n-gram-matches",
    "draft_class": "drafter.md",
    "max_lag": "algorithm.md#the-lag",
    "kernels": "operations.md#the-check-of-kernels",
    "draft_layers": "drafts.md#a-drafts-layers",
    "adaptive": "expect.md#under-load",
    "potential": "potentials.md#on-a-server",
    "presets": "#presets",
}
MORE_OF_KEYS = {
    "num_steps": "#off-for-one-request",
    "selection": "potentials.md#which-particle-answers",
    "potentials": "potentials.md#in-a-request",
    "trace": "trace.md#limit-and-cost",
}


def flags() -> str:
    """Return the table of flags: what `--help` says of them."""
    rows = (
        (f"`{flag_of(name)}`", values_of(name), modes_of(setting), more(setting.help, name, MORE))
        for name, setting in SETTINGS.items()
    )
    return table(("flag", "values", "in modes alone", ""), rows)


def keys() -> str:
    """Return the table of a request's keys."""
    rows = (
        (f"`{name}`", more(allowed(name, key), name, MORE_OF_KEYS), modes_of(key))
        for name, key in KEYS.items()
    )
    return table(("key", "values", "in modes alone"), rows)


def sizes() -> str:
    """Return the table of the N and K that a server chooses."""
    others = {"mode `smc`": WEIGHED, "a mixture of experts, any draft": MIXTURE}
    each = {row.draft: row for row in ROWS.values()} | others
    rows = (
        (name, str(row.num_particles), str(row.most_steps), str(row.steps), row.reason, source(row))
        for name, row in each.items()
    )
    return table(("for", "N", "K, adapting", "K, fixed", "why", "measured in"), rows)


def source(row: SizesRow) -> str:
    files = row.source.split(", ")
    return ", ".join(f"[{one.split('/')[0]}](../bench/results/{one})" for one in files)


def allowed(name: str, key: Setting) -> str:
    if name in UP_TO_SERVER:
        words = f"an integer from {UP_TO_SERVER[name]} to the server's"
        return f"{words}, or to {LONG_LAG} where it has none" if name == "max_lag" else words
    return ", ".join(map(repr, key.allowed.choices or ())) or key.allowed.words


def modes_of(setting: Setting) -> str:
    return "" if setting.modes == MODES else ", ".join(f"`{mode}`" for mode in setting.modes)


def more(text: str, name: str, links: dict[str, str]) -> str:
    return f"{text} ([more]({links[name]}))" if name in links else text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return re.sub(r"(?<!\[)'([\w-]+)'", r"`\1`", text)  # words are code on a page


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "reference.md": {"<!-- flags -->": flags, "<!-- keys -->": keys},
    "expect.md": {"<!-- sizes -->": sizes},
}


def written(name: str, page: str) -> str:
    """Return a page with its tables as the settings are."""
    for mark, rows in PAGES[name].items():
        before, _, rest = page.partition(mark)
        page = f"{before}{mark}\n\n{rows()}\n\n{END}{rest.partition(END)[2]}"
    return page


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / name).write_text(written(name, (FOLDER / name).read_text()))
