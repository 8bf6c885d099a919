"""Train a draft on its target's outputs: ``python -m sglang_smc_tools.distill``.

Plain torch and transformers, on a CPU or a GPU; writes checkpoints that SGLang loads.
`checkpoints.new_head` writes untrained heads.
"""
