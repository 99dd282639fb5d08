"""Maps in which some heads attend otherwise: evenly, to the token before, or to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from clearhead.maps.base import AttentionMap, Derived
from clearhead.masks import Coverage

__all__ = ["Nothing", "Previous", "Replaced", "replace_heads"]


class Nothing(Derived):
    """Every query attends to nothing: weights 0."""

    _leaves: ClassVar[tuple[str, ...]] = ()

    def tile(self, rows: slice, cols: slice) -> Tensor:
        return self.like.new_zeros((*self.shape[:-2], rows.stop - rows.start, cols.stop - cols.start))

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        return self.like.new_zeros((*self.shape[:-2], *self._pairs(t, s)[0].shape))

    def block(self, rows: slice, cols: slice) -> Coverage:
        return Coverage.EMPTY

    def _of(self, attn: AttentionMap) -> AttentionMap:
        return attn


class Previous(Derived):
    """All weight of a query on the token before it; on itself where it may not see that, on nothing where neither.

    So the first query of a causal head attends to itself, the only key it has.

    >>> from clearhead.maps import SoftmaxMap
    >>> Previous(SoftmaxMap(torch.zeros(3, 4), torch.zeros(3, 4))).to_dense()
    tensor([[1., 0., 0.],
            [1., 0., 0.],
            [0., 1., 0.]])
    """

    _leaves: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def target(self) -> Tensor:
        """The key that each query attends to, (…, T); -1 for none."""
        with torch.no_grad():
            even, at = self._attn.uniform(), self.positions
            before, own = _sees(even, at - 1), _sees(even, at)
        return torch.where(before, at - 1, torch.where(own, at, -1))

    def tile(self, rows: slice, cols: slice) -> Tensor:
        keys = torch.arange(cols.start, cols.stop, device=self.device)
        return (self.target[..., rows, None] == keys).to(self.dtype)

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        t, s = self._pairs(t, s)
        return (self.target[..., t] == s).to(self.dtype)

    def block(self, rows: slice, cols: slice) -> Coverage:
        return min(self._attn.block(rows, cols), Coverage.MIXED)

    def _of(self, attn: AttentionMap) -> AttentionMap:
        return attn

    def take(self, values: Tensor) -> Tensor:
        """The map @ values (…, S, Dv): one row each, and no product. Returns (…, T, Dv)."""
        at = self.target[..., None]
        rows = values.expand(*self.shape[:-2], *values.shape[-2:])
        taken = rows.gather(-2, at.clamp(min=0).expand(*at.shape[:-1], values.shape[-1]))
        return taken.masked_fill(at < 0, 0)


def _sees(even: AttentionMap, keys: Tensor) -> Tensor:
    """Whether each query (…, T) may see the key of its own (T,)."""
    t, S = torch.arange(len(keys), device=keys.device), even.shape[-1]
    return (even.pick(t, keys.clamp(0, S - 1)) > 0) & (keys >= 0) & (keys < S)


class Replaced(Derived):
    """A map (B, H, T, S), some heads of which are those of other maps.

    Args:
        attn: the map.
        others: for some of its heads, n numbers, a map (B, n, T, S) over the same queries and keys.
    """

    _leaves: ClassVar[tuple[str, ...]] = ("_attn", "_others")

    def __init__(self, attn: AttentionMap, others: list[tuple[list[int], AttentionMap]]) -> None:
        super().__init__(attn)
        self._heads, self._others = [heads for heads, _ in others], [other for _, other in others]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        weights = self._attn.tile(rows, cols)
        for heads, other in zip(self._heads, self._others, strict=True):
            weights = weights.index_copy(-3, self._at(heads), other.tile(rows, cols))
        return weights

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        weights = self._attn.pick(t, s)
        for heads, other in zip(self._heads, self._others, strict=True):
            weights = weights.index_copy(len(self.shape) - 3, self._at(heads), other.pick(t, s))
        return weights

    def _at(self, heads: list[int]) -> Tensor:
        return torch.tensor(heads, device=self.device)

    def block(self, rows: slice, cols: slice) -> Coverage:
        return min(self._attn.block(rows, cols), Coverage.MIXED)

    @property
    def heads_alike(self) -> bool:
        return False

    def uniform(self) -> AttentionMap:
        return self._attn.uniform()

    def _notes(self) -> list[str]:
        changed = sorted(head for heads in self._heads for head in heads)
        return [*self._attn._notes(), f"heads {', '.join(map(str, changed))} replaced"]


def replace_heads(attn: AttentionMap, heads: Mapping[int, str]) -> AttentionMap:
    """The map (B, H, T, S) with heads that attend to "nothing", evenly ("uniform") or to the token before ("previous").

    "uniform" is even over the keys that the head may see.
    """
    others = []
    for kind in sorted(set(heads.values())):
        at = [head for head in sorted(heads) if heads[head] == kind]
        others.append((at, _MADE[kind](attn[:, at])))
    return Replaced(attn, others)


_MADE = {"nothing": Nothing, "uniform": lambda attn: attn.uniform(), "previous": Previous}
