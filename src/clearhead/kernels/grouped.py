"""Products of grouped heads: query head h reads key/value head h // (H/G), and K and V are never expanded."""

from __future__ import annotations

from torch import Tensor


def fold(x: Tensor, groups: int) -> Tensor:
    """(…, H, t, d) as (…, G, H/G · t, d): the query heads that share a key head, one below the other."""
    *lead, H, t, d = x.shape
    return x.reshape(*lead, groups, H // groups * t, d)


def grouped_matmul(weights: Tensor, x: Tensor) -> Tensor:
    """(…, H, t, s) @ (…, G, s, d), (…, H, t, d)."""
    weights = weights.to(x.dtype)
    if x.ndim < 3 or x.shape[-3] == weights.shape[-3]:
        return weights @ x
    return (fold(weights, x.shape[-3]) @ x).reshape(*weights.shape[:-1], x.shape[-1])
