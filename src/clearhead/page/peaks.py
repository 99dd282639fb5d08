"""The matrix of every head from afar: the largest weight of each block of keys and queries, in 8 bits.

A picture of a whole map of n tokens reads n² weights; from the peaks of blocks of 16 × 16 it reads n² / 256 bytes.
A weight w is kept as round(255 √w), as everywhere on the page: the largest error is .004, at w near 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from clearhead.page.strong import TileLike

__all__ = ["FINEST", "Peaks", "peaks_side", "picture_of"]

FINEST = 16  # keys and queries a block: from q and k, pixels of that many a side take 30 ms a tile of 256 × 256


def peaks_side(T: int, S: int, heads: int, room: int) -> int:
    """How many queries and keys a block has, a power of two: as few as keep the peaks of all heads within `room`."""
    side = FINEST
    while heads * -(-T // side) * -(-S // side) > room and side < max(T, S):
        side *= 2
    return side


class Peaks:
    """A reducer: the largest weight of each block of `side` × `side` of a map (H, T, S)."""

    def __init__(self, heads: int, T: int, S: int, side: int) -> None:
        self.side = side
        self._most = torch.zeros(heads, -(-T // side), -(-S // side))

    def update(self, tile: TileLike) -> None:
        """Take one tile; tiles may begin and end anywhere."""
        side, weights = self.side, tile.weights
        for row in range(tile.rows.start // side, -(-tile.rows.stop // side)):
            first, last = (max(0, min(t, weights.shape[-2])) for t in _within(row, side, tile.rows.start))
            across = weights[:, first:last].amax(1)  # (H, s)
            before = tile.cols.start % side
            across = F.pad(across, (before, -(before + across.shape[-1]) % side))
            across = across.reshape(len(across), -1, side).amax(-1)
            at = slice(tile.cols.start // side, tile.cols.start // side + across.shape[-1])
            here = self._most[:, row, at]
            torch.maximum(here, across.to(here), out=here)

    def result(self) -> NDArray[np.uint8]:
        """(H, ⌈T/side⌉, ⌈S/side⌉): round(255 √w)."""
        return self._most.clamp(0, 1).sqrt_().mul_(255).round_().to(torch.uint8).numpy()


def _within(row: int, side: int, start: int) -> tuple[int, int]:
    return row * side - start, (row + 1) * side - start


def picture_of(peaks: NDArray[np.uint8], rows: slice, cols: slice, by: int) -> NDArray[np.float32]:
    """The weights (R, C) behind some peaks (T', S'), `by` × `by` of them a pixel."""
    part = peaks[rows, cols]
    missing = [(0, -n % by) for n in part.shape]
    if any(more for _, more in missing):
        part = np.pad(part, missing)
    part = part.reshape(-1, by, part.shape[1]).max(1)  # whole rows at once: by columns first it takes 20 times as long
    part = part.reshape(len(part), -1, by).max(2)
    weights: NDArray[np.float32] = np.square(part.astype(np.float32) / np.float32(255))
    return weights
