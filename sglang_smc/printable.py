"""Escape foreign text before it is printed to a terminal or a log."""


def printable(value: object) -> str:
    """Return a value's text with escapes for characters that affect a terminal or a log line.

    These are the characters that `str.isprintable` rejects: controls and newlines, direction marks,
    zero-width characters, lone surrogates. The text is a single line.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(value)
    )
