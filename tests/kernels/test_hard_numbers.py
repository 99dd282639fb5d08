"""Numbers that are not finite or very large, in queries, keys and biases: every kernel says what the dense weights say.

A row that sees NaN, or a score of +inf, has no weights: NaN where it sees, and exactly 0 where the mask hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead import SoftmaxMap, masks
from clearhead.kernels.path import force
from clearhead.maps.pictures import block_picture

N, AT = 24, torch.arange(24)
SEEN = AT[:, None] >= AT
X = torch.linspace(-1, 1, 2 * N).reshape(N, 2)
KEYS = AT % 2 == 0


def pooled(a: Tensor, maximum: bool) -> Tensor:
    blocks = a.unflatten(-1, (3, 8)).unflatten(-3, (3, 8)).transpose(-2, -3).flatten(-2)
    return blocks.amax(-1) if maximum else blocks.sum(-1)


# Each reading, and the same of dense weights.
READINGS: dict[str, tuple[Callable[[SoftmaxMap], Tensor], Callable[[Tensor], Tensor]]] = {
    "to_dense": (lambda m: m.to_dense(), lambda a: a),
    "entropy": (lambda m: m.entropy(), lambda a: torch.special.entr(a).sum(-1)),
    "distance": (lambda m: m.distance(), lambda a: (a * (AT[:, None] - AT).abs()).sum(-1)),
    "received": (lambda m: m.received(), lambda a: a.sum(-2)),
    "to_first": (lambda m: m.statistics().to_first, lambda a: a[..., 0]),
    "to_self": (lambda m: m.statistics().to_self, lambda a: a.diagonal(0, -2, -1)),
    "peak": (lambda m: m.statistics().peak, lambda a: a.amax(-1)),
    "received_peak": (lambda m: m.statistics().received_peak, lambda a: a.amax(-2)),
    "mass": (lambda m: m.mass(KEYS), lambda a: a[..., KEYS].sum(-1)),
    "topk": (lambda m: m.topk(3)[0], lambda a: a.topk(3).values),
    "pool_max": (lambda m: m.pool_max((3, 3)), lambda a: pooled(a, True)),
    "pool_sum": (lambda m: m.pool_sum((3, 3)), lambda a: pooled(a, False)),
    "block_picture": (lambda m: block_picture(m, slice(0, N), slice(0, N), 8), lambda a: pooled(a, True)),
    "@": (lambda m: m @ X, lambda a: a @ X.double()),
    "mT @": (lambda m: m.mT @ X, lambda a: a.mT @ X.double()),
    "pick": (lambda m: m.pick(AT, AT.flip(0)), lambda a: a[..., AT, AT.flip(0)]),
    "a few": (lambda m: m.pick([20, -1], 3), lambda a: a[..., [20, -1], 3]),
    "a row": (lambda m: m[..., 20, :], lambda a: a[..., 20, :]),
    "a column": (lambda m: m[..., 20], lambda a: a[..., 20]),
}


def dense(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Each score by itself: in a product of matrices NaN · 0 may not."""
    scores = (q.double()[:, :, :, None] * k.double().repeat_interleave(2, 1)[:, :, None]).sum(-1) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(scores == -math.inf, 0)


def inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, N, 8, generator=g), torch.randn(2, 2, N, 8, generator=g)


@pytest.mark.parametrize("kernel", ["tiles", "cpu", "fused"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("where", ["a query", "a key"])
@pytest.mark.parametrize(
    "mask", ["causal", *(pytest.param(name, marks=pytest.mark.full) for name in ("dense", "none"))]
)
def test_every_reading(kernel: str, bad: float, where: str, mask: str) -> None:
    q, k = inputs()
    (q if where == "a query" else k)[:, :, 11, 3] = bad
    scattered = torch.rand(N, N, generator=torch.Generator().manual_seed(1)) > 0.5
    seen = {"causal": SEEN, "dense": scattered, "none": torch.ones(N, N, dtype=torch.bool)}[mask]
    rule = {"causal": masks.causal(), "dense": scattered, "none": None}[mask]
    exact = dense(q, k, seen)
    attn = SoftmaxMap(q, k, mask=rule)
    for name, (read, of) in READINGS.items():
        with force(kernel):
            for got in (read(SoftmaxMap(q, k, mask=rule)), read(attn)):  # of one map, with what was found on the way
                torch.testing.assert_close(got.double(), of(exact), rtol=0, atol=1e-4, equal_nan=True, msg=name)


@pytest.mark.parametrize("kernel", ["tiles", "cpu", "fused"])
@pytest.mark.parametrize("factor", [1e4, 1e12, 1e30])
def test_scores_far_from_0_leave_weights_between_0_and_1(kernel: str, factor: float) -> None:
    """No exponential of a difference that rounding has made large; the largest weight of a row is all of it."""
    q, k = inputs()
    exact = dense(q.double() * factor, k, SEEN)
    inexact = ("pick", "a few", "a column", "mass", "block_picture")  # one by one, off by eps · score
    for name, (read, of) in READINGS.items():
        with force(kernel):
            got = read(SoftmaxMap(q * factor, k, mask=masks.causal())).double()
        if name not in inexact:
            torch.testing.assert_close(got, of(exact), rtol=0, atol=1e-3, msg=f"{name}: {got - of(exact)}")
        elif name != "mass":
            assert ((got >= 0) & (got <= 1)).all(), name


@pytest.mark.parametrize("kernel", ["tiles", "cpu", "fused"])
def test_the_log_sum_exp_of_a_row_that_sees_nothing_is_its_sink(kernel: str) -> None:
    (q, k), sinks = inputs(), torch.tensor([0.5, -2.0, 30.0, 0.0])
    seen = SEEN & (AT > 2)
    for mask in (seen, torch.zeros_like(seen)):
        exact = dense(q, k, mask)
        with force(kernel):
            attn = SoftmaxMap(q, k, mask=mask, sinks=sinks)
            entropy, lse = attn.entropy(), attn.lse
        torch.testing.assert_close(lse[..., :3], sinks[:, None].expand(2, 4, 3))
        assert (entropy[..., :3] == 0).all()
        assert (attn.to_dense()[exact == 0] == 0).all()
