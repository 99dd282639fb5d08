"""Rules about what a batch holds: padded tokens, and packed documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import ShapeError
from clearhead.masks.rule import Coverage, MaskRule, check_flags, share, unless_traced


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

    @unless_traced
    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        parts = [real[:, part] for real, part in ((self.keys, cols), (self.queries, rows)) if real is not None]
        return min(map(share, parts))

    @property
    def leads(self) -> tuple[int | None, int | None]:
        return next(len(real) for real in (self.keys, self.queries) if real is not None), None

    def check(self, B: int, H: int, T: int, S: int) -> None:
        for name, real, size in (("keys", self.keys, S), ("queries", self.queries, T)):
            if real is not None and real.shape != (B, size):
                n = real.shape[1]
                got = f"the flags of one text, ({n},) or (1, {n})" if len(real) == 1 else str(tuple(real.shape))
                raise ShapeError(f"padding({name}=...): expected shape ({B}, {size}), one flag per token, got {got}.")

    def __repr__(self) -> str:
        parts = [f"{n}={tuple(t.shape)}" for n, t in (("keys", self.keys), ("queries", self.queries)) if t is not None]
        return f"padding({', '.join(parts)})"


def padding(keys: Tensor | None = None, queries: Tensor | None = None) -> Padding:
    """Padding by name: `keys` (B, S) and `queries` (B, T), True or 1 where the token is real.

    Flags (S,) and (T,) are those of one text, a batch of one. A padded key is seen by nobody; a padded query sees
    nothing, so it has weights 0 and is left out of averages.

    >>> from clearhead.masks import causal
    >>> print((causal() & padding(keys=torch.tensor([0, 1, 1]))).draw(3, 3))
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

    @unless_traced
    def coverage(self, rows: slice, cols: slice, T: int, S: int) -> Coverage:
        of_rows = self.ids[..., rows.start + S - T : rows.stop + S - T]
        of_cols = self.ids[..., cols]
        low_r, high_r = of_rows.amin(-1), of_rows.amax(-1)
        low_c, high_c = of_cols.amin(-1), of_cols.amax(-1)
        if bool(((high_r < low_c) | (high_c < low_r)).all()):
            return Coverage.EMPTY
        one = (low_r == high_r) & (low_c == high_c) & (low_r == low_c)
        return Coverage.FULL if bool(one.all()) else Coverage.MIXED

    @property
    def leads(self) -> tuple[int | None, int | None]:
        return (len(self.ids) if self.ids.ndim == 2 else None), None

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

    >>> from clearhead.masks import causal
    >>> print((documents(torch.tensor([0, 0, 1, 1])) & causal()).draw(4, 4))
    ■ ⬚ ⬚ ⬚
    ■ ■ ⬚ ⬚
    ⬚ ⬚ ■ ⬚
    ⬚ ⬚ ■ ■
    """
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or ids.is_floating_point():
        raise ShapeError(f"documents(ids): expected an integer tensor (S,) or (B, S), got {describe(ids)}.")
    return Documents(ids)


def _flags(name: str, real: Tensor | None) -> Tensor | None:
    """The flags as bool, (B, tokens): those of one text are a batch of one."""
    if real is None:
        return None
    if not isinstance(real, Tensor) or real.ndim not in (1, 2) or real.is_floating_point():
        raise ShapeError(
            f"padding({name}=...): expected a bool or 0/1 tensor (B, tokens) or (tokens,), True where the token is"
            f" real, got {describe(real)}."
        )
    check_flags(f"padding({name}=...)", real)
    return real.bool() if real.ndim == 2 else real.bool()[None]
