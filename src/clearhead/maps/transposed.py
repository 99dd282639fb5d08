"""A map turned over: the products of keys with what queries hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import ShapeError

if TYPE_CHECKING:
    from clearhead.maps.base import AttentionMap


class Transposed:
    """Aᵀ as an operator: `attn.mT @ y`."""

    def __init__(self, attn: AttentionMap) -> None:
        self.mT = attn

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, S, T)."""
        *lead, T, S = self.mT.shape
        return (*lead, S, T)

    def __matmul__(self, y: Tensor) -> Tensor:
        """Aᵀ @ y for y (…, T, Dy); returns (…, S, Dy). Differentiable. Tiles are summed over queries in float64."""
        if isinstance(y, Tensor) and y.ndim > 2 and len(self.shape) > 2 and y.shape[-3] not in (1, self.shape[-3]):
            raise ShapeError(f"attn.mT @ y with {describe(y)}: there are {self.shape[-3]} query heads, y must have so.")
        y = self.mT._operand(y, self.mT.shape[-2], "attn.mT @ y", "T")
        return self.mT._product(y, transposed=True)

    def __repr__(self) -> str:
        return f"{self.mT!r}.mT"
