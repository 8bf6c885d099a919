"""Start SMC servers in SGLang, and validate their arguments and requests."""
