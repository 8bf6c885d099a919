"""How fast decoding can be at most: plain, speculative and SMC decoding on a device's roofline.

The command is ``python -m sglang_smc.plan``; `roofline` is what it computes with, and `proposals`
what may draft. Other programs ask `roofline.round_cost`.
"""
