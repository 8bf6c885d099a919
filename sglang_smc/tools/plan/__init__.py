"""Compute upper bounds on the speed of plain, speculative and SMC decoding by a roofline model.

The command is ``python -m sglang_smc.tools.plan``; other programs call `roofline.smc_round`.
"""
