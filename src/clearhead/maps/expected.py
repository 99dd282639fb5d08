"""Weights on expected keys: of each query, some of the keys, wherever they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.kernels.tiles import Tile

if TYPE_CHECKING:
    from clearhead.maps.base import AttentionMap

__all__ = ["Expected", "ExpectedMass"]


@dataclass(frozen=True, eq=False)
class Expected:
    """Query t expects keys[start[t] : stop[t]], save those at some offsets from it.

    Ranges may overlap, so that n tokens that all expect each other take n numbers and not n².

    keys: (M,). start, stop: a number a query. but: offsets s - t at which no key is expected.
    """

    keys: Tensor
    start: Tensor
    stop: Tensor
    but: tuple[int, ...] = ()

    def pairs(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The (query, key) pairs of the queries [first, last), both (N,)."""
        count = self.stop[first:last] - self.start[first:last]
        which = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        within = torch.arange(len(which), device=count.device) - (count.cumsum(0) - count)[which]
        t, s = which + first, self.keys[self.start[first:last][which] + within]
        for offset in self.but:
            t, s = (x[s - t != offset] for x in (t, s))
        return t, s

    def holds(self, key: int) -> Tensor:
        """Which queries expect this key, bool, one each."""
        at = (self.keys == key).nonzero()[:, 0]
        found = ((self.start[:, None] <= at) & (at < self.stop[:, None])).any(-1)
        for offset in self.but:
            if 0 <= key - offset < len(found):
                found[key - offset] = False
        return found

    def to(self, device: torch.device) -> Expected:
        """The same on a device."""
        return Expected(self.keys.to(device), self.start.to(device), self.stop.to(device), self.but)


class ExpectedMass:
    """A reducer: the weight that each query gives to its expected keys, (…, T), and what each key gets so, (…, S).

    Both are sums in float64.
    """

    def __init__(self, attn: AttentionMap, expected: Expected) -> None:
        T, S = attn.shape[-2:]
        if not torch.equal(attn.positions, torch.arange(S - T, S, device=attn.device)):
            raise ShapeError(
                f"relations need every query: {attn!r} is a selection; measure the whole map, then select."
            )
        if len(expected.start) not in (T, S):
            raise ShapeError(f"a relation of {len(expected.start)} tokens: {attn!r} has {T} queries and {S} keys.")
        self.before = len(expected.start) - T  # of a text of which the map has only the last queries
        self.expected = expected.to(attn.device)
        self.result, self.received = (attn.like.new_zeros((*attn.shape[:-2], n), dtype=torch.float64) for n in (T, S))

    def update(self, tile: Tile) -> None:
        """Take one tile."""
        t, s = self.expected.pairs(tile.rows.start + self.before, tile.rows.stop + self.before)
        here = (s >= tile.cols.start) & (s < tile.cols.stop)
        t, s = t[here] - self.before, s[here]
        found = tile.weights[..., t - tile.rows.start, s - tile.cols.start].double()
        self.result.index_add_(-1, t, found)
        self.received.index_add_(-1, s, found)

    def take(self, result: Tensor, received: Tensor) -> None:
        """The whole result, from who computed it without tiles."""
        self.result, self.received = result, received
