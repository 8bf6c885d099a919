"""Compute upper bounds on the speed of plain, speculative and SMC decoding by a roofline model.

The command is ``sglang-smc plan``; other programs call `roofline.smc_round`.
"""
