"""Start the shipped pair of models on servers, send requests and show the answers.

``sglang-smc demo`` is the command. The benchmarks use these modules, too.
"""
