"""Numbers as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in decimal units, as disks and papers count them.

    >>> size(37_748_736), size(2_415_919_104), size(900)
    ('37.7 MB', '2.4 GB', '900 B')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: the last unit always returns")
