"""One round: draft, score, decide, extend, bonus, commit."""
