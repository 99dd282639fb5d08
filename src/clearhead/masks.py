"""Mask rules: which key a query may attend to, as a rule and never as a T×S tensor.

True means "may attend", everywhere (the polarity of PyTorch's scaled_dot_product_attention). A rule knows, for a
block of queries and keys, whether the block is empty, full or mixed, so that work is skipped where nothing is
visible and no mask is read where everything is. Rules combine with ``&``, ``|`` and ``~`` and draw themselves:

>>> print((causal() & sliding_window(2)).draw(4, 4))
■ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚
⬚ ■ ■ ⬚
⬚ ⬚ ■ ■
>>> print(causal().draw(2, 5))  # T ≠ S is lower-right: the last query is the newest token
■ ■ ■ ■ ⬚
■ ■ ■ ■ ■

A query that no key is visible to (an all-⬚ row) gets weights 0, output 0, lse −inf and entropy 0, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from clearhead._checks import check_broadcast, check_count, describe, read_broadcast
from clearhead._watch import HoldsTensors
from clearhead.errors import DTypeError, ShapeError

__all__ = [
    "BoundMask",
    "Coverage",
    "MaskRule",
    "as_rule",
    "causal",
    "causal_upper_left",
    "dense",
    "documents",
    "first_tokens",
    "padding",
    "prefix",
    "sliding_window",
    "symmetric_window",
]

FOREVER = 2**62  # the width of a band without an end


class Coverage(IntEnum):
    """How much of a block of (query, key) pairs a rule lets through; MIXED may also mean "not known cheaply"."""

    EMPTY = 0
    MIXED = 1
    FULL = 2


class MaskRule(HoldsTensors):
    """Which (query, key) pairs may attend. Subclasses say `allows`, and where they can, `coverage`."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        """Whether query `q` of batch `b`, head `h` may attend to key `k`: bool, broadcastable to the indices' shape.

        The indices broadcast together; all are 0-d where FlexAttention asks. A dimension that the rule ignores stays 1.
        """
        raise NotImplementedError(f"{type(self).__name__} must define allows(b, h, q, k, T, S)")

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        """Whether the block rows × cols is empty, full or mixed, for every batch and head at once."""
        return Coverage.MIXED

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Raise ShapeError where tensors inside the rule do not fit an attention of this size."""

    @property
    def per_head(self) -> bool:
        """Whether heads may see different keys."""
        return False

    def bind(self, T: int, S: int) -> BoundMask:
        """The rule for T queries and S keys: a FlexAttention `mask_mod` that also gives tiles and block coverage."""
        return BoundMask(self, T, S)

    def draw(self, T: int, S: int, *, batch: int = 0, head: int = 0) -> str:
        """The mask of one batch entry and head as text, ■ for visible; cost O(T·S) characters."""
        tile = self.bind(T, S).tile(slice(0, T), slice(0, S), torch.tensor([batch]), torch.tensor([head]))
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
    def per_head(self) -> bool:
        return self.left.per_head or self.right.per_head


class Both(Pair):
    """Visible where both rules say so."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return self.left.allows(b, h, q, k, T, S) & self.right.allows(b, h, q, k, T, S)

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        return min(self.left.coverage(rows, cols, T, S), self.right.coverage(rows, cols, T, S))

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
    def per_head(self) -> bool:
        return self.rule.per_head

    def __repr__(self) -> str:
        return f"~{self.rule!r}"


# --- rules ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band(MaskRule):
    """Visible iff low <= d < high, where d = position(query) - position(key) is how far back the key lies."""

    low: int
    high: int
    name: str
    upper_left: bool = False

    def _offset(self, T: int, S: int) -> int:
        return 0 if self.upper_left else S - T

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        at = q + self._offset(T, S)  # compared and not subtracted: a difference would be 8 bytes a pair
        near = k <= at - self.low
        return near if self.high == FOREVER else near & (k > at - self.high)

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        offset = self._offset(T, S)
        nearest = rows.start + offset - (cols.stop - 1)
        farthest = rows.stop - 1 + offset - cols.start
        if farthest < self.low or nearest >= self.high:
            return Coverage.EMPTY
        return Coverage.FULL if nearest >= self.low and farthest < self.high else Coverage.MIXED

    def __repr__(self) -> str:
        return self.name


def causal() -> MaskRule:
    """Key s is visible to query t iff s <= t + S - T (lower-right: what a KV cache needs).

    >>> print(causal().draw(3, 3))
    ■ ⬚ ⬚
    ■ ■ ⬚
    ■ ■ ■
    """
    return Band(0, FOREVER, "causal()")


def causal_upper_left() -> MaskRule:
    """Key s is visible to query t iff s <= t, whatever T and S: PyTorch's `is_causal` for T ≠ S.

    >>> print(causal_upper_left().draw(2, 4))
    ■ ⬚ ⬚ ⬚
    ■ ■ ⬚ ⬚
    """
    return Band(0, FOREVER, "causal_upper_left()", upper_left=True)


def sliding_window(width: int) -> MaskRule:
    """The query itself and the width - 1 keys before it (Mistral; nnz = nW - W(W-1)/2). Implies causal.

    >>> print(sliding_window(3).draw(5, 5))
    ■ ⬚ ⬚ ⬚ ⬚
    ■ ■ ⬚ ⬚ ⬚
    ■ ■ ■ ⬚ ⬚
    ⬚ ■ ■ ■ ⬚
    ⬚ ⬚ ■ ■ ■
    """
    check_count("sliding_window", "width", width, at_least=1)
    return Band(0, width, f"sliding_window({width})")


def symmetric_window(width: int) -> MaskRule:
    """Keys at most width // 2 away on either side (Longformer's local attention; nothing causal about it).

    >>> print(symmetric_window(2).draw(4, 4))
    ■ ■ ⬚ ⬚
    ■ ■ ■ ⬚
    ⬚ ■ ■ ■
    ⬚ ⬚ ■ ■
    """
    check_count("symmetric_window", "width", width, at_least=1)
    return Band(-(width // 2), width // 2 + 1, f"symmetric_window({width})")


@dataclass(frozen=True)
class FirstTokens(MaskRule):
    """Visible iff key < count, for one count or one per batch entry."""

    count: int | Tensor  # or (B,)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        if isinstance(self.count, Tensor):
            return k < self.count.to(k.device)[b]
        return k < self.count

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        counts = self.count if isinstance(self.count, Tensor) else torch.tensor([self.count])
        if cols.stop <= int(counts.min()):
            return Coverage.FULL
        return Coverage.EMPTY if cols.start >= int(counts.max()) else Coverage.MIXED

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if isinstance(self.count, Tensor) and self.count.shape != (B,):
            raise ShapeError(
                f"first_tokens: one count per batch entry means shape ({B},), got {tuple(self.count.shape)}."
            )

    def __repr__(self) -> str:
        return f"first_tokens({self.count if isinstance(self.count, int) else f'of {len(self.count)} sequences'})"


def first_tokens(count: int | Tensor) -> MaskRule:
    """Every query sees the first `count` keys (an int, or a tensor (B,)): attention sinks, global tokens.

    >>> print((first_tokens(1) & causal() | sliding_window(2)).draw(4, 4))
    ■ ⬚ ⬚ ⬚
    ■ ■ ⬚ ⬚
    ■ ■ ■ ⬚
    ■ ⬚ ■ ■
    """
    if not isinstance(count, Tensor):
        check_count("first_tokens", "count", count, at_least=0)
    elif count.is_floating_point() or count.dtype == torch.bool:
        raise DTypeError(f"first_tokens(count): expected an integer, or integers (B,), got {describe(count)}.")
    return FirstTokens(count)


def prefix(length: int | Tensor) -> MaskRule:
    """A prefix language model's mask: the prefix sees itself both ways, the rest is causal (T5's prefix-LM).

    >>> print(prefix(2).draw(4, 4))
    ■ ■ ⬚ ⬚
    ■ ■ ⬚ ⬚
    ■ ■ ■ ⬚
    ■ ■ ■ ■
    """
    return causal() | first_tokens(length)


@dataclass(frozen=True, eq=False)
class Padding(MaskRule):
    """Only real tokens are seen, and only real queries see."""

    keys: Tensor | None  # (B, S) bool
    queries: Tensor | None  # (B, T) bool

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        seen = torch.ones((1,) * k.ndim, dtype=torch.bool, device=k.device)
        if self.keys is not None:
            seen = seen & self.keys.to(k.device)[b, k]
        return seen if self.queries is None else seen & self.queries.to(k.device)[b, q]

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        parts = [real[:, part] for real, part in ((self.keys, cols), (self.queries, rows)) if real is not None]
        return min(map(_share, parts))

    def check(self, B: int, H: int, T: int, S: int) -> None:
        for name, real, size in (("keys", self.keys, S), ("queries", self.queries, T)):
            if real is not None and real.shape != (B, size):
                raise ShapeError(
                    f"padding({name}=...): expected shape ({B}, {size}), one flag per token, got {tuple(real.shape)}."
                )

    def __repr__(self) -> str:
        parts = [f"{n}={tuple(t.shape)}" for n, t in (("keys", self.keys), ("queries", self.queries)) if t is not None]
        return f"padding({', '.join(parts)})"


def padding(keys: Tensor | None = None, queries: Tensor | None = None) -> MaskRule:
    """Padding by name: `keys` (B, S) and `queries` (B, T), True or 1 where the token is real.

    A padded key is seen by nobody; a padded query sees nothing, so it has weights 0 and is left out of averages.

    >>> print((causal() & padding(keys=torch.tensor([[0, 1, 1]]))).draw(3, 3))
    ⬚ ⬚ ⬚
    ⬚ ■ ⬚
    ⬚ ■ ■
    """
    if keys is None and queries is None:
        raise ShapeError("padding() needs keys=, queries= or both: (B, S) and (B, T), True where the token is real.")
    return Padding(_flags("keys", keys), _flags("queries", queries))


@dataclass(frozen=True, eq=False)
class Documents(MaskRule):
    """Visible iff query and key lie in the same document."""

    ids: Tensor  # (S,) or (B, S)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        ids = self.ids.to(k.device)
        if ids.ndim == 1:
            return ids[q + S - T] == ids[k]
        return ids[b, q + S - T] == ids[b, k]

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        of_rows = self.ids[..., rows.start + S - T : rows.stop + S - T]
        of_cols = self.ids[..., cols]
        low_r, high_r = of_rows.amin(-1), of_rows.amax(-1)
        low_c, high_c = of_cols.amin(-1), of_cols.amax(-1)
        if bool(((high_r < low_c) | (high_c < low_r)).all()):
            return Coverage.EMPTY
        one = (low_r == high_r) & (low_c == high_c) & (low_r == low_c)
        return Coverage.FULL if bool(one.all()) else Coverage.MIXED

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if T > S:
            raise ShapeError(f"documents(ids): {T} queries but only {S} keys; a query must be one of the keys.")
        if self.ids.shape not in ((S,), (B, S)):
            raise ShapeError(
                f"documents(ids): expected shape ({S},) or ({B}, {S}), a document number per key,"
                f" got {tuple(self.ids.shape)}."
            )

    def __repr__(self) -> str:
        return f"documents({tuple(self.ids.shape)})"


def documents(ids: Tensor) -> MaskRule:
    """Packed sequences: a query sees the keys of its own document. `ids` (S,) or (B, S), a number per token.

    >>> print((documents(torch.tensor([0, 0, 1, 1])) & causal()).draw(4, 4))
    ■ ⬚ ⬚ ⬚
    ■ ■ ⬚ ⬚
    ⬚ ⬚ ■ ⬚
    ⬚ ⬚ ■ ■
    """
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or ids.is_floating_point():
        raise ShapeError(f"documents(ids): expected an integer tensor (S,) or (B, S), got {describe(ids)}.")
    return Documents(ids)


@dataclass(frozen=True, eq=False)
class Dense(MaskRule):
    """A mask that somebody already has as a tensor."""

    mask: Tensor  # (B or 1, H or 1, T or 1, S or 1) bool

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return read_broadcast(self.mask.to(k.device), b, h, q, k)

    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        rows, cols = (part if n > 1 else slice(None) for part, n in zip((rows, cols), self.mask.shape[2:], strict=True))
        return _share(self.mask[:, :, rows, cols])

    def check(self, B: int, H: int, T: int, S: int) -> None:
        check_broadcast("a mask tensor", self.mask, (B, H, T, S))

    @property
    def per_head(self) -> bool:
        return self.mask.shape[1] > 1

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
            " A float mask is added to the scores: pass it as a bias."
        )
    if mask.ndim not in (2, 4):
        raise ShapeError(
            f"dense(mask): expected (T, S) or (B, H, T, S), got {tuple(mask.shape)}. Write (B, 1, T, S) for one mask"
            " per batch entry, (1, H, T, S) for one per head, padding(keys=mask) for a (B, S) padding mask."
        )
    return Dense(mask.bool().expand((1,) * (4 - mask.ndim) + tuple(mask.shape)))


def as_rule(mask: MaskRule | Tensor) -> MaskRule:
    """A rule as it is, a tensor as `dense(tensor)`."""
    if isinstance(mask, MaskRule):
        return mask
    if isinstance(mask, Tensor):
        return dense(mask)
    raise DTypeError(f"expected a mask rule (clearhead.masks) or a bool tensor, got {describe(mask)}.")


# --- helpers ----------------------------------------------------------------------------------------------------


def _share(flags: Tensor) -> Coverage:
    """Whether all of the flags are set, or none."""
    if bool(flags.all()):
        return Coverage.FULL
    return Coverage.MIXED if bool(flags.any()) else Coverage.EMPTY


def _flags(name: str, real: Tensor | None) -> Tensor | None:
    if real is None:
        return None
    if not isinstance(real, Tensor) or real.ndim != 2 or real.is_floating_point():
        raise ShapeError(
            f"padding({name}=...): expected a bool or 0/1 tensor (B, tokens), True where the token is real,"
            f" got {describe(real)}."
        )
    return real.bool()
