"""Play one round: draft, score, decide, extend, bonus, commit."""
