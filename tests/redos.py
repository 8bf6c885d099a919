"""Patterns that take a backtracking search for ever, and a text that has it try all its ways.

The shapes are those of the OWASP page on regular expression denial of service, and of Davis and
others, "The impact of regular expression denial of service in practice" (2018), over the letters of
the tiny models' texts. Each asks, besides, for a character that never comes: `re` would take 2^n
steps, or n^25, for n words.
"""

WORDS = "t3 t40 t12 t7 t33 t5 t61 t18 t2 t55 "

ENDLESS = (
    r"([a-zA-Z0-9 .=+#\n]+)+§",
    r"(\w+\s?)*§",
    r"(\S+ *)+§",
    r"(?:t?\d*\s*)*§",
    r"(\w|\w\w| )+§",
    r"(.*\d){25}§",
    r"^(([a-z0-9 ])+.)+[A-Z]([a-z])+§",
    r"(?:.*.* .*)*§",
    r"(x*\w*\s?)*§",
    r"((t\d+ )+)+§",
)
