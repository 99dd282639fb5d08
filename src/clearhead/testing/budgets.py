"""How far a result may be off: measured on the same inputs, never typed in.

    budget = max |plain - exact|  +  eps(dtype) · (√terms + score) · size

`exact` is the float64 oracle, `plain` the textbook's dense formula in the dtype of the result: a fast path may be
as wrong as the plain computation is, plus what rounding in another order adds. Rounding errors of n terms do a
random walk: each is uniform in ±eps/2 (standard deviation eps/√12), so √n · eps is three and a half standard
deviations. A weight is exp(score - lse), both rounded to eps/2 of their size: `score`, the largest of a visible
pair, counts once. `size` is that of the largest number which is rounded on the way: the result itself, where nothing
larger was (an entropy near 0 is made of weights near 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def budget(exact: Tensor, plain: Tensor, *, terms: int, score: float = 0.0, size: float = 0.0) -> float:
    """The largest allowed error of a result in `plain`'s dtype whose entries are sums of `terms` numbers."""
    rounding = torch.finfo(plain.dtype).eps * (math.sqrt(max(1, terms)) + score)
    return _largest(plain.double() - exact) + rounding * max(size, _largest(exact))


def _largest(values: Tensor) -> float:
    """The largest magnitude among the finite entries; 0 where there are none."""
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


def assert_close(
    got: object,
    exact: Tensor,
    plain: Tensor,
    *,
    terms: int,
    score: float = 0.0,
    size: float = 0.0,
    what: str = "result",
) -> None:
    """Raise AssertionError unless `got` has the right shape, dtype and device, and lies within the budget.

    It must be finite where `exact` is; `plain` has the dtype that is expected.
    """
    if not isinstance(got, Tensor):
        raise AssertionError(f"{what}: expected a tensor, got {type(got).__name__}")
    got = got.detach()
    for name in ("dtype", "device"):
        if getattr(got, name) != getattr(plain, name):
            raise AssertionError(f"{what}: {name} is {getattr(got, name)}, expected {getattr(plain, name)}")
    if got.shape != exact.shape:
        raise AssertionError(f"{what}: shape is {tuple(got.shape)}, expected {tuple(exact.shape)}")
    _assert_same_infinities(got, exact, what)
    error, allowed = _largest(got.double() - exact), budget(exact, plain, terms=terms, score=score, size=size)
    if error > allowed:
        raise AssertionError(f"{what}: off by {error:.3g}, allowed {allowed:.3g}")


def _assert_same_infinities(got: Tensor, exact: Tensor, what: str) -> None:
    for name, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = int((test(got) != test(exact)).sum())
        if wrong:
            raise AssertionError(f"{what}: {wrong} entries are {name} where the oracle's are not, or the reverse")
