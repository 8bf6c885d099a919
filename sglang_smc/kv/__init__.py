"""Account for the KV slots of requests and particles, and for the memory of rounds."""
