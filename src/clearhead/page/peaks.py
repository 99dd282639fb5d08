"""The matrix of every head from afar: the largest weight of each block of keys and queries, in 8 bits.

A picture of a whole map of n tokens reads n² weights; from the peaks of blocks of 16 × 16 it reads n² / 256 bytes.
A weight w is kept as round(255 √w), as everywhere on the page: the largest error is .004, at w near 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["FINEST", "encoded", "peaks_side", "picture_of"]

FINEST = 16  # keys and queries a block: from q and k, pixels of that many a side take 30 ms a tile of 256 × 256


def peaks_side(T: int, S: int, heads: int, room: int) -> int:
    """How many queries and keys a block has, a power of two: as few as keep the peaks of all heads within `room`."""
    side = FINEST
    while heads * -(-T // side) * -(-S // side) > room and side < max(T, S):
        side *= 2
    return side


def encoded(peaks: Tensor) -> NDArray[np.uint8]:
    """Peaks of weights (H, ⌈T/side⌉, ⌈S/side⌉) as bytes: round(255 √w)."""
    return peaks.cpu().float().clamp(0, 1).sqrt_().mul_(255).round_().to(torch.uint8).numpy()


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
