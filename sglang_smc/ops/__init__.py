"""Provide the small operations of a round, as torch functions or Triton kernels."""
