"""A running server in a terminal, a line for each replica and for each request that runs."""
