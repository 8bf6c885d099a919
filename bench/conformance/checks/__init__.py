"""Checks of features, which register themselves; by group."""
