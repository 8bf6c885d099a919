"""What a server and a request may choose."""
