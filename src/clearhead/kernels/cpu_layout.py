"""Where scores lie in a block: the keys that some rows may see, range by range, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from clearhead.kernels.tiles import Bounded, split
from clearhead.masks import Coverage

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEP = 64  # a range begins at a multiple of it, and its place is filled up to one
QUESTIONS = 64  # ranges that a mask leaves partly visible are told apart down to this part of all keys, or to STEP
NO_SPOTS = np.zeros((0, 3), np.int64)


@dataclass(frozen=True)
class Layout:
    """A block of rows and the ranges of keys that some of them may see."""

    rows: slice
    runs: NDArray[np.int64]  # (n, 4): first column, column after the last, first key, how many keys
    spots: NDArray[np.int64]  # (n, 3): first column of a partly visible range, how many keys, how many before it
    partly: list[slice]  # the keys of those ranges

    @property
    def height(self) -> int:
        """How many rows."""
        return int(self.rows.stop - self.rows.start)

    @property
    def width(self) -> int:
        """How many columns."""
        return int(self.runs[-1, 1]) if len(self.runs) else 0

    def hidden(self, of: Callable[[slice, slice], Tensor]) -> NDArray[np.bool_]:
        """The mask of the partly visible ranges side by side, (rows, m), or (rows · heads, m) where heads differ.

        `of(rows, cols)` is that of one range, (h or 1, t or 1, s or 1).
        """
        if not self.partly:
            return np.zeros((self.height, 0), bool)
        parts = [of(self.rows, cols).numpy() for cols in self.partly]
        heads = max(len(part) for part in parts)
        sizes = [(heads, self.height, cols.stop - cols.start) for cols in self.partly]
        wide = [np.broadcast_to(part, size) for part, size in zip(parts, sizes, strict=True)]
        return np.concatenate(wide, -1).swapaxes(0, 1).reshape(self.height * heads, -1)


@dataclass
class Layouts:
    """The rows of a map in blocks of at most `height`, and of at most `scores` scores a head unless it is so low."""

    bounded: Bounded
    interval: tuple[NDArray[np.int64], NDArray[np.int64]] | None  # each query's first key, and the one after its last
    T: int
    S: int
    height: int
    lowest: int
    scores: int
    _known: dict[int, list[Layout]] = field(default_factory=dict)

    @property
    def widest(self) -> int:
        """No block has more columns."""
        return self.S + STEP * (QUESTIONS + 1)

    def __len__(self) -> int:
        return -(-self.T // self.height)

    def __getitem__(self, n: int) -> list[Layout]:
        """Block n, in one piece or in several; found out when it is first asked for."""
        if n not in self._known:  # two threads may ask at once, and find the same
            start = n * self.height
            self._known[n] = list(self._pieces(slice(start, min(start + self.height, self.T))))
        return self._known[n]

    def _pieces(self, rows: slice) -> Iterator[Layout]:
        layout = self._ranges(rows) if self.interval is None else self._range(rows, *self.interval)
        if layout.height <= self.lowest or layout.height * layout.width <= self.scores:
            yield layout
        else:
            for half in split(rows, -(-layout.height // 2)):
                yield from self._pieces(half)

    def _range(self, rows: slice, first: NDArray[np.int64], after: NDArray[np.int64]) -> Layout:
        """All keys from the first to the last that a row sees; each row's own ends are known."""
        key, end = int(first[rows].min()), int(after[rows].max())
        runs = [(0, -(-(end - key) // STEP) * STEP, key, end - key)] if end > key else []
        return Layout(rows, np.array(runs, np.int64).reshape(-1, 4), NO_SPOTS, [])

    def _ranges(self, rows: slice) -> Layout:
        runs: list[list[int]] = []
        spots: list[list[int]] = []
        partly: list[slice] = []
        before = 0
        for cols, coverage in self._seen(rows, slice(0, self.S)):
            count = cols.stop - cols.start
            if not runs or runs[-1][2] + runs[-1][3] < cols.start:
                column = runs[-1][1] if runs else 0
                runs.append([column, column, cols.start, 0])
            run = runs[-1]
            if coverage is Coverage.MIXED:
                spots.append([run[0] + run[3], count, before])
                partly.append(cols)
                before += count
            run[3] += count
            run[1] = run[0] + -(-run[3] // STEP) * STEP
        return Layout(rows, np.array(runs, np.int64).reshape(-1, 4), np.array(spots, np.int64).reshape(-1, 3), partly)

    def _seen(self, rows: slice, cols: slice) -> Iterator[tuple[slice, Coverage]]:
        """What of a range of keys some of the rows may see, in ranges that are as long as all of the rows see them."""
        step = STEP * -(-self.S // (STEP * QUESTIONS))
        coverage, length = self.bounded.block(rows, cols), cols.stop - cols.start
        if coverage is Coverage.FULL or (coverage is Coverage.MIXED and length <= step):
            yield cols, coverage
        elif coverage is Coverage.MIXED:
            middle = cols.start + -(-length // (2 * step)) * step
            yield from self._seen(rows, slice(cols.start, middle))
            yield from self._seen(rows, slice(middle, cols.stop))
