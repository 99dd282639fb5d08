"""Tallies: exact sums, and the same bits in whatever order parts are merged."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.heads.tally import AT_ONCE, BINS, LIMB, LIMBS, MEASURES, Tally, exact_sum

M, WINDOW = len(MEASURES), 64
UNIT = Fraction(1, 2 ** ((LIMBS - 1) * LIMB))


def numbers(n: int, seed: int = 0, *, heads: int = 2) -> torch.Tensor:
    """Shares over forty orders of magnitude, some of them 0, some left out."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(M, heads, n, generator=g) * 10 ** (-40 * torch.rand(M, heads, n, generator=g))
    x[torch.rand(x.shape, generator=g) < 0.1] = 0
    return x.masked_fill(torch.rand(x.shape, generator=g) < 0.1, math.nan)


@given(st.lists(st.floats(0, 2**32, exclude_max=True, width=32), max_size=20))
def test_a_sum_of_float32_is_the_sum_of_rational_numbers(values: list[float]) -> None:
    (found,) = exact_sum(torch.tensor(values, dtype=torch.float32)[None])
    assert int(found) * UNIT == sum(map(Fraction, values), Fraction(0))


def test_a_sum_of_many_is_exact_too() -> None:
    x = torch.full((1, AT_ONCE + 3), 1 - 2.0**-24)
    assert int(exact_sum(x)[0]) * UNIT == (AT_ONCE + 3) * Fraction(2**24 - 1, 2**24)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 200), max_size=6), st.randoms())
def test_parts_merge_in_any_order_to_the_tally_of_all(seed: int, cuts: list[int], random: object) -> None:
    x = numbers(200, seed)
    ends = [0, *sorted(cuts), 200]
    parts = [Tally.of(x[..., a:b], WINDOW) for a, b in pairwise(ends) if a < b]
    random.shuffle(parts)  # type: ignore[attr-defined]
    while len(parts) > 1:  # and in any grouping
        at = random.randrange(len(parts) - 1)  # type: ignore[attr-defined]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    assert parts[0] == Tally.of(x, WINDOW)


def test_counts_means_and_extremes() -> None:
    x = numbers(100).double()
    tally = Tally.of(x, WINDOW)
    there = ~x.isnan()
    assert tally.count.tolist() == there.sum(-1).tolist()
    assert tally.mean == pytest.approx((x.nansum(-1) / there.sum(-1)).numpy(), rel=1e-14)
    assert tally.least.tolist() == x.nan_to_num(math.inf).amin(-1).tolist()
    assert tally.most.tolist() == x.nan_to_num(-1).amax(-1).tolist()


def test_histograms_count_each_number_between_its_edges() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(M, 1, 500, generator=g, dtype=torch.float64)
    for m, measure in enumerate(MEASURES.values()):
        x[m] *= measure.edges(WINDOW)[-1]
    tally = Tally.of(x, WINDOW)
    for m, (name, measure) in enumerate(MEASURES.items()):
        expected, _ = np.histogram(x[m, 0].numpy(), measure.edges(WINDOW).numpy())
        assert tally.histogram[m, 0].tolist() == expected.tolist(), name


def test_what_rounding_puts_outside_goes_to_the_last_bin() -> None:
    tally = Tally.of(torch.full((M, 1, 1), 1e6), WINDOW)
    assert tally.histogram[..., BINS - 1].tolist() == [[1]] * M


def test_nothing_is_counted_of_nothing() -> None:
    tally = Tally.of(torch.full((M, 1, 3), math.nan), WINDOW)
    assert tally.count.sum() == tally.histogram.sum() == 0
    assert np.isnan(tally.mean).all()
    x = Tally.of(numbers(50, heads=1), WINDOW)
    assert tally + x == x


def test_json_keeps_every_bit() -> None:
    tally = Tally.of(numbers(100), WINDOW) + Tally.of(torch.full((M, 2, 1), math.nan), WINDOW)
    assert Tally.from_dict(json.loads(json.dumps(tally.as_dict(), allow_nan=False))) == tally
