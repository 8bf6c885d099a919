"""Checkpoints of drafts as they are published: their configurations and their tensors."""
