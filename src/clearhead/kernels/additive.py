"""The scores of additive attention, block by block: tanh makes a number of each (query, key, feature)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.kernels.grouped import fold, no_autocast
from clearhead.kernels.tiles import TILE_ELEMENTS

FEW = 1 << 18  # up to here (a decoder's step) keeping the values of tanh is cheaper than computing them again


def scores(q: Tensor, k: Tensor, score: Tensor) -> Tensor:
    """score · tanh(q_t + k_s) for q (B, H, t, A), k (B, G, s, A), score (A,); (B, H, t, s).

    At most TILE_ELEMENTS numbers are held at once, and few are kept for the backward pass, which computes them again.
    """
    (B, H, t, A), (_, G, s, _) = q.shape, k.shape
    width = max(1, min(s, TILE_ELEMENTS // max(1, B * G * A)))
    height = max(1, TILE_ELEMENTS // max(1, B * G * A * width))
    rows, cols = torch.split(fold(q, G), height, 2), torch.split(k, width, 2)
    if len(rows) == len(cols) == 1 and B * H * t * s * A <= FEW:
        return _part(rows[0], cols[0], score).reshape(B, H, t, s)
    parts = [torch.cat([_again(part, some, score) for some in cols], -1) for part in rows]
    return torch.cat(parts, 2).reshape(B, H, t, s)


def _part(q: Tensor, k: Tensor, score: Tensor) -> Tensor:
    with no_autocast(q.device):
        return torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ score


def _again(q: Tensor, k: Tensor, score: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _part(q, k, score)
    return checkpoint(_part, q, k, score, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
