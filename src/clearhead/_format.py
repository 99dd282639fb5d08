"""Numbers as people read them, and as JSON can hold them."""

from __future__ import annotations

import math

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def size(count: float, unit: str = "B") -> str:
    """Bytes (or what `unit` says) in decimal units, as disks and papers count them.

    >>> size(37_748_736), size(2_415_919_104), size(900), size(999_999), size(268_435_456, "FLOP"), size(4 * 10**60)
    ('37.7 MB', '2.4 GB', '900 B', '1.0 MB', '268 MFLOP', '4.0e+60 B')
    """
    if round(count) >= 10_000 * 1000 ** (len(_PREFIXES) - 1):  # without a prefix that people know
        return f"{count:.1e} {unit}"
    power = 0
    while power < len(_PREFIXES) - 1 and round(count) >= 1000:  # what would be written as 1000 takes the next unit
        power, count = power + 1, count / 1000
    whole = power == 0 or round(count, 1) >= 100
    return f"{count:.0f} {_PREFIXES[power]}{unit}" if whole else f"{count:.1f} {_PREFIXES[power]}{unit}"


def finite(value: float | None) -> float | None:
    """The value as a float; None for none, NaN and infinities, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else float(value)
