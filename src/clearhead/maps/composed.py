"""Maps made of maps."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.maps.base import AttentionMap
from clearhead.masks import Coverage

__all__ = ["HeadAverage", "average_heads"]


class HeadAverage(AttentionMap):
    """The mean over heads, (B, H, T, S) → (B, T, S): what `nn.MultiheadAttention` returns. Still lazy."""

    def __init__(self, attn: AttentionMap) -> None:
        if attn._lead_names()[-1:] != ("H",):
            raise ShapeError(f"average_heads({attn!r}): expected a map with a head dimension, (…, H, T, S).")
        self._attn = attn

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, _, T, S = self._attn.shape
        return (*lead, T, S)

    def _lead_names(self) -> tuple[str, ...]:
        return self._attn._lead_names()[:-1]

    @property
    def dtype(self) -> torch.dtype:
        return self._attn.dtype

    @property
    def device(self) -> torch.device:
        return self._attn.device

    @property
    def nbytes(self) -> int:
        return self._attn.nbytes

    @property
    def positions(self) -> Tensor:
        return self._attn.positions

    def block(self, rows: slice, cols: slice) -> Coverage:
        return self._attn.block(rows, cols)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        return self._attn.tile(rows, cols).mean(-3)


def average_heads(attn: AttentionMap) -> HeadAverage:
    """The mean over heads as a lazy map. Its rows sum to 1; its entropy is not the mean of the heads' entropies."""
    return HeadAverage(attn)
