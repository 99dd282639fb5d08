"""Maps made of maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead._checks import span
from clearhead.errors import ShapeError
from clearhead.maps.base import AttentionMap, Derived, Selection, Uniform
from clearhead.masks import Coverage

__all__ = ["HeadAverage", "OneSequence", "Stitched", "average_heads"]


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

    def _row_sums(self) -> Tensor:
        return self._attn._row_sums().mean(-2)

    def uniform(self) -> Uniform:
        return Uniform(HeadAverage(self._attn.uniform()))  # heads may see different keys: those that any head sees


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

    def _of(self, attn: AttentionMap) -> OneSequence:
        return OneSequence(attn)


@dataclass(frozen=True)
class _Part:
    """Some rows of a stitched map: whose they are, and where they lie."""

    attn: AttentionMap
    rows: slice
    cols: slice
    _leaves: ClassVar[tuple[str, ...]] = ("attn",)

    def within(self, rows: slice, cols: slice) -> tuple[slice, slice]:
        """What of a block lies in here, in this map's own numbers; empty ranges where nothing does."""
        return _clipped(rows, self.rows), _clipped(cols, self.cols)


class Stitched(AttentionMap):
    """One map made of row blocks, each over a range of its keys: what a model computes while it generates.

    A prompt of n tokens is a block of n rows on n keys, each step that follows is one row on one key more. Keys
    outside a block's range have weight 0 in its rows.

    Args:
        parts: maps (…, t, s) that differ in t and s alone; their queries follow one another.
        starts: where the keys of each part begin among all keys; 0 for every part by default.

    Cost: that of the parts, and nothing else is held.

    >>> from clearhead.maps import SoftmaxMap
    >>> x = torch.zeros(3, 4)
    >>> Stitched([SoftmaxMap(x[:2], x[:2]), SoftmaxMap(x[2:], x)]).to_dense()
    tensor([[0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """

    _leaves: ClassVar[tuple[str, ...]] = ("_parts",)

    def __init__(self, parts: Sequence[AttentionMap], starts: Sequence[int] | None = None) -> None:
        starts = [0] * len(parts) if starts is None else starts
        if not parts or len(parts) != len(starts) or min(starts) < 0 or len({part.shape[:-2] for part in parts}) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts) or "none"
            raise ShapeError(
                f"Stitched(parts of shapes {shapes}; starts={list(starts)}): expected maps (…, t, s) that differ in t"
                " and s alone, and for each the number of its first key."
            )
        self._parts: list[_Part] = []
        for part, start in zip(parts, starts, strict=True):
            T, S = part.shape[-2:]
            t = self._parts[-1].rows.stop if self._parts else 0
            self._parts.append(_Part(part, slice(t, t + T), slice(start, start + S)))

    @property
    def parts(self) -> tuple[AttentionMap, ...]:
        """The row blocks."""
        return tuple(part.attn for part in self._parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._parts[0].attn.shape[:-2], self._parts[-1].rows.stop, max(p.cols.stop for p in self._parts))

    @property
    def dtype(self) -> torch.dtype:
        return self._parts[0].attn.dtype

    @property
    def device(self) -> torch.device:
        return self._parts[0].attn.device

    @property
    def nbytes(self) -> int:
        """Bytes held; the keys that several parts see are counted once."""
        held: dict[int, int] = {}
        for tensor in self._tensors():
            held[tensor.data_ptr()] = max(tensor.nbytes, held.get(tensor.data_ptr(), 0))
        return sum(held.values())

    @property
    def positions(self) -> Tensor:
        return torch.cat([part.attn.positions + part.cols.start for part in self._parts])

    @property
    def heads_alike(self) -> bool:
        return all(part.attn.heads_alike for part in self._parts)

    def _lead_names(self) -> tuple[str, ...]:
        return self._parts[0].attn._lead_names()

    def _tensors(self) -> Iterator[Tensor]:
        for part in self._parts:
            yield from part.attn._tensors()

    def _notes(self) -> list[str]:
        return [f"{len(self._parts)} blocks of rows"]

    # --- reading, part by part ------------------------------------------------------------------------------------

    def tile(self, rows: slice, cols: slice) -> Tensor:
        T, S = self.shape[-2:]
        rows, cols = span("tile: rows", rows, T), span("tile: cols", cols, S)
        tiles = [self._tile(part, *part.within(rows, cols), cols) for part in self._over(rows)]
        return torch.cat(tiles, -2) if tiles else self.like.new_zeros((*self.shape[:-2], 0, cols.stop - cols.start))

    def _tile(self, part: _Part, rows: slice, inside: slice, cols: slice) -> Tensor:
        """A part's weights in these columns of the whole; its keys among them are `inside`."""
        if inside.start >= inside.stop:
            return self.like.new_zeros((*self.shape[:-2], rows.stop - rows.start, cols.stop - cols.start))
        before, after = inside.start + part.cols.start - cols.start, cols.stop - inside.stop - part.cols.start
        return F.pad(part.attn.tile(rows, inside), (before, after))

    def block(self, rows: slice, cols: slice) -> Coverage:
        if cols.stop <= cols.start:
            return Coverage.EMPTY
        found = {self._coverage(part, *part.within(rows, cols), cols) for part in self._over(rows)}
        return found.pop() if len(found) == 1 else Coverage.MIXED if found else Coverage.EMPTY

    def _coverage(self, part: _Part, rows: slice, inside: slice, cols: slice) -> Coverage:
        coverage = part.attn.block(rows, inside)
        whole = inside.stop - inside.start == cols.stop - cols.start
        return coverage if whole else min(coverage, Coverage.MIXED)

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        t, s = self._pairs(t, s)
        shape, t, s = t.shape, t.reshape(-1), s.reshape(-1)
        found, weights = [], []
        for part in self._parts:
            here = (t >= part.rows.start) & (t < part.rows.stop) & (s >= part.cols.start) & (s < part.cols.stop)
            at = here.nonzero().squeeze(-1)
            if at.numel():
                found.append(at)
                weights.append(part.attn.pick(t[at] - part.rows.start, s[at] - part.cols.start))
        picked = self.like.new_zeros((*self.shape[:-2], t.numel()))
        picked = picked.index_copy(-1, torch.cat(found), torch.cat(weights, -1)) if found else picked
        return picked.reshape((*self.shape[:-2], *shape))

    def columns(self, keys: Tensor) -> Tensor:
        parts = [self._columns(part, keys) for part in self._parts if part.rows.stop > part.rows.start]
        return torch.cat(parts, -2) if parts else self.like.new_zeros((*self.shape[:-2], 0, keys.numel()))

    def _columns(self, part: _Part, keys: Tensor) -> Tensor:
        inside = (keys >= part.cols.start) & (keys < part.cols.stop)
        columns = self.like.new_zeros((*self.shape[:-2], part.rows.stop - part.rows.start, keys.numel()))
        at = inside.nonzero().squeeze(-1)
        return columns.index_copy(-1, at, part.attn.columns(keys[at] - part.cols.start)) if at.numel() else columns

    def uniform(self) -> Stitched:
        """The head that spreads evenly over the keys it may see: the baseline of every score of a head."""
        return self._of([part.attn.uniform() for part in self._parts])

    def _select(self, lead: tuple[int | Tensor, ...], rows: Tensor | None) -> AttentionMap:
        """Batches and heads are selected in each part, so that nothing else is computed."""
        chosen = self._of([part.attn._select(lead, None) for part in self._parts])
        everything = tuple(torch.arange(n, device=self.device) for n in chosen.shape[:-2])
        return chosen if rows is None else Selection(chosen, everything, rows)

    def _of(self, maps: list[AttentionMap]) -> Stitched:
        return Stitched(maps, [part.cols.start for part in self._parts])

    def _over(self, rows: slice) -> Iterator[_Part]:
        """The parts that hold some of these rows."""
        return (part for part in self._parts if part.rows.start < rows.stop and rows.start < part.rows.stop)


def _clipped(asked: slice, own: slice) -> slice:
    """What of a range lies in another, counted from the other's start; empty at 0 where nothing does."""
    start, stop = max(asked.start, own.start), min(asked.stop, own.stop)
    return slice(start - own.start, stop - own.start) if start < stop else slice(0, 0)
