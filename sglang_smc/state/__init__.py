"""What the device knows of requests, as tables by request row."""
