"""Tallies: how many numbers there were, their sum, least, most and histogram; merged in any order, the same bits.

A sum is a whole number of units of 2⁻¹⁶⁰, kept as a Python integer: no float32 number has a bit below that, so nothing
is rounded before the mean is read; of a float64 number what lies below is dropped, which is the same in any order too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["BINS", "MEASURES", "Measure", "Tally", "added", "exact_sum"]

BINS = 256
LIMBS, LIMB = 6, 32  # numbers are read 32 bits at a time: one limb before the point, and five after it
UNIT_BITS = (LIMBS - 1) * LIMB
AT_ONCE = 1 << 20  # as many limbs add up to less than 2⁵³: exact in float64, in any order


@dataclass(frozen=True)
class Measure:
    """One number a query: its unit, and how the 256 bins of its histogram divide what it can be.

    "share": [0, 1] evenly; "nats": [0, ln window] evenly; "tokens": ln(1 + d) in [0, ln window] evenly.
    """

    unit: str

    def place(self, values: Tensor, window: int) -> Tensor:
        """Where values stand between the first bin's start, 0, and the last one's end, 1."""
        if self.unit == "share":
            return values
        return (values if self.unit == "nats" else values.log1p()) / math.log(max(2, window))

    def edges(self, window: int) -> Tensor:
        """The ends of the bins, (257,) float64."""
        even = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
        if self.unit == "share":
            return even
        even = even * math.log(max(2, window))
        return even if self.unit == "nats" else even.expm1()


MEASURES: Mapping[str, Measure] = {
    "entropy": Measure("nats"),
    "distance": Measure("tokens"),
    "first": Measure("share"),
    "self": Measure("share"),
    "previous": Measure("share"),
    "peak": Measure("share"),
}


def exact_sum(values: Tensor) -> Any:
    """Σ values over the last dimension, in units of 2⁻¹⁶⁰: an array of Python integers.

    Args: values: (…, n), each in [0, 2³²).

    >>> int(exact_sum(torch.tensor([0.5, 2.0**-149])[None])[0]) == 2**159 + 2**11
    True
    """
    parts = [_sum_of_few(some) for some in torch.split(values.double(), AT_ONCE, -1)]
    return sum(parts[1:], parts[0])


def _sum_of_few(values: Tensor) -> Any:
    rest, whole = values.clone(), torch.empty_like(values)
    total: Any = 0
    for _ in range(LIMBS):
        torch.floor(rest, out=whole)
        rest.sub_(whole).mul_(2.0**LIMB)  # exact: a difference of neighbours, and a power of two
        total = total * (1 << LIMB) + whole.sum(-1).long().numpy().astype(object)
    return total


class Tally:
    """For each of some measures and heads, (M, H), what was counted.

    count: how many numbers, int64; total: their sums, integers in units of 2⁻¹⁶⁰; least and most, float64, ∞ and -∞ of
    none; histogram: (M, H, 256) int64.
    """

    def __init__(self, count: Any, total: Any, least: Any, most: Any, histogram: Any) -> None:
        self.count, self.total, self.least, self.most, self.histogram = count, total, least, most, histogram

    @classmethod
    def of(cls, values: Tensor, window: int) -> Tally:
        """The tally of values (M, H, n) of all measures, NaN where there is none.

        Cost: about ten passes over the values.
        """
        values = values.double()
        absent = values.isnan()
        known = values.masked_fill(absent, 0)
        return cls(
            (~absent).sum(-1).numpy(),
            exact_sum(known),
            values.masked_fill(absent, math.inf).amin(-1).numpy(),
            values.masked_fill(absent, -math.inf).amax(-1).numpy(),
            _histogram(known, ~absent, window).numpy(),
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.count + other.count,
            self.total + other.total,
            np.minimum(self.least, other.least),
            np.maximum(self.most, other.most),
            self.histogram + other.histogram,
        )

    @property
    def mean(self) -> Any:
        """(M, H) float64: the sum over the count, rounded once; NaN of none."""
        pairs = zip(self.total.flat, self.count.flat, strict=True)
        means = [int(total) / (int(count) << UNIT_BITS) if count else math.nan for total, count in pairs]
        return np.array(means).reshape(self.count.shape)

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold, nothing of it rounded: sums as text, None for the least and most of no numbers."""
        return {
            "count": self.count.tolist(),
            "total": [[f"{total:x}" for total in row] for row in self.total.tolist()],
            "least": [[_known(x) for x in row] for row in self.least.tolist()],
            "most": [[_known(x) for x in row] for row in self.most.tolist()],
            "histogram": self.histogram.tolist(),
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Tally:
        """The tally that `as_dict` told of."""
        return cls(
            np.array(told["count"], np.int64),
            np.array([[int(total, 16) for total in row] for row in told["total"]], object),
            np.array([[math.inf if x is None else x for x in row] for row in told["least"]], np.float64),
            np.array([[-math.inf if x is None else x for x in row] for row in told["most"]], np.float64),
            np.array(told["histogram"], np.int64),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tally) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]


def added(some: Sequence[Tally], more: Sequence[Tally]) -> tuple[Tally, ...]:
    """The tallies of both, layer by layer."""
    return tuple(a + b for a, b in zip(some, more, strict=True))


def _known(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _histogram(values: Tensor, there: Tensor, window: int) -> Tensor:
    """(M, H, 256): how many values lie in each bin."""
    places = torch.stack([m.place(x, window) for m, x in zip(MEASURES.values(), values, strict=True)])
    bins = (places * BINS).long().clamp_(0, BINS - 1)
    M, H = values.shape[:2]
    bins += torch.arange(M * H).view(M, H, 1) * BINS
    return torch.bincount(bins[there], minlength=M * H * BINS).view(M, H, BINS)
