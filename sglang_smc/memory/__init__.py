"""Who owns which KV slot, and how many."""
