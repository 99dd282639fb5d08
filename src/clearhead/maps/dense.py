"""DenseMap: weights that somebody already has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import DTypeError, ShapeError
from clearhead.maps.base import AttentionMap

__all__ = ["DenseMap"]

EMPTY_TUPLE = (
    "DenseMap got an empty tuple. That is what output_attentions=True returns when the model runs a fused kernel"
    " (sdpa, flash, flex), which never stores the weights. Either record the model as it is,"
    " `with clearhead.record(model) as recording: model(**inputs)`, or reload it with attn_implementation='eager'."
)


class DenseMap(AttentionMap):
    """A map over weights of shape (T, S), (H, T, S) or (B, H, T, S), a tensor or an array; nothing is copied.

    The tuple that `output_attentions=True` returns, one (B, H, T, S) tensor a layer, makes a map of (L, B, H, T, S).
    Weights are read as float32 or wider; negative or NaN weights are taken as they are. `v`, the values (B, G, S, Dv)
    beside weights (B, H, T, S), is kept for those who multiply them.

    >>> DenseMap(torch.eye(3)).entropy()
    tensor([0., 0., 0.])
    """

    _leaves: ClassVar[tuple[str, ...]] = ("_layers",)

    def __init__(self, weights: Any, *, v: Tensor | None = None) -> None:
        layers = list(weights) if isinstance(weights, (tuple, list)) else None
        self._layers = [_as_weights(w) for w in (layers if layers is not None else [weights])]
        if not self._layers:
            raise ShapeError(EMPTY_TUPLE)
        self._stacked = layers is not None
        _check_layers(self._layers, stacked=self._stacked)
        self.v = v

    @property
    def shape(self) -> tuple[int, ...]:
        one = tuple(self._layers[0].shape)
        return (len(self._layers), *one) if self._stacked else one

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self._layers[0].dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self._layers[0].device

    def _tensors(self) -> Iterator[Tensor]:
        return iter(self._layers)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        parts = [w[..., rows, cols].to(self.dtype) for w in self._layers]
        return torch.stack(parts) if self._stacked else parts[0]

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        t, s = self._pairs(t, s)
        parts = [w[..., t, s].to(self.dtype) for w in self._layers]
        return torch.stack(parts) if self._stacked else parts[0]

    def _select(self, lead: tuple[int | Tensor, ...], rows: Tensor | None) -> AttentionMap:
        if self._stacked and isinstance(lead[0], int):  # of one layer, without reading the others
            return DenseMap(self._layers[lead[0]])._select(lead[1:], rows)
        return super()._select(lead, rows)


def _as_weights(weights: Any) -> Tensor:
    if weights is None:
        raise DTypeError(EMPTY_TUPLE.replace("an empty tuple", "None for a layer's weights"))
    if not isinstance(weights, Tensor):
        array = np.asarray(weights)
        weights = torch.as_tensor(array if array.flags.writeable else array.copy())
    tensor: Tensor = weights
    if not tensor.is_floating_point():
        raise DTypeError(f"DenseMap({describe(tensor)}): expected floating-point weights.")
    return tensor


def _check_layers(layers: list[Tensor], *, stacked: bool) -> None:
    first = layers[0]
    if not 2 <= first.ndim <= 4:
        raise ShapeError(
            f"DenseMap({describe(first)}): expected weights (T, S), (H, T, S) or (B, H, T, S), or the tuple of"
            " (B, H, T, S) tensors that output_attentions gives."
        )
    if stacked and any(w.shape != first.shape for w in layers):
        shapes = ", ".join(str(tuple(w.shape)) for w in layers)
        raise ShapeError(f"DenseMap(tuple): every layer must have one shape, got {shapes}. Make one DenseMap a layer.")
