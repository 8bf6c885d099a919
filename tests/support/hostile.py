"""Text that a terminal or a reader of a log must not get as it is."""

# Clears the screen, sets the clipboard, rings, begins a line, turns the direction, has no width.
HOSTILE = "\x1b[2J\x1b]52;c;AA==\x07\n2026 INFO done\r\u202e\u200b\x9b\ud800"
