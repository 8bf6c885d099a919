"""Drafts: a language model, a head over the target's hidden states, or n-gram matches."""
