"""The patterns of sparse attention: every n-th key, blocks by a layout, and tokens that see all.

They change the function, not only its cost: what a rule hides is not attended to. Cost follows the number of blocks
that are not empty, `rule.bind(T, S).count_blocks(128, 128)`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import reduce
from operator import or_

from torch import Tensor

from clearhead._checks import check_count, describe, read_broadcast
from clearhead.errors import DTypeError, ShapeError
from clearhead.masks.rule import Coverage, MaskRule, check_flags, leads_of, share, unless_traced


@dataclass(frozen=True)
class Strided(MaskRule):
    """Visible iff the key lies a multiple of `stride` away."""

    stride: int

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return (q + S - T) % self.stride == k % self.stride  # remainders and not a difference: 1 byte a pair, not 8

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        nearest = rows.start + S - T - (cols.stop - 1)
        farthest = rows.stop - 1 + S - T - cols.start
        if farthest // self.stride * self.stride < nearest:  # no multiple lies between the two
            return Coverage.EMPTY
        return Coverage.FULL if self.stride == 1 or nearest == farthest else Coverage.MIXED

    def __repr__(self) -> str:
        return f"strided({self.stride})"


def strided(stride: int) -> MaskRule:
    """Keys a multiple of `stride` away, on either side (Sparse Transformer: `& causal()`, beside a window).

    Blocks are empty only where the stride is longer than a block's sides together; below that, time is not saved.
    Source: Child et al. 2019, section 4.3.

    >>> from clearhead.masks import causal, sliding_window
    >>> print((strided(3) & causal() | sliding_window(2)).draw(6, 6))
    ■ ⬚ ⬚ ⬚ ⬚ ⬚
    ■ ■ ⬚ ⬚ ⬚ ⬚
    ⬚ ■ ■ ⬚ ⬚ ⬚
    ■ ⬚ ■ ■ ⬚ ⬚
    ⬚ ■ ⬚ ■ ■ ⬚
    ⬚ ⬚ ■ ⬚ ■ ■
    """
    check_count("strided", "stride", stride, at_least=1)
    return Strided(stride)


@dataclass(frozen=True, eq=False)
class BlockSparse(MaskRule):
    """Visible iff the layout says so of the blocks in which query and key stand."""

    layout: Tensor  # (1 or B, 1 or H, R, C) bool
    block: int

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return read_broadcast(self.layout.to(k.device), b, h, (q + S - T) // self.block, k // self.block)

    @unless_traced
    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        rows, cols = (
            slice((part.start + offset) // self.block, (part.stop - 1 + offset) // self.block + 1)
            for part, offset in ((rows, S - T), (cols, 0))
        )
        return share(self.layout[:, :, rows, cols])

    def check(self, B: int, H: int, T: int, S: int) -> None:
        b, h, R, C = self.layout.shape
        if T > S:
            raise ShapeError(f"{self!r}: {T} queries but only {S} keys; a query must be one of the keys.")
        if min(R, C) * self.block < S or b not in (1, B) or h not in (1, H):
            need = -(-S // self.block)
            raise ShapeError(
                f"{self!r} with {S} keys, {B} batch entries and {H} heads: expected at least ({need}, {need}) blocks,"
                f" one layout for all or ({B}, 1, …) per batch entry, (1, {H}, …) per head, ({B}, {H}, …) for both."
            )

    @property
    def leads(self) -> tuple[int | None, int | None]:
        return leads_of(self.layout)

    def __repr__(self) -> str:
        return f"block_sparse({tuple(self.layout.shape)}, {self.block})"


def block_sparse(layout: Tensor, block: int) -> MaskRule:
    """Block (i, j) of `block` × `block` pairs is visible iff layout[i, j], a bool (or 0/1) tensor over positions.

    Args:
        layout: (R, C), or (1 or B, 1 or H, R, C); R·block and C·block may exceed the number of keys.
        block: tokens a side of a block; a multiple of 128 leaves no block half empty.

    >>> import torch
    >>> print(block_sparse(torch.tensor([[1, 0], [1, 1]]), 2).draw(4, 4))
    ■ ■ ⬚ ⬚
    ■ ■ ⬚ ⬚
    ■ ■ ■ ■
    ■ ■ ■ ■
    """
    check_count("block_sparse", "block", block, at_least=1)
    if not isinstance(layout, Tensor) or layout.is_floating_point() or layout.is_complex():
        raise DTypeError(f"block_sparse(layout): expected a bool or 0/1 integer tensor, got {describe(layout)}.")
    check_flags("block_sparse(layout)", layout)
    if layout.ndim not in (2, 4):
        raise ShapeError(
            f"block_sparse(layout): expected (R, C) or (B, H, R, C), got {tuple(layout.shape)}."
            " Write (1, H, R, C) for one layout per head."
        )
    return BlockSparse(layout.bool().expand((1,) * (4 - layout.ndim) + tuple(layout.shape)), block)


@dataclass(frozen=True)
class GlobalTokens(MaskRule):
    """Visible iff query or key stands at one of the positions."""

    at: tuple[int, ...]  # ascending

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return self._holds(q + S - T) | self._holds(k)

    def _holds(self, position: Tensor) -> Tensor:
        """Compared one by one: FlexAttention's compiler takes no tensor made in here, and no reduction."""
        return reduce(or_, (position == one for one in self.at), position != position)

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        parts = (slice(rows.start + S - T, rows.stop + S - T), cols)
        inside = [bisect_left(self.at, part.stop) - bisect_left(self.at, part.start) for part in parts]
        if not any(inside):
            return Coverage.EMPTY
        full = any(n == part.stop - part.start for n, part in zip(inside, parts, strict=True))
        return Coverage.FULL if full else Coverage.MIXED

    def __repr__(self) -> str:
        return f"global_tokens({list(self.at)})" if len(self.at) < 5 else f"global_tokens(of {len(self.at)})"


def global_tokens(indices: list[int] | Tensor) -> MaskRule:
    """The tokens at these positions see all and are seen by all (Longformer, BigBird); beside a window, as a rule.

    With `& causal()` they are what everybody looks back to. Source: Beltagy, Peters, Cohan 2020, section 3.1.

    >>> from clearhead.masks import symmetric_window
    >>> print((global_tokens([0, 3]) | symmetric_window(2)).draw(6, 6))
    ■ ■ ■ ■ ■ ■
    ■ ■ ■ ■ ⬚ ⬚
    ■ ■ ■ ■ ⬚ ⬚
    ■ ■ ■ ■ ■ ■
    ■ ⬚ ⬚ ■ ■ ■
    ■ ⬚ ⬚ ■ ■ ■
    """
    at = indices.tolist() if isinstance(indices, Tensor) and indices.ndim == 1 else indices
    if not isinstance(at, (list, tuple, range)):
        raise ShapeError(f"global_tokens(indices): expected a list of positions, or integers (n,), got {describe(at)}.")
    for index in at:
        check_count("global_tokens", "index", index, at_least=0)
    return GlobalTokens(tuple(sorted(set(at))))
