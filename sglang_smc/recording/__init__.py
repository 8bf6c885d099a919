"""Device work that is recorded once, as CUDA graphs, and replayed: how, how much of it, of what."""
