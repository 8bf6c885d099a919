"""Text of others, before it reaches a terminal or a log."""


def printable(value: object) -> str:
    """Return a value's text with escapes for what a terminal or a log line would act on.

    These are the characters that `str.isprintable` denies: controls and newlines, marks of
    direction, zero-width ones, halves of surrogate pairs. All of it stays on one line.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(value)
    )
