"""Validate requests, to protect any SGLang server, with SMC or without."""
