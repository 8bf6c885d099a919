"""The law of the next token: what requests edit, filter and mask, and draws from what is left.

Like `sglang_smc.smc` pure functions of tensors, which know no SGLang and draw no numbers.
"""
