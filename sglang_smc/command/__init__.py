"""Implement ``sglang-smc``, the command line for users.

`cli` imports only the chosen command, so that its help does not wait for torch.
"""
