"""Hold the state of requests: tables on the device by request row, and records on the host."""
