"""Define the options of a server and of a request."""
