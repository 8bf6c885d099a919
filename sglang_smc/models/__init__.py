"""Two models run over particles."""
