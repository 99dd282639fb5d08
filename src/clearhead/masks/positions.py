"""Rules about how far back a key lies, and about the first keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._checks import check_count, describe
from clearhead.errors import DTypeError, ShapeError
from clearhead.masks.rule import Coverage, MaskRule, unless_traced

FOREVER = 2**62  # the width of a band without an end


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

    def interval(self, q: Tensor, T: int, S: int) -> tuple[Tensor, Tensor]:
        at = q + self._offset(T, S)
        return (at - self.high + 1).clamp(min=0), (at - self.low + 1).clamp(max=S)

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
        if isinstance(self.count, Tensor):
            return self._coverage_of_each(rows, cols, T, S)
        if cols.stop <= self.count:
            return Coverage.FULL
        return Coverage.EMPTY if cols.start >= self.count else Coverage.MIXED

    def interval(self, q: Tensor, T: int, S: int) -> tuple[Tensor, Tensor] | None:
        return None if isinstance(self.count, Tensor) else (torch.zeros_like(q), torch.full_like(q, min(self.count, S)))

    @unless_traced
    def _coverage_of_each(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        if not self.count.numel():  # type: ignore[union-attr]
            return Coverage.EMPTY
        least, most = (FirstTokens(int(one)).coverage(rows, cols, T, S) for one in self.count.aminmax())  # type: ignore[union-attr]
        return least if least == most else Coverage.MIXED

    @property
    def leads(self) -> tuple[int | None, int | None]:
        return (len(self.count) if isinstance(self.count, Tensor) else None), None

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
