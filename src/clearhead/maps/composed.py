"""Maps made of maps."""

from __future__ import annotations

from math import prod

from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.maps.base import AttentionMap, Derived

__all__ = ["HeadAverage", "OneSequence", "average_heads"]


class HeadAverage(Derived):
    """The mean over heads, (B, H, T, S) → (B, T, S): what `nn.MultiheadAttention` returns. Still lazy."""

    def __init__(self, attn: AttentionMap) -> None:
        super().__init__(attn)
        if attn._lead_names()[-1:] != ("H",):
            raise ShapeError(f"average_heads({attn!r}): expected a map with a head dimension, (…, H, T, S).")

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, _, T, S = self._attn.shape
        return (*lead, T, S)

    def _lead_names(self) -> tuple[str, ...]:
        return self._attn._lead_names()[:-1]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        return self._attn.tile(rows, cols).mean(-3)

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        return self._attn.pick(t, s).mean(len(self.shape) - 2)


def average_heads(attn: AttentionMap) -> HeadAverage:
    """The mean over heads as a lazy map. Its rows sum to 1; its entropy is not the mean of the heads' entropies."""
    return HeadAverage(attn)


class OneSequence(Derived):
    """The map (T, S) or (H, T, S) of one sequence as a batch of one, (1, H, T, S)."""

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, T, S = self._attn.shape
        return (1, prod(lead), T, S)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        weights = self._attn.tile(rows, cols)
        return weights.reshape(1, self.shape[1], *weights.shape[-2:])

    def _lead_names(self) -> tuple[str, ...]:
        return ("B", "H")
