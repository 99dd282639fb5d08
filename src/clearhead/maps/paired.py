"""What maps of queries and keys share that are no softmax of q·k: sizes, a mask rule, tensors kept by reference."""

from __future__ import annotations

import copy
from abc import abstractmethod

import torch
from torch import Tensor

from clearhead._checks import check_qkv, four, span
from clearhead._watch import Watched
from clearhead.errors import RecordingError
from clearhead.kernels.grouped import groups_of, take
from clearhead.maps.base import AttentionMap, Selection
from clearhead.masks import Coverage, MaskRule, block_indices


class Paired(AttentionMap):
    """A map of q (B, H, T, D) and k (B, G, S, D), or both (B, T, D) or (T, D). Subclasses say `_weights`."""

    def __init__(self, q: Tensor, k: Tensor, mask: MaskRule | None, *others: Tensor) -> None:
        check_qkv(type(self).__name__, q, k)
        self.mask = mask
        self._q, self._k = four(q), four(k)
        self._axes = (0, 1)[: q.ndim - 2]  # which of (B, H) the map shows; an integer index drops one
        # Which batch entries and heads of the mask's own numbering these are: selections keep the numbering.
        self._b, self._h = (torch.arange(n, device=q.device) for n in self._q.shape[:2])
        self._made_from = Watched([q, k, *others, *(() if mask is None else mask.tensors())])
        if mask is not None:
            mask.check(*self._q.shape[:2], *self.shape[-2:])

    @abstractmethod
    def _weights(self, rows: slice, cols: slice) -> Tensor:
        """The weights of a block, (B, H, t, s)."""

    def tile(self, rows: slice, cols: slice) -> Tensor:
        if self._made_from.changed:
            raise RecordingError(
                f"{self!r}: its q, k or mask was overwritten in place after the map was made, so its weights are lost."
                " Read the map before that, or clone what it is made of."
            )
        T, S = self.shape[-2:]
        weights = self._weights(span("tile: rows", rows, T), span("tile: cols", cols, S))
        return weights.reshape(*self.shape[:-2], *weights.shape[-2:])

    @property
    def shape(self) -> tuple[int, ...]:
        return (*(self._q.shape[axis] for axis in self._axes), self._q.shape[2], self._k.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self._q.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self._q.device

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._q, self._k))

    @property
    def heads_alike(self) -> bool:
        return self.mask is None or not self.mask.per_head

    def block(self, rows: slice, cols: slice) -> Coverage:
        if self.mask is not None:
            return self.mask.bind(*self.shape[-2:]).block(rows, cols)
        return Coverage.FULL if rows.stop > rows.start and cols.stop > cols.start else Coverage.EMPTY

    def _select(self, lead: tuple[int | Tensor, ...], rows: Tensor | None) -> AttentionMap:
        chosen = copy.copy(self)
        chosen._axes = tuple(axis for axis, at in zip(self._axes, lead, strict=True) if isinstance(at, Tensor))
        for axis, at in zip(self._axes, lead, strict=True):
            chosen._keep_batches(at) if axis == 0 else chosen._keep_heads(at)
        everything = tuple(torch.arange(n, device=self.device) for n in chosen.shape[:-2])
        return chosen if rows is None else Selection(chosen, everything, rows)

    def _keep_batches(self, at: int | Tensor) -> None:
        self._q, self._k, self._b = take(self._q, 0, at), take(self._k, 0, at), take(self._b, 0, at)

    def _keep_heads(self, at: int | Tensor) -> None:
        groups = self._groups(at)
        self._q, self._k, self._h = take(self._q, 1, at), take(self._k, 1, groups), take(self._h, 0, at)

    def _groups(self, heads: int | Tensor) -> int | Tensor:
        """The key heads that these query heads read."""
        return groups_of(heads, self._q.shape[1] // max(1, self._k.shape[1]))

    def _lead_names(self) -> tuple[str, ...]:
        return tuple("BH"[axis] for axis in self._axes)

    def _notes(self) -> list[str]:
        return [] if self.mask is None else [repr(self.mask).removesuffix("()")]

    def _hide(self, block: Tensor, rows: slice, cols: slice, value: float) -> Tensor:
        """The block (B, H, t, s) with `value` where the mask hides."""
        if self.mask is None or self.block(rows, cols) is Coverage.FULL:
            return block
        at = block_indices(rows, cols, self._b, self._h)
        return block.masked_fill(~self.mask.allows(*at, *self.shape[-2:]), value)

    def _needs_graph(self) -> bool:
        return torch.is_grad_enabled() and self._made_from.differentiable
