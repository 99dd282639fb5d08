"""Text from outside, safe to print: names, texts and error messages may hold escape sequences."""

from __future__ import annotations

import unicodedata


def plain(text: str) -> str:
    """The text with control characters (escape sequences among them) made visible and harmless.

    >>> plain("a\\x1b[31mb")
    'a\\ufffd[31mb'
    """
    return "".join("\ufffd" if unicodedata.category(letter) in ("Cc", "Cs") else letter for letter in text)
