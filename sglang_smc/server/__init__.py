"""What SGLang asks of SMC as a server starts and as requests come in."""
