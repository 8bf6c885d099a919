"""Compute upper bounds on the speed of plain, speculative and SMC decoding by a roofline model.

The command is ``python -m sglang_smc.tools.plan``; `roofline` holds the model, and `proposals` the
kinds of drafts. Other programs call `roofline.round_cost`.
"""
