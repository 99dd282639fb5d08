"""The strong weights of one layer: every weight at or above a threshold, as rows of (key, 8-bit value).

A weight w is kept as round(255 √w): one byte, largest error .004 (at w near 1), and small weights survive.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from clearhead.maps.reductions import Above

__all__ = ["THRESHOLD", "Strong", "StrongWeights", "floor_of", "level_of"]

THRESHOLD = 0.004  # what the text pane tints anyway: a weaker weight cannot be seen


def level_of(threshold: float) -> int:
    """The byte of a weight at the threshold: round(255 √threshold)."""
    return int(np.rint(255 * np.sqrt(threshold)))


def floor_of(level: int) -> float:
    """The smallest weight whose byte is `level`: ((level - ½) / 255)²."""
    return float(((level - 0.5) / 255) ** 2)


class TileLike(Protocol):
    """A block of weights, as the streaming loop of the maps hands it to a reducer."""

    @property
    def weights(self) -> Any: ...  # (H, t, s) tensor, float32 or wider
    @property
    def rows(self) -> slice: ...
    @property
    def cols(self) -> slice: ...


@dataclass(frozen=True)
class StrongWeights:
    """What `Strong` kept: heads one after another, in each its rows, in each row its keys in rising order.

    counts: (H, T) int32, how many weights each row kept.
    keys, values: (N,) the keys, and round(255 √w); N = counts.sum().
    level: the smallest byte kept. threshold: the smallest weight kept.
    """

    counts: NDArray[np.int32]
    keys: NDArray[np.integer[Any]]
    values: NDArray[np.uint8]
    level: int
    threshold: float

    def head(self, h: int) -> tuple[NDArray[np.int32], NDArray[np.integer[Any]], NDArray[np.uint8]]:
        """The counts (T,), keys and values of head h. Cost: O(H), no copy."""
        ends = np.cumsum(self.counts.sum(1, dtype=np.int64))
        part = slice(int(ends[h - 1]) if h else 0, int(ends[h]))
        return self.counts[h], self.keys[part], self.values[part]


class _Part(NamedTuple):
    """The strong weights of one tile."""

    rows: slice
    heads: slice
    first_key: int
    counts: NDArray[np.int32]  # (H, t)
    keys: NDArray[np.integer[Any]]
    values: NDArray[np.uint8]


class Strong(Above):
    """A reducer: keeps every weight ≥ threshold of a map (H, T, S), and raises the threshold when too many arrive.

    Args: threshold: a weight. limit: how many weights it may hold; then the level rises by itself, so that
    memory stays below about 4 bytes × limit. One reducer serves one layer, so a caller with 30 layers gives
    each a thirtieth of what all may hold.

    Cost: one comparison and one scan per weight; everything else is proportional to what is kept.
    """

    def __init__(self, threshold: float = THRESHOLD, *, limit: int = 2_000_000) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"Strong(threshold={threshold!r}): a threshold is a weight above 0 and below 1")
        if limit < 1:
            raise ValueError(f"Strong(limit={limit!r}): the limit is a number of weights, at least 1")
        self._least, self.limit, self._taking = threshold, limit, threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Nothing was shown."""
        self.level, self.threshold, self._rose = level_of(self._least), self._least, False
        self._parts: list[_Part] = []
        self._held = 0
        self._tally = np.zeros(256, np.int64)  # of all that came at the level of its time, or above

    def update(self, tile: TileLike) -> None:
        """Take one tile. Tiles may come in any order; each block of the map comes once."""
        index, weights, (heads, t, s) = _select(tile.weights, self.threshold)
        row, key = np.divmod(index, s)
        counts = np.bincount(row, minlength=heads * t).reshape(heads, t).astype(np.int32)
        narrow = np.uint16 if tile.cols.stop <= 1 << 16 else np.int32
        heads_ = slice(0, heads)
        keys = (key + tile.cols.start).astype(narrow)
        self._add(_Part(tile.rows, heads_, tile.cols.start, counts, keys, _bytes(weights)))

    def take_some(self, rows: slice, heads: slice, counts: Any, keys: Any, weights: Any) -> None:
        """Take the weights of whole rows that a compiled pass has chosen."""
        narrow = np.uint16 if not len(keys) or keys.max() < 1 << 16 else np.int32
        part = _Part(rows, heads, 0, counts, keys.astype(narrow), _bytes(weights))
        with self._taking:
            self._add(part if not self._rose else _above(part, self.level))

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self._tally += np.bincount(part.values, minlength=256)
        self._held += len(part.values)
        if self._held > self.limit:
            self._raise_level()

    def result(self) -> StrongWeights:
        """What was kept, put in order. It takes the place of the parts, so that nothing is held twice."""
        if self._rose:  # once more, so that the order in which weights came says nothing
            self._raise_level()
        if len(self._parts) != 1 or self._parts[0].rows.start or self._parts[0].heads.start:
            self._parts = [_joined(self._parts)]
        whole = self._parts[0]
        return StrongWeights(whole.counts, whole.keys, whole.values, self.level, self.threshold)

    def _raise_level(self) -> None:
        """Raise the level until three quarters of the limit are held, so that it seldom has to rise."""
        at_least = np.cumsum(self._tally[::-1])[::-1]
        fits = np.flatnonzero(at_least <= 0.75 * self.limit)
        self._rose, self.level = True, max(self.level, int(fits[0]) if len(fits) else 256)
        self.threshold = floor_of(self.level)
        self._parts = [_above(part, self.level) for part in self._parts]
        self._held = sum(len(part.values) for part in self._parts)


def _select(weights: Any, threshold: float) -> tuple[NDArray[np.int64], NDArray[np.float32], tuple[int, int, int]]:
    """Flat indices and values of the weights ≥ threshold, and the shape (H, t, s)."""
    shape = tuple(weights.shape)
    flat = weights.detach().reshape(-1)
    if flat.device.type != "cpu":  # select there: the tile is large, what is strong is little
        where = (flat >= threshold).nonzero().squeeze(1)
        return where.cpu().numpy(), flat[where].float().cpu().numpy(), shape
    found = flat.numpy()
    index = np.flatnonzero(found >= threshold)
    return index, found[index], shape


def _bytes(weights: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = np.minimum(np.rint(255 * np.sqrt(weights)), 255).astype(np.uint8)
    return found


def _above(part: _Part, level: int) -> _Part:
    """The part without the values below the level."""
    keep = part.values >= level
    row = np.repeat(np.arange(part.counts.size), part.counts.reshape(-1))[keep]
    counts = np.bincount(row, minlength=part.counts.size).reshape(part.counts.shape).astype(np.int32)
    return part._replace(counts=counts, keys=part.keys[keep], values=part.values[keep])


def _joined(parts: list[_Part]) -> _Part:
    """All parts as one that starts at row 0 and key 0, ordered by head, row and key."""
    if not parts:
        nothing = np.zeros(0, np.uint8)
        return _Part(slice(0, 0), slice(0, 0), 0, np.zeros((0, 0), np.int32), nothing.astype(np.uint16), nothing)
    parts = sorted(parts, key=lambda part: (part.rows.start, part.first_key))
    H, T = max(part.heads.stop for part in parts), max(part.rows.stop for part in parts)
    counts = np.zeros((H, T), np.int32)
    for part in parts:
        counts[part.heads, part.rows] += part.counts
    return _Part(slice(0, T), slice(0, H), 0, counts, *_in_order(parts, counts))


def _in_order(parts: list[_Part], counts: NDArray[np.int32]) -> tuple[NDArray[np.integer[Any]], NDArray[np.uint8]]:
    """Scatter the parts, sorted by row and key block, to their places by head, row and key."""
    ends = np.cumsum(counts.reshape(-1), dtype=np.int64).reshape(counts.shape)
    place = ends - counts  # where the next weight of each row goes
    keys = np.empty(int(counts.sum()), max((part.keys.dtype for part in parts), key=lambda d: d.itemsize))
    values = np.empty(len(keys), np.uint8)
    for part in parts:
        within = np.cumsum(part.counts.reshape(-1), dtype=np.int64).reshape(part.counts.shape) - part.counts
        to = np.repeat((place[part.heads, part.rows] - within).reshape(-1), part.counts.reshape(-1))
        to += np.arange(len(to))
        keys[to], values[to] = part.keys, part.values
        place[part.heads, part.rows] += part.counts
    return keys, values
