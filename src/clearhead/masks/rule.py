"""What a mask rule is: which pairs it allows, what it leaves of a block, how rules combine; and a tensor as a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce, wraps
from itertools import product
from operator import and_
from typing import Any

import torch
from torch import Tensor

from clearhead._checks import check_broadcast, check_count, describe, has_numbers, read_broadcast
from clearhead._watch import HoldsTensors
from clearhead.errors import DTypeError, ShapeError

LEAF = 128  # pairs a side: where counting visible pairs looks at every pair


class Coverage(IntEnum):
    """How much of a block of (query, key) pairs a rule lets through; MIXED may also mean "not known cheaply"."""

    EMPTY = 0
    MIXED = 1
    FULL = 2


Covers = Callable[[Any, slice, slice, int, int], Coverage]


def unless_traced(coverage: Covers) -> Covers:
    """For coverage that looks at a tensor's numbers: where there are none (traced, meta, under vmap), MIXED."""

    @wraps(coverage)
    def look(rule: Any, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        known = all(has_numbers(tensor) for tensor in rule.tensors())
        return coverage(rule, rows, cols, T, S) if known else Coverage.MIXED

    return look


class MaskRule(HoldsTensors):
    """Which (query, key) pairs may attend. Subclasses say `allows`, and where they can, `coverage`.

    A subclass whose tensors differ between batch entries or heads also says `leads`, and what it needs in `check`.
    """

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        """Whether query `q` of batch `b`, head `h` may attend to key `k`: bool, broadcastable to the indices' shape.

        The indices broadcast together; all are 0-d where FlexAttention asks. A dimension that the rule ignores stays 1.
        """
        raise NotImplementedError(f"{type(self).__name__} must define allows(b, h, q, k, T, S)")

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        """Whether the block rows × cols is empty, full or mixed, for every batch and head at once."""
        return Coverage.MIXED

    def interval(self, q: Tensor, T: int, S: int) -> tuple[Tensor, Tensor] | None:
        """The first key that each query (n,) sees, and the one after the last, if for all it is one range of keys.

        None where it is not, or not known to be, or not the same for all batch entries and heads.
        """
        return None

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Raise ShapeError where tensors inside the rule do not fit an attention of this size."""

    @property
    def leads(self) -> tuple[int | None, int | None]:
        """For how many batch entries and heads the rule was made, each None where it serves any number."""
        return None, None

    @property
    def per_head(self) -> bool:
        """Whether heads may see different keys."""
        return self.leads[1] is not None

    def bind(self, T: int, S: int) -> BoundMask:
        """The rule for T queries and S keys: a FlexAttention `mask_mod` that also gives tiles and block coverage.

        Raises: ShapeError where T or S is no size, or the rule's tensors are of other sizes.
        """
        for name, size in (("T", T), ("S", S)):
            check_count(f"{self!r}.bind", name, size, at_least=0)
        B, H = self.leads
        self.check(1 if B is None else B, 1 if H is None else H, T, S)
        return BoundMask(self, T, S)

    def draw(self, T: int, S: int, *, batch: int = 0, head: int = 0) -> str:
        """The mask of one batch entry and head as text, ■ for visible; cost O(T·S) characters."""
        bound = self.bind(T, S)
        tile = bound.tile(slice(0, T), slice(0, S), *bound._at("draw", batch, head))
        return "\n".join(" ".join("■" if seen else "⬚" for seen in row) for row in tile.expand(1, 1, T, S)[0, 0])

    def __and__(self, other: MaskRule) -> MaskRule:
        return Both(self, as_rule(other))

    def __or__(self, other: MaskRule) -> MaskRule:
        return Either(self, as_rule(other))

    def __invert__(self) -> MaskRule:
        return Not(self)


@dataclass(frozen=True)
class BoundMask:
    """A rule with its sizes. Calling it is FlexAttention's `mask_mod(b, h, q_idx, kv_idx)`.

    >>> from clearhead.masks import causal
    >>> mask_mod = causal().bind(2, 5)
    >>> bool(mask_mod(torch.tensor(0), torch.tensor(0), torch.tensor(0), torch.tensor(4)))
    False
    """

    rule: MaskRule
    T: int
    S: int

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.rule.allows(b, h, q, k, self.T, self.S)

    def tile(self, rows: slice, cols: slice, batches: Tensor, heads: Tensor) -> Tensor:
        """The mask of a block, bool, (B or 1, H or 1, t, s): dimensions that the rule ignores stay 1."""
        b, h, q, k = block_indices(rows, cols, batches, heads)
        seen = self(b, h, q, k)
        return seen.expand(seen.shape[0], seen.shape[1], q.shape[2], k.shape[3])

    def block(self, rows: slice, cols: slice) -> Coverage:
        """Whether the block is empty, full or mixed; an empty range of rows or columns is EMPTY."""
        if rows.start >= rows.stop or cols.start >= cols.stop:
            return Coverage.EMPTY
        return self.rule.coverage(rows, cols, self.T, self.S)

    def count(self, *, batch: int = 0, head: int = 0) -> int:
        """How many (query, key) pairs of one batch entry and head are visible.

        Cost: blocks known to be empty or full are not looked into, so a causal mask or a window takes O(T + S).

        >>> from clearhead.masks import sliding_window
        >>> sliding_window(1024).bind(131072, 131072).count()
        133693952
        """
        at = self._at("count", batch, head)
        return sum(
            _length(rows) * _length(cols) if coverage is Coverage.FULL else int(self.tile(rows, cols, *at).sum())
            for rows, cols, coverage in self._regions(slice(0, self.T), slice(0, self.S), (LEAF, LEAF))
        )

    def _at(self, call: str, batch: int, head: int) -> tuple[Tensor, Tensor]:
        """One batch entry and head as indices for `tile`, if the rule knows them."""
        for name, index, size in zip(("batch", "head"), (batch, head), self.rule.leads, strict=True):
            check_count(call, name, index, at_least=0)
            if size is not None and index >= size:
                raise ShapeError(f"{call}({name}={index}): {self.rule!r} is made for {size}, from 0 on.")
        return torch.tensor([batch]), torch.tensor([head])

    def count_blocks(self, rows: int, cols: int) -> int:
        """How many blocks of rows × cols pairs are not known to be empty: work over tiles is proportional to it.

        >>> from clearhead.masks import causal
        >>> causal().bind(4096, 4096).count_blocks(128, 128)  # of 1,024
        528
        """
        for name, size in (("rows", rows), ("cols", cols)):
            check_count("count_blocks", name, size, at_least=1)
        found = self._regions(slice(0, self.T), slice(0, self.S), (rows, cols))
        return sum(-(-_length(r) // rows) * -(-_length(c) // cols) for r, c, _ in found)

    def _regions(self, rows: slice, cols: slice, size: tuple[int, int]) -> Iterator[tuple[slice, slice, Coverage]]:
        """A region in full parts of any size and mixed ones of `size`; quarter by quarter, empty ones left out."""
        coverage = self.block(rows, cols)
        if coverage is Coverage.EMPTY:
            return
        if coverage is Coverage.FULL or (_length(rows) <= size[0] and _length(cols) <= size[1]):
            yield rows, cols, coverage
            return
        for part, other in product(_halves(rows, size[0]), _halves(cols, size[1])):
            yield from self._regions(part, other, size)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _halves(part: slice, size: int) -> list[slice]:
    """A range cut near its middle, at a multiple of `size` from its start."""
    middle = part.start + -(-_length(part) // size) // 2 * size
    return [slice(part.start, middle), slice(middle, part.stop)]


def block_indices(rows: slice, cols: slice, batches: Tensor, heads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four index tensors of a block, each with its own axis of (B, H, t, s)."""
    q = torch.arange(rows.start, rows.stop, device=batches.device)
    k = torch.arange(cols.start, cols.stop, device=batches.device)
    return batches[:, None, None, None], heads[None, :, None, None], q[None, None, :, None], k[None, None, None, :]


# --- combinations: Kleene's three-valued logic on coverage, with MIXED as "unknown" ---------------------------------


@dataclass(frozen=True)
class Pair(MaskRule):
    """Two rules, combined."""

    left: MaskRule
    right: MaskRule

    def check(self, B: int, H: int, T: int, S: int) -> None:
        self.left.check(B, H, T, S)
        self.right.check(B, H, T, S)

    @property
    def leads(self) -> tuple[int | None, int | None]:
        (b, h), (other_b, other_h) = self.left.leads, self.right.leads
        return other_b if b is None else b, other_h if h is None else h


class Both(Pair):
    """Visible where both rules say so."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return self.left.allows(b, h, q, k, T, S) & self.right.allows(b, h, q, k, T, S)

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        return min(self.left.coverage(rows, cols, T, S), self.right.coverage(rows, cols, T, S))

    def interval(self, q: Tensor, T: int, S: int) -> tuple[Tensor, Tensor] | None:
        left, right = self.left.interval(q, T, S), self.right.interval(q, T, S)
        if left is None or right is None:
            return None
        return torch.maximum(left[0], right[0]), torch.minimum(left[1], right[1])

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


class Either(Pair):
    """Visible where at least one rule says so."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return self.left.allows(b, h, q, k, T, S) | self.right.allows(b, h, q, k, T, S)

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        return max(self.left.coverage(rows, cols, T, S), self.right.coverage(rows, cols, T, S))

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True)
class Not(MaskRule):
    """Visible where the rule says it is not."""

    rule: MaskRule

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return ~self.rule.allows(b, h, q, k, T, S)

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        return Coverage(Coverage.FULL - self.rule.coverage(rows, cols, T, S))

    def check(self, B: int, H: int, T: int, S: int) -> None:
        self.rule.check(B, H, T, S)

    @property
    def leads(self) -> tuple[int | None, int | None]:
        return self.rule.leads

    def __repr__(self) -> str:
        return f"~{self.rule!r}"


# --- a tensor as a rule ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dense(MaskRule):
    """A mask that somebody already has as a tensor."""

    mask: Tensor  # (B or 1, H or 1, T or 1, S or 1) bool

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return read_broadcast(self.mask.to(k.device), b, h, q, k)

    @unless_traced
    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        rows, cols = (part if n > 1 else slice(None) for part, n in zip((rows, cols), self.mask.shape[2:], strict=True))
        return share(self.mask[:, :, rows, cols])

    def check(self, B: int, H: int, T: int, S: int) -> None:
        check_broadcast("a mask tensor", self.mask, (B, H, T, S))

    @property
    def leads(self) -> tuple[int | None, int | None]:
        return leads_of(self.mask)

    def __repr__(self) -> str:
        return f"dense({tuple(self.mask.shape)})"


def dense(mask: Tensor) -> MaskRule:
    """A bool (or 0/1) tensor as a rule: (T, S), (1 or B, 1 or H, T, S). A (B, T, S) tensor is refused, since it could
    mean batches or heads; a (B, S) padding mask is taken by name only (`padding(keys=...)`).

    >>> print(dense(torch.tensor([[1, 0], [1, 1]])).draw(2, 2))
    ■ ⬚
    ■ ■
    """
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        raise DTypeError(
            f"dense(mask): expected a bool or 0/1 integer tensor, got {describe(mask)}."
            " A float mask is added to the scores: pass it as a bias; where there is none to pass and the mask is 0 or"
            " -inf, pass mask == 0."
        )
    if mask.ndim not in (2, 4):
        raise ShapeError(
            f"dense(mask): expected (T, S) or (B, H, T, S), got {tuple(mask.shape)}. Write (B, 1, T, S) for one mask"
            " per batch entry, (1, H, T, S) for one per head, padding(keys=mask) for a (B, S) padding mask."
        )
    check_flags("dense(mask)", mask)
    return Dense(mask.bool().expand((1,) * (4 - mask.ndim) + tuple(mask.shape)))


def check_flags(call: str, flags: Tensor) -> None:
    """Raise unless integers are 0 and 1: others, -10000 above all, are meant to be added to the scores."""
    if flags.dtype != torch.bool and has_numbers(flags) and bool(((flags != 0) & (flags != 1)).any()):
        raise DTypeError(
            f"{call}: {describe(flags)} holds other numbers than 0 and 1. True and 1 mean may attend; numbers that are"
            " added to the scores are a bias, a float tensor."
        )


def as_rule(mask: MaskRule | Tensor) -> MaskRule:
    """A rule as it is, a tensor as `dense(tensor)`."""
    if isinstance(mask, MaskRule):
        return mask
    if isinstance(mask, Tensor):
        return dense(mask)
    raise DTypeError(f"expected a mask rule (clearhead.masks) or a bool tensor, got {describe(mask)}.")


def all_of(*rules: MaskRule | Tensor | None) -> MaskRule | None:
    """The rules and tensors that are given, joined by AND; None where there are none, and all is visible."""
    given = [as_rule(rule) for rule in rules if rule is not None]
    return reduce(and_, given) if given else None


def leads_of(tensor: Tensor) -> tuple[int | None, int | None]:
    """The batch entries and heads of a tensor (1 or B, 1 or H, …)."""
    B, H = (None if n == 1 else n for n in tensor.shape[:2])
    return B, H


def share(flags: Tensor) -> Coverage:
    """Whether all of the flags are set, or none."""
    if bool(flags.all()):
        return Coverage.FULL
    return Coverage.MIXED if bool(flags.any()) else Coverage.EMPTY
