"""Sizes as people read them: every size in the unit in which it is written shortest."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead._format import finite, size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.0 kB"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (999_999, "1.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (999_999_999_999, "1.0 TB"),
        (5_000_000_000_000_000, "5.0 PB"),
        (5 * 10**21, "5000 EB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@given(st.integers(0, 999 * 10**12))
def test_a_size_has_at_most_three_digits_before_the_point_and_is_near(count: int) -> None:
    number, unit = size(count).split()
    assert re.fullmatch(r"\d{1,2}\.\d|\d{1,3}", number)
    back = float(number) * 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit)
    assert math.isclose(back, count, rel_tol=0.051)


def test_what_json_does_not_have_is_none() -> None:
    assert [finite(x) for x in (None, math.nan, math.inf, -math.inf, 1)] == [None, None, None, None, 1.0]
