"""Relations: for a token sequence, which keys a query is expected to attend to.

A relation is a mask rule (true = expected), so it draws itself and knows its empty blocks. A head's score for it is
the weight on the expected keys, averaged over the queries that have any. "mat cat mat cat" under a causal mask:

>>> from clearhead.masks import causal
>>> ids = torch.tensor([5, 7, 5, 7])
>>> print((same_token(ids) & causal()).draw(4, 4))
⬚ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ⬚
■ ⬚ ⬚ ⬚
⬚ ■ ⬚ ⬚
>>> print((induction(ids) & causal()).draw(4, 4))
⬚ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ⬚
⬚ ■ ⬚ ⬚
⬚ ⬚ ■ ⬚
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import ShapeError
from clearhead.kernels.tiles import Tile, visible_runs
from clearhead.maps.base import AttentionMap
from clearhead.masks import FOREVER, Band, Coverage, MaskRule

__all__ = [
    "LateReceived",
    "RelationMass",
    "aligned",
    "far",
    "induction",
    "local",
    "near_patches",
    "previous",
    "same_token",
    "to_self",
]


def previous() -> MaskRule:
    """The token just before the query."""
    return Band(1, 2, "previous()")


def to_self() -> MaskRule:
    """The query token itself."""
    return Band(0, 1, "to_self()")


def local() -> MaskRule:
    """Keys 2 to 8 tokens away, on either side."""
    return Band(2, 9, "2 to 8 back") | Band(-8, -1, "2 to 8 ahead")


@dataclass(frozen=True, eq=False)
class Aligned(MaskRule):
    """The keys about as far through their text as the query is through its own: at most a tenth of it away."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        along = q * (S - 1) / max(1, T - 1)
        return (k - along).abs() <= max(1.0, S / 10)

    def __repr__(self) -> str:
        return "aligned()"


def aligned() -> MaskRule:
    """Of cross-attention: the keys about as far through the source as the query is through the target.

    >>> print(aligned().draw(3, 6))
    ■ ■ ⬚ ⬚ ⬚ ⬚
    ⬚ ⬚ ■ ■ ⬚ ⬚
    ⬚ ⬚ ⬚ ⬚ ■ ■
    """
    return Aligned()


@dataclass(frozen=True, eq=False)
class NearPatch(MaskRule):
    """Other patches of an image at most two rows and two columns away; tokens that are no patches have none."""

    first: int
    rows: int
    columns: int

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        (y, x, inside), (other_y, other_x, also) = self._place(q + S - T), self._place(k)
        near = ((y - other_y).abs() <= 2) & ((x - other_x).abs() <= 2)
        return near & inside & also & (k != q + S - T)

    def _place(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        patch = token - self.first
        inside = (patch >= 0) & (patch < self.rows * self.columns)
        return patch // self.columns, patch % self.columns, inside

    def __repr__(self) -> str:
        return f"near_patches({self.first}, {self.rows}, {self.columns})"


def near_patches(first: int, rows: int, columns: int) -> MaskRule:
    """Of an image in patches, row by row, the first of which is token number `first`: those one or two away."""
    return NearPatch(first, rows, columns)


def far(distance: int) -> MaskRule:
    """Keys at least `distance` tokens away, on either side."""
    return Band(distance, FOREVER, f"{distance} back") | Band(-FOREVER, 1 - distance, f"{distance} ahead")


@dataclass(frozen=True, eq=False)
class SameToken(MaskRule):
    """key ≠ query, and `shift` tokens before the key stands a copy of the query token."""

    ids: Tensor  # (S,)
    shift: int

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        ids, at = self.ids.to(k.device), q + S - T
        copy = k - self.shift
        return (ids[at] == ids[copy.clamp(min=0)]) & (copy >= 0) & (copy != at) & (k != at)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if self.ids.shape != (S,):
            raise ShapeError(f"token ids: expected one per key, ({S},), got {tuple(self.ids.shape)}.")

    def __repr__(self) -> str:
        return f"{'induction' if self.shift else 'same_token'}({self.ids.numel()} tokens)"


def same_token(ids: Tensor) -> MaskRule:
    """Other copies of the query token (earlier ones, under a causal mask): a duplicate-token head."""
    return SameToken(_ids(ids), 0)


def induction(ids: Tensor) -> MaskRule:
    """The token after another copy of the query token (Olsson et al. 2022)."""
    return SameToken(_ids(ids), 1)


def _ids(ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.is_floating_point():
        raise ShapeError(f"a relation takes the token ids of a sequence, an integer tensor (S,), got {describe(ids)}.")
    return ids


def _whole(attn: AttentionMap) -> tuple[int, int]:
    """T and S of a map whose queries are the last T positions: relations are between tokens, not between rows."""
    T, S = attn.shape[-2:]
    if not torch.equal(attn.positions, torch.arange(S - T, S, device=attn.device)):
        raise ShapeError(f"relations need every query: {attn!r} is a selection; measure the whole map, then select.")
    return T, S


class RelationMass:
    """A reducer: for every query, the weight on the keys a relation expects. Result (…, T)."""

    def __init__(self, attn: AttentionMap, relation: MaskRule) -> None:
        T, S = _whole(attn)
        self.result = attn.like.new_zeros(attn.shape[:-1])
        relation.check(1, 1, T, S)
        self._bound = relation.bind(T, S)
        self._one = torch.zeros(1, dtype=torch.long, device=attn.device)

    def update(self, tile: Tile) -> None:
        for cols in visible_runs(self._bound, tile.rows, tile.cols):
            self._add(tile, cols)

    def _add(self, tile: Tile, cols: slice) -> None:
        weights = tile.weights[..., cols.start - tile.cols.start : cols.stop - tile.cols.start]
        if self._bound.block(tile.rows, cols) is Coverage.FULL:
            self.result[..., tile.rows] += weights.sum(-1)
            return
        t, s = self._bound.tile(tile.rows, cols, self._one, self._one)[0, 0].nonzero(as_tuple=True)
        self.result.index_add_(-1, t + tile.rows.start, weights[..., t, s])


class LateReceived:
    """A reducer: what each key receives from queries at least `distance` away. Result (…, S), float64 sums.

    With `count=True`, how many such queries give it any weight: of a uniform head, how many may see it.
    """

    def __init__(self, attn: AttentionMap, distance: int, *, count: bool = False) -> None:
        T, S = _whole(attn)
        self.result = attn.like.new_zeros((*attn.shape[:-2], S), dtype=torch.float64)
        self._near, self._count = (~far(distance)).bind(T, S), count
        self._one = torch.zeros(1, dtype=torch.long, device=attn.device)

    def update(self, tile: Tile) -> None:
        weights = (tile.weights > 0).to(tile.weights.dtype) if self._count else tile.weights
        self.result[..., tile.cols] += weights.sum(-2)
        for cols in visible_runs(self._near, tile.rows, tile.cols):
            t, s = self._near.tile(tile.rows, cols, self._one, self._one)[0, 0].nonzero(as_tuple=True)
            near = weights[..., t, s + cols.start - tile.cols.start]
            self.result.index_add_(-1, s + cols.start, -near.to(torch.float64))
