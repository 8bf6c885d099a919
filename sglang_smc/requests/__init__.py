"""What the host knows of one request, and the rules that its text obeys."""
