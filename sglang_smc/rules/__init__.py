"""Evaluate rules over a request's text, on the host."""
