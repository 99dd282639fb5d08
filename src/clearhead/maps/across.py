"""Attention across layers, and attention weighted by what it carries; both lazy, as the maps they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from clearhead._checks import span
from clearhead._watch import Watched
from clearhead.errors import ShapeError
from clearhead.maps.base import AttentionMap, Derived
from clearhead.maps.composed import average_heads
from clearhead.masks import Coverage

__all__ = ["Rollout", "ValueWeighted", "rollout", "value_weighted"]

_AT_ONCE = 256  # rows that `pick` computes together


class Rollout(AttentionMap):
    """The product of layers' maps, each averaged over heads and half of it the residual stream: (B, T, T)."""

    _leaves: ClassVar[tuple[str, ...]] = ("_layers",)

    def __init__(self, layers: list[AttentionMap]) -> None:
        self._layers = layers  # (B, T, T), first layer first
        self._sums: list[Tensor | None] = [None] * len(layers)
        self._block: tuple[slice, Tensor, Watched] | None = None  # the rows that were asked for last

    def __copy__(self) -> Rollout:
        """Without what was kept: a copy is made to stand on other tensors, as by the backward pass."""
        return Rollout(self._layers)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._layers[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self._layers[0].dtype

    @property
    def device(self) -> torch.device:
        return self._layers[0].device

    def _tensors(self) -> Iterator[Tensor]:
        for layer in self._layers:
            yield from layer._tensors()

    def _lead_names(self) -> tuple[str, ...]:
        return self._layers[0]._lead_names()

    def _notes(self) -> list[str]:
        return [f"{len(self._layers)} layers"]

    def uniform(self) -> Rollout:
        """The rollout of heads that spread evenly over the keys they may see."""
        return Rollout([layer.uniform() for layer in self._layers])

    def block(self, rows: slice, cols: slice) -> Coverage:
        """EMPTY where no layer lets what stands before these keys see them or what follows, as under a causal mask."""
        if rows.stop <= rows.start or cols.stop <= cols.start:
            return Coverage.EMPTY
        before, after = slice(0, cols.start), slice(cols.start, self.shape[-1])
        apart = rows.stop <= cols.start and all(layer.block(before, after) is Coverage.EMPTY for layer in self._layers)
        return Coverage.EMPTY if apart else Coverage.MIXED

    def tile(self, rows: slice, cols: slice) -> Tensor:
        T, S = self.shape[-2:]
        rows, cols = span("tile: rows", rows, T), span("tile: cols", cols, S)
        return self._rows(rows)[..., cols]

    def _rows(self, rows: slice) -> Tensor:
        """Whole rows (…, t, T), kept until others are asked for: tiles of the same rows follow one another."""
        if self._block is not None and self._block[0] == rows and not self._block[2].changed:
            return self._block[1]
        found = self._of_rows(torch.arange(rows.start, rows.stop, device=self.device))
        if not found.requires_grad:
            self._block = rows, found, Watched(self._tensors())
        return found

    def _of_rows(self, t: Tensor) -> Tensor:
        at = self.like.new_zeros((*self.shape[:-1], t.numel()))
        at[..., t, torch.arange(t.numel(), device=self.device)] = 1
        return self._finite_product(at, transposed=True).mT

    def columns(self, keys: Tensor) -> Tensor:
        at = self.like.new_zeros((*self.shape[:-1], keys.numel()))
        at[..., keys, torch.arange(keys.numel(), device=self.device)] = 1
        return self._finite_product(at, transposed=False)

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        t, s = self._pairs(t, s)
        (rows, row_of), (keys, key_of) = (torch.unique(x, return_inverse=True) for x in (t, s))
        if keys.numel() < rows.numel() and keys.numel() <= _AT_ONCE:
            return self.columns(keys)[..., t, key_of]
        picked = self.like.new_zeros((*self.shape[:-2], *t.shape))
        for start in range(0, rows.numel(), _AT_ONCE):
            here = (row_of >= start) & (row_of < start + _AT_ONCE)
            found = self._of_rows(rows[start : start + _AT_ONCE])
            picked[..., here] = found[..., row_of[here] - start, s[here]]
        return picked

    def received(self) -> Tensor:
        ones = self.like.new_ones((*self.shape[:-1], 1))
        return self._finite_product(ones, transposed=True)[..., 0]

    def trace(self, t: int) -> Tensor:
        """Where the last vector of token t comes from, at every depth: (…, L + 1, T), each row sums to 1.

        Row l is its influence by what stands at each token after l layers: row L is token t alone, row 0 `self[…, t]`.
        Cost: that of one row.
        """
        at = self._positions_of([t], self.shape[-2], "query")
        x = self.like.new_zeros((*self.shape[:-1], 1))
        x[..., at, :] = 1
        rows = [x]
        for n in reversed(range(len(self._layers))):
            rows.append(self._through(n, rows[-1], transposed=True))
        return torch.cat(rows[::-1], -1).mT

    def _finite_product(self, x: Tensor, *, transposed: bool) -> Tensor:
        """One layer after the other: A' x = (A x + x) / (1 + rowsum A)."""
        numbers = range(len(self._layers))
        for n in reversed(numbers) if transposed else numbers:
            x = self._through(n, x, transposed=transposed)
        return x

    def _through(self, n: int, x: Tensor, *, transposed: bool) -> Tensor:
        layer, total = self._layers[n], 1 + self._sum(n)[..., None]
        if transposed:
            x = x / total
            return layer._finite_product(x, transposed=True) + x
        return (layer._finite_product(x, transposed=False) + x) / total

    def _sum(self, n: int) -> Tensor:
        """Each row's sum in a layer (…, T): 1, but for queries that attend to nothing and for learned sinks."""
        known = self._sums[n]
        if known is None:
            known = self._layers[n]._row_sums()
            self._sums[n] = None if known.requires_grad else known
        return known


def rollout(maps: Iterable[AttentionMap]) -> Rollout:
    """How much of each token's last vector comes from each token of the text, if weights and residuals were all.

    R = A'_L ⋯ A'_1,    A' = ½ mean_h A + ½ I;    the rows of A', and so those of R, sum to 1.

    `rollout(recording)[0, -1]` is the influence of every token on the last one. A query that attends to nothing
    (padding) stays itself; where learned sinks take weight, A' is divided by its row sums. No value, norm or MLP is
    looked at: it says where attention leads, and a knockout says what it does.

    Args:
        maps: those of the layers, first layer first, each (B, H, T, T), (H, T, T) or averaged over heads already.

    Returns: a lazy map (B, T, T), or (T, T).

    Raises: ShapeError where there is no map, or one is not of a text with itself.

    Cost: nothing is computed here. One row, a column, `R @ x` and `R.mT @ y`: one pass over every layer, in O(T) memory
    beside the maps (of x and y as many numbers again). All rows: one such pass for every 128 of them.

    Source: Abnar & Zuidema 2020, equation 1.

    >>> from clearhead.maps import SoftmaxMap
    >>> x = torch.zeros(2, 4, 8)  # two heads, uniform
    >>> rollout([SoftmaxMap(x[None], x[None]) for _ in range(3)])[0, 0]
    tensor([0.3438, 0.2188, 0.2188, 0.2188])
    """
    layers = list(maps)
    if not layers:
        raise ShapeError("rollout([]): there is no map; expected those of the layers, as a recording holds them.")
    averaged = [average_heads(attn) if attn._lead_names()[-1:] == ("H",) else attn for attn in layers]
    shapes = {attn.shape for attn in averaged}
    if len(shapes) > 1 or averaged[0].shape[-2] != averaged[0].shape[-1]:
        raise ShapeError(
            f"rollout of {len(layers)} maps of shapes {', '.join(map(str, dict.fromkeys(a.shape for a in layers)))}:"
            " expected maps (B, H, T, T) of one text with itself. Of an encoder-decoder, pass recording.encoder or"
            " recording.decoder; of a call with a cache, record one call over the whole text."
        )
    return Rollout(averaged)


class ValueWeighted(Derived):
    """α · ‖v W_O‖ of each query, key and head: see `value_weighted`."""

    _leaves: ClassVar[tuple[str, ...]] = ("_attn", "norms")

    def __init__(self, attn: AttentionMap, norms: Tensor) -> None:
        super().__init__(attn)
        self.norms = norms  # (…, S)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        return self._attn.tile(rows, cols) * self.norms[..., None, cols]

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        t, s = self._pairs(t, s)
        return self._attn.pick(t, s) * self.norms[..., s]

    def columns(self, keys: Tensor) -> Tensor:
        return self._attn.columns(keys) * self.norms[..., None, keys]

    def uniform(self) -> AttentionMap:
        return self._attn.uniform()


def value_weighted(attn: AttentionMap, projection: Tensor, *, v: Tensor | None = None) -> ValueWeighted:
    """How much each key brings, by weight and by what it carries: a sink whose value is near 0 brings nothing.

    N[h, t, s] = ‖α[h, t, s] · v[s] W_O^h‖ = α[h, t, s] · ‖v[s] W_O^h‖

    Args:
        attn: a recorded map (B, H, T, S).
        projection: W_O as nn.Linear keeps it, (E, H · Dv): head h reads columns h·Dv to (h+1)·Dv.
        v: the values (B, G, S, Dv), where the map does not hold them (`attn.v`), as those of a generated text do not.

    Returns: a lazy map; its rows do not sum to 1.

    Raises: ShapeError where v or W_O do not fit the map.

    Cost: O(S·H·Dv²) time here, and one number a head and key; reading is as that of the map.

    Source: Kobayashi et al. 2020, equation 6 (a head's own; they also add the vectors of all heads up).
    """
    values = v if v is not None else getattr(attn, "v", None)
    if len(attn.shape) != 4 or values is None:
        held = "which holds no values; pass v=" if values is None else "expected a map (B, H, T, S)"
        raise ShapeError(f"value_weighted({attn!r}): {held}.")
    (B, H, _, S), (G, width) = attn.shape, values.shape[1::2]
    if values.shape[::2] != (B, S) or H % max(1, G) or projection.ndim != 2 or projection.shape[1] != H * width:
        raise ShapeError(
            f"value_weighted({attn!r}): v {tuple(values.shape)} and W_O {tuple(projection.shape)} do not fit it;"
            f" expected v (B={B}, G, S={S}, Dv), and W_O (E, H · Dv = {H * width}). Where a layer keeps W_O as"
            " (H · Dv, E), as GPT-2's do, pass weight.mT."
        )
    return ValueWeighted(attn, _norms(values.double(), projection.double(), H).to(attn.dtype))


def _norms(v: Tensor, projection: Tensor, H: int) -> Tensor:
    """‖v[s] W_O^h‖, (B, H, S): the square root of v (W_O W_Oᵀ) v."""
    (B, G, S, width), E = v.shape, len(projection)
    own = projection.view(E, G, H // max(1, G), width)
    gram = torch.einsum("egrd,egrf->grdf", own, own)
    squares = (torch.einsum("bgsd,grdf->bgrsf", v, gram) * v[:, :, None]).sum(-1)
    return squares.clamp(min=0).sqrt().reshape(B, H, S)
