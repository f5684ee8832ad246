"""Whole numbers out of text that nobody checked: logs, arguments, environments.

Python refuses to convert more than 4300 digits, and `str.isdigit` also holds for `²`. Patterns that find a number take
18 digits of it at most, for the same reason.
"""

_MOST_DIGITS = 18  # Unix time in nanoseconds has 19, and is read by nobody here


def whole(text: str) -> int | None:
    """The number that `text` is, in ASCII digits without a sign. None for anything else, and for one too long to mean
    anything."""
    return int(text) if len(text) <= _MOST_DIGITS and text.isascii() and text.isdigit() else None
