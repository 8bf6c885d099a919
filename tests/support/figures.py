"""Find figures on pages."""

import re


def figures_of(text: str) -> set[str]:
    """Numbers with a point or a comma, or of three digits: no settings."""
    return set(re.findall(r"\d+(?:[.,]\d+)+|\d{3,}", text))
