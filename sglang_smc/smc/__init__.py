"""Compute SMC speculative decoding in pure tensor functions.

Nothing here depends on SGLang, models or memory, and no function draws random
numbers of its own: uniforms are arguments. Conventions, everywhere:

p               the target model's distribution, q the draft model's
log_weights     [..., num_particles] unnormalised, float64; -inf is a dead particle
ancestors[i]    the particle that slot i becomes a copy of
G, N, K, V      groups (requests), particles, draft tokens, vocabulary
"""
