"""What breaks on another release of SGLang, told from its source alone: `make upstream`."""
