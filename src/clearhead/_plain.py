"""Text from outside, safe to print and to draw: names, texts and errors may hold escape sequences."""

from __future__ import annotations

import unicodedata


def plain(text: str) -> str:
    """The text with control characters (escape sequences among them) made visible and harmless.

    >>> plain("a\\x1b[31mb")
    'a\\ufffd[31mb'
    """
    return "".join("\ufffd" if unicodedata.category(letter) in ("Cc", "Cs") else letter for letter in text)


def shown(token: str) -> str:
    """A token as a label: without the space before it, white space and the rest of a cut character as signs.

    >>> shown(" the"), shown("\\n"), shown("  "), shown(""), shown("\\ufffd")
    ('the', '⏎', '␣␣', '∅', '┊')
    """
    if token in ("", "\ufffd"):
        return "┊" if token else "∅"
    words = token.strip()
    if not words and len(token) >= 4 and not token.strip(" "):
        return f"␣×{len(token)}"
    visible = plain((words or token).replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", "⇥"))
    return visible if words else "".join("␣" if letter.isspace() else letter for letter in visible)
