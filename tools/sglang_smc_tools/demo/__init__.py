"""Start the shipped pair of models on servers, send requests and show the answers.

``sglang-smc demo`` is the command. Benchmarks and checks start their servers with `serving`, too.
"""
