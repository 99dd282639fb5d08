"""Products of grouped heads: query head h reads key/value head h // (H/G), and K and V are never expanded.

Every product of ours is computed here or under `no_autocast`: weights and statistics are float32 or wider always.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def fold(x: Tensor, groups: int) -> Tensor:
    """(…, H, t, d) as (…, G, H/G · t, d): the query heads that share a key head, one below the other."""
    *lead, H, t, d = x.shape
    return x.reshape(*lead, groups, H // groups * t, d)


def grouped_matmul(weights: Tensor, x: Tensor) -> Tensor:
    """(…, H, t, s) @ (…, G, s, d), (…, H, t, d), in x's dtype, under autocast too."""
    weights = weights.to(x.dtype)
    with no_autocast(x.device):
        if x.ndim < 3 or x.shape[-3] == weights.shape[-3]:
            return weights @ x
        return (fold(weights, x.shape[-3]) @ x).reshape(*weights.shape[:-1], x.shape[-1])


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Without this, autocast would round the factors of float32 products to bfloat16. The meta device has none."""
    there = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if there else nullcontext()
