"""What follows from an attention kernel that also returns each row's log-sum-exp; no weight is ever stored.

Of A = softmax(scale · Q Kᵀ, masked), which the kernel multiplies with any X:

    entropy     H[t] = lse[t] - scale · q[t] · (A K)[t]
    transposed  Aᵀ Y is attention of K on Q, with -lse[t] added to the scores of t: one more feature of q, with a 1 in
                k. Its rows do not sum to 1 but to Σ_t A[t, s], whose logarithm is its own log-sum-exp.
    distance    A s is the mean position of the keys; where none lies ahead, the distance is what is left to t.

Where a kernel does not know the mask by itself, it is called for each block of rows: once on the keys that all of
them see, and once, under a small mask, on those that only some see; the log-sum-exps then say what each is worth.
Learned sinks, which take a part of each row's weight, scale a row by e^(lse without them - lse with them).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.kernels import aten, tiles
from clearhead.kernels.fused import side_by_side
from clearhead.kernels.tiles import Bounded
from clearhead.masks import Coverage

# Measured (causal, cut up like any rule, against one call that knows the mask): 256 rows 1.25 of the time, 512 1.32.
BLOCK = 256
Values = Callable[[slice], Tensor]  # what is averaged in a block of rows, (B or 1, H or G or 1, S, Dx)


@dataclass(frozen=True)
class Source:
    """What identities need to know of softmax(scale · Q Kᵀ + added); where `added` is -inf, nothing is seen."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    scale: float
    bounded: Bounded
    added: Callable[[slice, slice], Tensor]  # of some rows and keys, (B or 1, H or 1, t, s)
    copies: int = 1  # how many (batch entry, head) pairs have numbers of their own there
    is_moved: bool = False  # whether more is added than -inf
    is_whole: bool = False  # whether a kernel knows what is visible: everything, or with `is_causal` s <= t
    is_causal: bool = False

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A X and lse, (B, H, T, Dx) and (B, H, T), in one call where that can be."""
        if not self.is_whole:
            return self.attend_in_blocks(lambda rows: x)
        return aten.attend(self.q, self.k, x, scale=self.scale, is_causal=self.is_causal)

    def attend_in_blocks(self, values: Values) -> tuple[Tensor, Tensor]:
        """The same of other numbers for each block of rows."""
        parts = [self._block(rows, values(rows)) for rows in self.blocks()]
        out, lse = zip(*parts, strict=True)
        return torch.cat(out, 2), torch.cat(lse, 2)

    def blocks(self) -> list[slice]:
        """The rows in blocks, so low that no mask is larger than a tile."""
        height = min(BLOCK, tiles.TILE_ELEMENTS // (self.k.shape[2] * self.copies))
        return list(tiles.split(slice(0, self.q.shape[2]), max(1, height)))

    def _block(self, rows: slice, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys that all of the rows see in one call, the others under a small mask in another."""
        runs = tiles.visible_runs(self.bounded, rows, slice(0, self.k.shape[2]))
        partly = runs
        if not self.is_moved:
            partly = [part for run in runs for part in tiles.partial_runs(self.bounded, rows, run)]
        fully = _without(runs, partly)
        found = [self._of_keys(rows, keys, x, is_masked=keys is partly) for keys in (fully, partly) if keys]
        if not found:
            lead = self.q.shape[0], max(self.q.shape[1], self.k.shape[1]), rows.stop - rows.start
            return x.new_zeros(*lead, x.shape[-1]), x.new_full(lead, -math.inf)
        return _together(*found) if len(found) > 1 else found[0]

    def _of_keys(self, rows: slice, keys: list[slice], x: Tensor, *, is_masked: bool) -> tuple[Tensor, Tensor]:
        q, k, x = self.q[:, :, rows], side_by_side(self.k, keys), side_by_side(x, keys)
        if not is_masked:
            return aten.attend(q, k, x, scale=self.scale)
        added = torch.cat([self.added(rows, some) for some in keys], -1)
        out, lse = aten.attend(q, k, x, scale=self.scale, added=added)
        nothing = (added == -math.inf).all(-1)
        return out.masked_fill(nothing[..., None], 0), lse.masked_fill(nothing, -math.inf)

    def turned(self, lse: Tensor) -> Source:
        """Keys on queries, (B, H, S, T): its row sums, e^lse, are the column sums of A."""
        ones, flip = self.k.new_ones(1).expand(*self.k.shape[:3], 1), self.is_whole and self.is_causal
        known = lse.masked_fill(lse == -math.inf, 0)[..., None]  # who sees nothing is hidden from every key
        k, q = torch.cat([self.k, ones], -1), torch.cat([self.q * self.scale, -known], -1)
        return replace(
            self,
            q=k.flip(2) if flip else k,  # flipped, s <= t is t <= s
            k=q.flip(2) if flip else q,
            scale=1.0,
            bounded=_Turned(self.bounded),
            added=lambda keys, rows: self.added(rows, keys).mT,
        )


@dataclass(frozen=True)
class _Turned:
    """Queries as keys."""

    bounded: Bounded

    def block(self, rows: slice, cols: slice) -> Coverage:
        return self.bounded.block(cols, rows)


def _without(runs: list[slice], parts: list[slice]) -> list[slice]:
    """What is left of the runs; both are in order, and each part lies in one of the runs."""
    left = []
    for run in runs:
        start = run.start
        for part in parts:
            if run.start <= part.start < run.stop:
                left.append(slice(start, part.start))
                start = part.stop
        left.append(slice(start, run.stop))
    return [some for some in left if some.start < some.stop]


def _together(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention on two sets of keys as attention on both."""
    lse = torch.logaddexp(one[1], other[1])
    shift = lse.masked_fill(lse == -math.inf, 0)
    shares = [torch.exp(some - shift)[..., None] for _, some in (one, other)]
    return (one[0] * shares[0]).addcmul_(other[0], shares[1]), lse


def entropy(source: Source, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Entropy and lse, (B, H, T)."""
    mean_key, alone = source.attend(source.k)
    lse, share = with_sinks(alone, sinks)
    score = (source.q * mean_key).sum(-1) * source.scale
    return (share * (lse.masked_fill(lse == -math.inf, 0) - score)).clamp(min=0), lse


def product(source: Source, x: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """A X and lse, (B, H, T, Dx) and (B, H, T)."""
    out, alone = source.attend(x)
    lse, share = with_sinks(alone, sinks)
    return out if sinks is None else out * share[..., None], lse


def distance(source: Source, positions: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ_s A · (position(t) - s) and lse, (B, H, T).

    What is averaged is told from the first row of each block: from a row far along, near keys could not be told apart.
    """
    s = torch.arange(source.k.shape[2], device=source.k.device)
    out, alone = source.attend_in_blocks(
        lambda rows: (positions[rows.start] - s).to(source.k.dtype)[None, None, :, None]
    )
    onward = torch.cat([positions[rows] - positions[rows.start] for rows in source.blocks()])
    lse, share = with_sinks(alone, sinks)
    return share * (out[..., 0] + onward), lse


def transposed_product(source: Source, y: Tensor, lse: Tensor) -> Tensor:
    """Aᵀ Y, (B, H, S, Dy)."""
    turned, flip = source.turned(lse), source.is_whole and source.is_causal
    out, log = turned.attend(y.flip(2) if flip else y)
    product = out * log.exp()[..., None]
    return product.flip(2) if flip else product


def received(source: Source, lse: Tensor) -> Tensor:
    """Σ_t A, (B, H, S)."""
    turned, flip = source.turned(lse), source.is_whole and source.is_causal
    total = turned.attend(turned.k)[1].exp()
    return total.flip(2) if flip else total


def with_sinks(alone: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """lse (B, H, T) once the sinks (H,) have joined, and the share of the weight that they leave; 0 of no weight."""
    lse = alone if sinks is None else torch.logaddexp(alone, sinks.to(alone.dtype)[:, None].expand_as(alone))
    return lse, torch.exp(alone - lse.masked_fill(lse == -math.inf, 0))
