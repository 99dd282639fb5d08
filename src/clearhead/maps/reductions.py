"""What can be said about a map in one pass over its tiles; each reducer sees every non-empty tile once.

Rows are summed in the map's dtype (float32 or wider), columns are carried from one query block to the next in
float64: under a strong sink a float32 column sum loses 6e-4 at 65k tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from clearhead._checks import has_numbers
from clearhead.kernels import cpu, tiles
from clearhead.kernels.gradients import Found
from clearhead.kernels.grouped import grouped_matmul
from clearhead.kernels.tiles import Tile

if TYPE_CHECKING:
    from clearhead.maps.base import AttentionMap

Measure = Callable[[Tile], Tensor]


@dataclass(frozen=True)
class Statistics:
    """What one pass over a map computes; a query that may attend to nothing has 0 everywhere."""

    entropy: Tensor  # (…, T) nats
    distance: Tensor  # (…, T) mean of |position(t) - s|, tokens
    to_first: Tensor  # (…, T) weight on key 0
    to_self: Tensor  # (…, T) weight on the query's own position
    peak: Tensor  # (…, T) the row's largest weight; 0 exactly where the query may attend to nothing
    received: Tensor  # (…, S) column sums
    received_peak: Tensor  # (…, S) column maxima


class Summed:
    """What tiles add to, each in its place; or what the largest of them is. Subclasses say `part`."""

    _leaves: ClassVar[tuple[str, ...]] = ()  # what else than the map its numbers are computed from

    def __init__(
        self, size: tuple[int, ...], like: Tensor, *, maximum: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.maximum, self._size, self._like = maximum, size, like
        self._carried = like.dtype if maximum or dtype is None else dtype

    @cached_property
    def _sum(self) -> Tensor:
        return self._like.new_zeros(self._size, dtype=self._carried)

    def part(self, tile: Tile) -> tuple[Any, Tensor]:
        """Where a tile's part belongs, and the part."""
        raise NotImplementedError

    def update(self, tile: Tile) -> None:
        at, found = self.part(tile)
        before = self._sum[at]
        self._sum[at] = torch.maximum(before, found) if self.maximum else before + found

    def take(self, result: Tensor) -> None:
        """The whole result, from who computed it without tiles."""
        self._sum = result

    @property
    def result(self) -> Tensor:
        return self._sum.to(self._like.dtype)


class PerQuery(Summed):
    """One number a query: the sum, or the maximum, of a measure over the tiles of its row. Result (…, T)."""

    def __init__(self, lead: tuple[int, ...], T: int, like: Tensor, measure: Measure, *, maximum: bool = False) -> None:
        super().__init__((*lead, T), like, maximum=maximum)
        self.measure = measure

    def part(self, tile: Tile) -> tuple[Any, Tensor]:
        return (..., tile.rows), self.measure(tile)


class PerKey(Summed):
    """One number a key: the sum (carried in float64), or the maximum, over the queries. Result (…, S)."""

    def __init__(self, lead: tuple[int, ...], S: int, like: Tensor, *, maximum: bool = False) -> None:
        super().__init__((*lead, S), like, maximum=maximum, dtype=torch.float64)

    def part(self, tile: Tile) -> tuple[Any, Tensor]:
        return (..., tile.cols), tile.weights.amax(-2) if self.maximum else tile.weights.sum(-2)


class Product(Summed):
    """A @ x for x (…, S, Dx), or (…, T, Dx) transposed; grouped heads of x are not expanded."""

    _leaves = ("_x",)

    def __init__(self, lead: tuple[int, ...], size: int, x: Tensor, like: Tensor, *, transposed: bool = False) -> None:
        both = like + x.new_empty(0)  # vmap may run over either
        super().__init__((*lead, size, x.shape[-1]), both, dtype=torch.float64 if transposed else None)
        self._x, self._transposed = x, transposed

    def part(self, tile: Tile) -> tuple[Any, Tensor]:
        weights = tile.weights.mT if self._transposed else tile.weights
        here, there = (tile.cols, tile.rows) if self._transposed else (tile.rows, tile.cols)
        return (..., here, slice(None)), grouped_matmul(weights, self._x[..., there, :])


class TopK:
    """The k largest weights of every row, as torch.topk: values and indices (…, T, k), largest first."""

    def __init__(self, lead: tuple[int, ...], T: int, k: int, like: Tensor) -> None:
        self.values = like.new_full((*lead, T, k), -1.0)
        self.indices = torch.zeros((*lead, T, k), dtype=torch.long, device=like.device)
        self.k = k

    def update(self, tile: Tile) -> None:
        best = tile.weights.topk(min(self.k, tile.weights.shape[-1]), dim=-1)
        values = torch.cat([self.values[..., tile.rows, :], best.values], -1)
        indices = torch.cat([self.indices[..., tile.rows, :], best.indices + tile.cols.start], -1)
        kept = values.topk(self.k, dim=-1)
        self.values[..., tile.rows, :] = kept.values
        self.indices[..., tile.rows, :] = indices.gather(-1, kept.indices)

    def take(self, values: Tensor, indices: Tensor) -> None:
        """The whole result, from who computed it without tiles."""
        self.values, self.indices = values, indices

    def result(self) -> tuple[Tensor, Tensor]:
        """Slots that no visible key filled hold weight 0 and index 0."""
        return self.values.clamp(min=0), self.indices


class Pool(Summed):
    """A picture of the map: bin (i, j) holds the maximum or the sum of the weights with ⌊t·R/T⌋ = i, ⌊s·C/S⌋ = j."""

    def __init__(self, lead: tuple[int, ...], T: int, S: int, size: tuple[int, int], like: Tensor, *, maximum: bool):
        super().__init__((*lead, *size), like, maximum=maximum, dtype=torch.float64)
        self._T, self._S, self.size = T, S, size

    def part(self, tile: Tile) -> tuple[Any, Tensor]:
        cols, weights = self._pool(tile.weights, tile.cols, self._S, self.size[1])
        rows, weights = self._pool(weights.mT, tile.rows, self._T, self.size[0])
        return (..., rows, cols), weights.mT

    def _pool(self, weights: Tensor, part: slice, size: int, bins: int) -> tuple[slice, Tensor]:
        """Reduce the last dimension, which covers `part` of `size`, to the bins it touches."""
        bin_of = torch.arange(part.start, part.stop, device=weights.device) * bins // size
        touched = slice(part.start * bins // size, (part.stop - 1) * bins // size + 1)
        if not self.maximum:
            one_hot = torch.nn.functional.one_hot(bin_of - touched.start, touched.stop - touched.start)
            return touched, _summed(weights, one_hot.to(weights.dtype))
        # A bin is a run of at most ⌈size/bins⌉ entries; short runs repeat their last entry, harmless to a maximum.
        first = torch.searchsorted(bin_of, torch.arange(touched.start, touched.stop, device=weights.device))
        after = torch.cat([first[1:], first.new_tensor([bin_of.numel()])])
        run = torch.arange(int((after - first).max()), device=weights.device)
        return touched, weights[..., torch.minimum(first[:, None] + run, after[:, None] - 1)].amax(-1)


def _summed(weights: Tensor, one_hot: Tensor) -> Tensor:
    """weights @ one_hot, where a NaN stays in its own bin (0 · NaN would be NaN)."""
    sums = grouped_matmul(weights, one_hot)
    if not has_numbers(sums) or bool(sums.isfinite().all()):
        return sums
    finite = weights.isfinite()
    reached = grouped_matmul((~finite).to(weights.dtype), one_hot) > 0
    return grouped_matmul(weights.where(finite, 0), one_hot).masked_fill(reached, torch.nan)


class Blocks(Summed):
    """The largest weight of each block of `side` × `side`: (…, ⌈T/side⌉, ⌈S/side⌉)."""

    def __init__(self, lead: tuple[int, ...], T: int, S: int, side: int, like: Tensor) -> None:
        super().__init__((*lead, -(-T // side), -(-S // side)), like, maximum=True)
        self.side = side

    def update(self, tile: Tile) -> None:
        """Take one tile; tiles may begin and end anywhere."""
        side, weights = self.side, tile.weights
        for row in range(tile.rows.start // side, -(-tile.rows.stop // side)):
            first, last = (max(0, n * side - tile.rows.start) for n in (row, row + 1))
            across = weights[..., first:last, :].amax(-2)  # (…, s)
            before = tile.cols.start % side
            across = torch.nn.functional.pad(across, (before, -(before + across.shape[-1]) % side))
            across = across.reshape(*across.shape[:-1], -1, side).amax(-1)
            at = slice(tile.cols.start // side, tile.cols.start // side + across.shape[-1])
            here = self._sum[..., row, at]
            torch.maximum(here, across, out=here)


class Above(cpu.Above):
    """A base of reducers that want the weights at or above `threshold` of a map (H, T, S), in rows or in tiles."""

    def forget(self) -> None:
        """The pass has come to nothing, and tiles will follow."""
        raise NotImplementedError


class Pick(Summed):
    """The weights at given (t, s), (…, N): for maps that can only give tiles."""

    def __init__(self, lead: tuple[int, ...], t: Tensor, s: Tensor, like: Tensor) -> None:
        super().__init__((*lead, t.numel()), like)
        self._t, self._s = t, s

    def part(self, tile: Tile) -> tuple[Any, Tensor]:
        inside = (self._t >= tile.rows.start) & (self._t < tile.rows.stop)
        inside &= (self._s >= tile.cols.start) & (self._s < tile.cols.stop)
        at = inside.nonzero().squeeze(-1)
        return (..., at), tile.weights[..., self._t[at] - tile.rows.start, self._s[at] - tile.cols.start]


class Collect:
    """All weights, dense: (…, T, S)."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self.dense = like.new_zeros(shape)

    def update(self, tile: Tile) -> None:
        self.dense[..., tile.rows, tile.cols] = tile.weights


@dataclass
class Reduction:
    """Reducers that share a pass over a map, as a recipe of `kernels.gradients`."""

    attn: AttentionMap
    reducers: list[Summed]
    _leaves: ClassVar[tuple[str, ...]] = ("attn", "reducers")

    def compute(self) -> tuple[Tensor, ...]:
        reducers = [copy.copy(reducer) for reducer in self.reducers]  # the graph holds these, and must hold no result
        self.attn._stream(*reducers)
        return tuple(reducer.result for reducer in reducers)

    def fixed(self) -> list[bool]:
        return [reducer.maximum for reducer in self.reducers]

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        return tiles.whole_rows(self.attn, slice(0, self.attn.shape[-2]))

    def again(self, rows: slice, keys: list[slice], grads: Sequence[Tensor | None]) -> Iterator[Found]:
        for weights, cols in zip(self.attn._whole_rows(rows, keys), keys, strict=True):
            tile = Tile(weights, rows, cols)
            for n, (reducer, grad) in enumerate(zip(self.reducers, grads, strict=True)):
                if grad is not None:
                    yield n, *reducer.part(tile)


# --- measures of a tile, each (…, t) ------------------------------------------------------------------------------


def entropy(tile: Tile) -> Tensor:
    """-Σ A ln A in nats; 0·ln 0 is 0. The floor keeps the gradient of an exact 0 finite."""
    tiny = torch.finfo(tile.weights.dtype).tiny
    return -(tile.weights * torch.threshold(tile.weights, tiny, tiny).log()).sum(-1)  # clamp's gradient is slower


def distance(positions: Tensor) -> Measure:
    """Σ A · |position(t) - s| in tokens."""
    return partial(_distance, positions)


def _distance(positions: Tensor, tile: Tile) -> Tensor:
    s = torch.arange(tile.cols.start, tile.cols.stop, device=positions.device)
    apart = (positions[tile.rows, None] - s).abs().to(tile.weights.dtype)
    return (tile.weights * apart).sum(-1)  # summed in pairs: einsum was faster, and 12 % over the error budget


def mass(chosen: Tensor) -> Measure:
    """Σ A over the keys that are chosen, by numbers (S,) that are 1 or 0."""
    return partial(_mass, chosen)


def _mass(chosen: Tensor, tile: Tile) -> Tensor:
    return (tile.weights * chosen[tile.cols]).sum(-1)


def peak(tile: Tile) -> Tensor:
    """max A."""
    return tile.weights.amax(-1)


def to_first(tile: Tile) -> Tensor:
    """A[t, 0]."""
    first: Tensor = tile.weights[..., 0]
    return first if tile.cols.start == 0 else torch.zeros_like(first)


def to_self(positions: Tensor) -> Measure:
    """A[t, position(t)]."""
    return partial(_to_self, positions)


def _to_self(positions: Tensor, tile: Tile) -> Tensor:
    at = positions[tile.rows] - tile.cols.start
    inside = (at >= 0) & (at < tile.weights.shape[-1])
    found = tile.weights[..., torch.arange(at.numel(), device=at.device), at.clamp(0, tile.weights.shape[-1] - 1)]
    return torch.where(inside, found, 0.0)
