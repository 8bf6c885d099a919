"""Write what docs/drafts.md and docs/families.md say of published drafts; run it after a change."""

from collections.abc import Iterable
from pathlib import Path

from sglang_smc_tools.published import ROWS, SPECULATORS, PublishedDraft

FOLDER = Path(__file__).parent
MARK = "<!-- made by docs/write_drafts.py -->"
END = "<!-- end of drafts -->"


def drafts_page() -> str:
    """Return the table of drafts that run, and below those that do not."""
    head = ("target", "draft", "its format", "its configuration")
    lines = [head, ["---"] * 4]
    lines += [
        (one.target, linked(one), code(one.format), one.configuration) for one in ROWS if one.runs
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    others = "\n".join(
        f"- {one.target}: {linked(one)}{of_format(one)}; refused: {one.refused}"
        for one in ROWS
        if not one.runs
    )
    return f"{table}\n\nNone that runs:\n\n{others}"


def families_page() -> str:
    """Return the targets with a draft that runs, and those that are refused, by the reason."""
    reasons = dict.fromkeys(one.refused for one in ROWS if not one.runs)
    served = {one.target for one in ROWS if one.runs}
    lines = [f"- **A published draft**: {listed(one.target for one in ROWS if one.runs)}"]
    for reason in reasons:
        refused = [one.target for one in ROWS if one.refused == reason]
        if names := [name for name in refused if name not in served]:
            lines.append(f"- **Refused** ({reason}): {listed(names)}")
    return "\n".join(lines)


def listed(names: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(names))


def linked(one: PublishedDraft) -> str:
    return f"`{one.draft}`" if "/" in one.draft else one.draft


def code(name: str) -> str:
    return name if name.startswith(SPECULATORS) else f"`{name}`"


def of_format(one: PublishedDraft) -> str:
    return f" ({code(one.format)})" if one.format else ""


PAGES = {"drafts.md": drafts_page, "families.md": families_page}


def written(name: str) -> str:
    """Return a page with its part as the table of drafts is."""
    before, _, rest = (FOLDER / name).read_text().partition(MARK)
    return f"{before}{MARK}\n\n{PAGES[name]()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for page in PAGES:
        (FOLDER / page).write_text(written(page))
