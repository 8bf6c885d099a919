"""Hold default prompts for models of any kind, and read others from a file."""

from __future__ import annotations

from pathlib import Path

PROMPTS = (
    "Anna has 12 apples and buys 7 more. She then gives",
    "Once upon a time there was a small house at the end of",
    "To make a good cup of tea, you first",
    "The most important thing about the weather is that",
    "Ben reads 5 pages every day for 9 days. In all he reads",
    "My favourite place in the city is",
    "The river runs from the mountains to",
    "In the morning he always",
)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts of a file, one per line; skip empty lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--prompts {path}: {error}. Give a text file, one prompt a line."
        ) from error
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise ValueError(f"--prompts {path}: no prompt in there; needed: one a line, 1 or more.")
    return found
