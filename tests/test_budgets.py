"""The measuring stick itself: what it lets pass and what it does not."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.testing import assert_close, budget, pairwise

EXACT = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)


def test_a_budget_is_the_plain_error_and_the_rounding_of_a_random_walk() -> None:
    plain = EXACT.float() + torch.tensor([0.0, 0.25, 0.0])
    assert budget(EXACT, plain, terms=16) == pytest.approx(0.25 + 4 * torch.finfo(torch.float32).eps)
    assert budget(EXACT, EXACT.float(), terms=1, score=3) == pytest.approx(4 * torch.finfo(torch.float32).eps)
    assert budget(EXACT, EXACT.float(), terms=1, size=8) == pytest.approx(8 * torch.finfo(torch.float32).eps)
    assert budget(EXACT[:0], EXACT[:0].float(), terms=1) == 0
    assert budget(torch.full((2,), -math.inf), torch.full((2,), -math.inf), terms=1) == 0


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ([1.0], "expected a tensor, got list"),
        (EXACT, "dtype is torch.float64, expected torch.float32"),
        (EXACT.float()[None], r"shape is \(1, 3\), expected \(3,\)"),
        (EXACT.float() + 1e-5, "off by 1e-05, allowed 3"),
        (torch.tensor([1.0, math.nan, 0.0]), "1 entries are NaN"),
        (torch.tensor([1.0, math.inf, 0.0]), "1 entries are inf"),
        (torch.tensor([1.0, -math.inf, 0.0]), "1 entries are -inf"),
    ],
)
def test_what_does_not_pass(got: object, message: str) -> None:
    with pytest.raises(AssertionError, match=f"thing: {message}"):
        assert_close(got, EXACT, EXACT.float(), terms=9, what="thing")


def test_an_infinity_is_not_any_infinity() -> None:
    exact = torch.tensor([-math.inf, 0.0], dtype=torch.float64)
    assert_close(exact.float(), exact, exact.float(), terms=1)
    for other in (math.inf, math.nan):
        with pytest.raises(AssertionError, match="where the oracle's are not"):
            assert_close(torch.tensor([other, 0.0]), exact, exact.float(), terms=1)


def test_pairwise_of_one_factor_is_all_of_it() -> None:
    assert pairwise({"a": ["1", "2"], "b": ["x"]}) == [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}]
    assert len(pairwise({str(i): list("abcd") for i in range(8)})) < 40  # 65,536 in full
