"""Who drafts: a language model, or a head that reads the target's states."""
