"""A FlexAttention `BlockMask` as a mask rule: its table says what is empty, its `mask_mod` the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.masks import BoundMask, Coverage, MaskRule

__all__ = ["BlockRule", "is_block_mask", "of_each"]

_MODULE = "torch.nn.attention.flex_attention"
_TABLE = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def is_block_mask(mask: object) -> bool:
    """Whether this is FlexAttention's mask; does not import FlexAttention."""
    flex = sys.modules.get(_MODULE)
    return flex is not None and isinstance(mask, flex.BlockMask)


class BlockRule(MaskRule):
    """The pairs that `block_mask.mask_mod(b, h, q_idx, kv_idx)` lets through."""

    def __init__(self, block_mask: Any) -> None:
        self._mask = block_mask

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        """What the mask_mod says of each pair; a batch or head dimension of 1 is broadcast."""
        batches, heads = self._mask.shape[:2]
        b = b if batches > 1 else b.new_zeros((1,) * b.ndim)
        h = h if heads > 1 else h.new_zeros((1,) * h.ndim)
        if not (b.ndim or h.ndim or q.ndim or k.ndim):  # FlexAttention asks, which maps over the pairs itself
            return self._mask.mask_mod(b, h, q, k)  # type: ignore[no-any-return]
        return of_each(self._mask.mask_mod, b, h, q, k)

    @cached_property
    def _table(self) -> Tensor:
        """Which blocks hold any visible pair, for any batch or head: (query blocks, key blocks) bool."""
        return self._mask.to_dense().bool().flatten(0, -3).any(0)  # type: ignore[no-any-return]

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        """EMPTY where no block of the table is visible."""
        height, width = self._mask.BLOCK_SIZE
        part = self._table[rows.start // height : -(-rows.stop // height), cols.start // width : -(-cols.stop // width)]
        return Coverage.MIXED if bool(part.any()) else Coverage.EMPTY

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Raise ShapeError where the BlockMask was made for other sizes."""
        batches, heads, queries, keys = self._mask.shape
        if batches not in (1, B) or heads not in (1, H) or queries < T or keys < S:
            raise ShapeError(f"a BlockMask of shape {tuple(self._mask.shape)} for an attention of {(B, H, T, S)}.")

    @property
    def leads(self) -> tuple[int | None, int | None]:
        """For how many batch entries and heads the BlockMask was made; one serves any number."""
        B, H = (None if n == 1 else int(n) for n in self._mask.shape[:2])
        return B, H

    def tensors(self) -> Iterator[Tensor]:
        """The table, and what the mask_mod and the functions in it close over (not what they read as globals)."""
        table = (getattr(self._mask, name) for name in _TABLE)
        yield from (part for part in table if part is not None)
        yield from _closed_over(self._mask.mask_mod, set())

    def __repr__(self) -> str:
        return f"block_mask({tuple(self._mask.shape)})"


def of_each(function: Callable[..., Tensor], *numbers: Tensor) -> Tensor:
    """What a function of scalars says of each of these, which broadcast together: PyTorch maps a mask_mod over them."""
    from torch.nn.attention.flex_attention import create_mask  # loaded: somebody has made such a function

    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(each.shape for each in numbers)
    )
    at = [each.expand(shape).reshape(-1) for each in numbers]

    def one(_b: Tensor, _h: Tensor, i: Tensor, _k: Tensor) -> Tensor:
        return function(*(each[i] for each in at))

    return create_mask(one, None, None, len(at[0]), 1, device=at[0].device).reshape(shape)


def _closed_over(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that a function holds in its closure, directly or in other functions, lists or rules."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, BoundMask):
        yield from thing.rule.tensors()
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from _closed_over(part, seen)
    elif isinstance(thing, FunctionType):
        for cell in thing.__closure__ or ():
            yield from _closed_over(cell.cell_contents, seen)
