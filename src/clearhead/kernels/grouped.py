"""Products of grouped heads: query head h reads key/value head h // (H/G), and K and V are never expanded."""

from __future__ import annotations

import torch
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


def take(tensor: Tensor, dim: int, at: int | Tensor) -> Tensor:
    """One index (the dimension stays, with size 1) or several; a run of consecutive ones is a view."""
    if isinstance(at, int):
        return tensor.narrow(dim, at, 1)
    n = at.numel()
    if n and bool((at == torch.arange(n, device=at.device) + at[0]).all()):
        return tensor.narrow(dim, int(at[0]), n)
    return tensor.index_select(dim, at)


def groups_of(heads: int | Tensor, per_group: int) -> int | Tensor:
    """The key heads that these query heads read: each once if they still share evenly, else one a query head."""
    if isinstance(heads, int):
        return heads // per_group
    groups, counts = torch.unique_consecutive(heads // per_group, return_counts=True)
    return groups if counts.unique().numel() <= 1 else heads // per_group
