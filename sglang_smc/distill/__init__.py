"""A draft for a target, trained on what the target itself says: ``python -m sglang_smc.distill``.

Plain torch and transformers, on a CPU or a GPU; what it writes are the checkpoints that SGLang
loads. `new_eagle3` and `new_dflash` in `checkpoints` write heads that nobody has trained yet.
"""
