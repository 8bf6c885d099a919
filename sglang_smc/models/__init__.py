"""Run the target and the draft over particles: forwards, attention, and CUDA graph capture."""
