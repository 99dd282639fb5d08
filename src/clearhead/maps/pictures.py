"""A part of a map as a picture: each pixel is the largest, or the sum, of the weights under it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead._checks import check_count, span
from clearhead.kernels import tiles
from clearhead.maps.base import AttentionMap
from clearhead.maps.scored import Scored, is_precise

__all__ = ["block_picture"]

AT_ONCE = 1 << 20  # scores: 4 MB. Measured (one head, 4,096 × 4,096 pairs): 2¹⁹ … 2²¹ within 10 %.


@torch.no_grad()
def block_picture(attn: AttentionMap, rows: slice, cols: slice, side: int, *, maximum: bool = True) -> Tensor:
    """The weights of some queries on some keys, `side` × `side` of them a pixel.

    Args: rows, cols: slices with start and stop. maximum: the largest weight under a pixel, or the sum.
    Returns (…, ⌈rows/side⌉, ⌈cols/side⌉), the map's dtype; pixel (0, 0) begins at the first query and key, the last
    row and column may stand for fewer weights.
    Cost: one product of queries and keys over the part that the mask leaves; where the weights follow from scores, an
    exponential a pixel and not a weight: the largest score of a row is that of its largest weight.

    >>> from clearhead.maps import DenseMap
    >>> block_picture(DenseMap(torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0]])), slice(0, 2), slice(0, 3), 2)
    tensor([[1., 0.]])
    """
    check_count("block_picture", "side", side, at_least=1)
    rows, cols = span("block_picture: rows", rows, attn.shape[-2]), span("block_picture: cols", cols, attn.shape[-1])
    size = [-(-(part.stop - part.start) // side) for part in (rows, cols)]
    picture = attn.like.new_zeros((*attn.shape[:-2], *size))
    for part, keys in _blocks(attn, rows, cols, side):
        i, j = (part.start - rows.start) // side, (keys.start - cols.start) // side
        found = _peaks(attn, part, keys, side) if maximum else _pooled(attn.tile(part, keys), side, maximum=False)
        before = picture[..., i : i + found.shape[-2], j : j + found.shape[-1]]
        before.copy_(torch.maximum(before, found) if maximum else before + found)
    return picture


def _blocks(attn: AttentionMap, rows: slice, cols: slice, side: int) -> Iterator[tuple[slice, slice]]:
    """Some whole rows of pixels, or a part of one, with the keys from the first to the last that they may see."""
    width = max(1, math.prod(attn.shape[:-2]) * (cols.stop - cols.start))
    height = max(1, AT_ONCE // width)
    for band in tiles.split(rows, max(side, height // side * side)):
        for part in tiles.split(band, max(height, side) if height >= side else height):
            runs = tiles.visible_runs(attn, part, cols)
            if runs:
                start = cols.start + (runs[0].start - cols.start) // side * side
                yield part, slice(start, runs[-1].stop)


def _peaks(attn: AttentionMap, rows: slice, cols: slice, side: int) -> Tensor:
    """The largest weight under each pixel of a block."""
    if not isinstance(attn, Scored) or not is_precise(lse := attn._lse_of(rows)):
        return _pooled(attn.tile(rows, cols), side, maximum=True)
    scores = attn._scores(rows, cols)
    scores = scores.sub_(lse.masked_fill(lse == -math.inf, 0)[..., None])
    return attn._shown(_pooled(scores, side, maximum=True).exp_())


def _pooled(values: Tensor, side: int, *, maximum: bool) -> Tensor:
    """(…, t, s) → (…, ⌈t/side⌉, ⌈s/side⌉); a block lower than one pixel is a row of pixels."""
    t, s = values.shape[-2:]
    high = min(side, t)
    if s % side or t % high:
        values = F.pad(values, (0, -s % side, 0, -t % high), value=-math.inf if maximum else 0.0)
    *lead, t, s = values.shape
    values = values.reshape(*lead, t // high, high, s)  # queries first: whole rows of keys are compared at once
    values = values.amax(-2) if maximum else values.sum(-2)
    values = values.reshape(*lead, t // high, s // side, side)
    return values.amax(-1) if maximum else values.sum(-1)
