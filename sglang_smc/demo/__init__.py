"""The shipped pair of models on servers: what starts them, asks them and shows their answers.

``sglang-smc demo`` is the command. The benchmarks start and ask their servers with this, too.
"""
