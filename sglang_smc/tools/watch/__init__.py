"""Show a running server in a terminal, a line for each replica and running request."""
