"""``sglang-smc``: what a user calls by hand.

`cli` chooses the command and imports no more than that one: its help must not wait for torch.
"""
