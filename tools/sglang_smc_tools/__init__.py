"""Implement the command line tools beside the server: `sglang-smc ...`."""
