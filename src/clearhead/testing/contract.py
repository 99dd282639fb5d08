"""The contract: whatever the class, every operation of a map says what its dense weights say.

A check is a function of a `Subject`, registered under its name; `failures` runs them all and says which fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.kernels.tiles import tile_size
from clearhead.maps import AttentionMap, Statistics
from clearhead.testing.budgets import assert_close
from clearhead.testing.memory import Allocations


@dataclass(frozen=True)
class Subject:
    """A map on trial: how it is made, and the weights that it must have."""

    make: Callable[[], AttentionMap]
    exact: Tensor  # (…, T, S) float64, the oracle
    plain: Tensor  # (…, T, S) the textbook's weights in the dtype of statistics
    positions: Tensor | None = None  # (T,) where each query stands among the keys; None: t + S - T
    terms: int = 1  # how many numbers are added up behind one weight
    score: float = 0.0  # the largest |score| of a visible pair, where weights come from scores

    @cached_property
    def attn(self) -> AttentionMap:
        """The map, made once: later checks meet what earlier ones have cached, as users do."""
        return self.make()

    @property
    def size(self) -> tuple[int, int]:
        """(T, S)."""
        return self.exact.shape[-2], self.exact.shape[-1]

    @property
    def at(self) -> Tensor:
        """(T,) the positions of the queries."""
        T, S = self.size
        return torch.arange(T) + S - T if self.positions is None else self.positions

    def agree(
        self, got: object, of: Callable[..., Tensor], what: str, *using: object, terms: int = 1, size: float = 0.0
    ) -> None:
        """`got` is what `of` makes of the oracle, within the budget that `of` of the plain weights sets."""
        exact, plain = of(self.exact, *using), of(self.plain, *using)
        assert_close(got, exact, plain, terms=self.terms + terms, score=self.score, size=size, what=what)

    def agree_on_entropy(self, got: object, what: str, *index: object) -> None:
        """A weight rounded by δ moves -a ln a by |1 + ln a| δ: beside the entropy, the row's whole weight counts."""
        whole = float(self.exact.sum(-1).max()) if self.exact.numel() else 0.0
        self.agree(got, lambda a: _entropy(a[index]), what, terms=self.size[1], size=whole)


Check = Callable[[Subject], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under its name."""
    CHECKS[function.__name__] = function
    return function


def failures(subject: Subject) -> dict[str, str]:
    """The checks that fail, each with its message; an error counts as a failure."""
    found = {}
    for name, run in CHECKS.items():
        try:
            run(subject)
        except Exception as error:  # whatever it is, it belongs in the report
            found[name] = f"{type(error).__name__}: {error}"
    return found


def verify(subject: Subject) -> None:
    """Raise AssertionError that lists every failed check."""
    found = failures(subject)
    if found:
        raise AssertionError(f"{subject.attn!r}\n" + "\n".join(f"  {name}: {text}" for name, text in found.items()))


# --- weights -----------------------------------------------------------------------------------------------


@check
def shape_dtype_and_device(subject: Subject) -> None:
    """Shape as the weights, dtype float32 or wider, and `dense_nbytes` what those would take."""
    attn = subject.attn
    _same(tuple(attn.shape), tuple(subject.exact.shape), "shape")
    _same(attn.dtype, subject.plain.dtype, "dtype")
    _same(attn.device, subject.plain.device, "device")
    _same(attn.dense_nbytes, subject.plain.numel() * subject.plain.element_size(), "dense_nbytes")


@check
def tiles(subject: Subject) -> None:
    """Any block, an empty one and the last row and column included."""
    T, S = subject.size
    for rows in (slice(0, T), slice(T // 3, T // 2 + 1), slice(0, 0), slice(max(0, T - 1), T)):
        for cols in (slice(0, S), slice(S // 4, S // 2), slice(max(0, S - 1), S)):
            rows = slice(rows.start, min(rows.stop, T))
            subject.agree(subject.attn.tile(rows, cols), _at, f"tile({rows}, {cols})", ..., rows, cols)


@check
def to_dense(subject: Subject) -> None:
    """All weights."""
    subject.agree(subject.attn.to_dense(), _at, "to_dense()", ...)


@check
def masked_weights_are_exactly_0(subject: Subject) -> None:
    """Not small: 0."""
    _true((subject.attn.to_dense()[subject.exact == 0] == 0).all(), "a masked pair has weight")


@check
def rows_and_columns(subject: Subject) -> None:
    """Integer indices of queries and keys read weights."""
    attn, (T, S) = subject.attn, subject.size
    if T:
        subject.agree(attn[..., T // 2, :], _at, "attn[..., t, :]", ..., T // 2, slice(None))
        subject.agree(attn[..., -1, :], _at, "attn[..., -1, :]", ..., -1, slice(None))
    if S:
        subject.agree(attn[..., S // 3], _at, "attn[..., s]", ..., S // 3)
        subject.agree(attn[..., : T // 2, -1], _at, "attn[..., :t, -1]", ..., slice(T // 2), -1)
    if T and S:
        subject.agree(attn[..., T // 2, S // 2], _at, "attn[..., t, s]", ..., T // 2, S // 2)


@check
def pick(subject: Subject) -> None:
    """Pairs of any shape that broadcast, negative ones included."""
    T, S = subject.size
    if not (T and S):
        return
    t, s = _indices(T, 12).reshape(3, 4), _indices(S, 4) - S  # negative ones count from the end
    subject.agree(subject.attn.pick(t, s), _at, "pick((3, 4), (4,))", ..., t, s)
    subject.agree(subject.attn.pick(-1, 0), _at, "pick(-1, 0)", ..., -1, 0)


@check
def diagonal(subject: Subject) -> None:
    """Offsets from each query's own position, wherever it stands."""
    for offset in (0, -1, 2):
        at = subject.at + offset
        t = ((at >= 0) & (at < subject.size[1])).nonzero().squeeze(-1)
        s = at[t]
        subject.agree(subject.attn.diagonal(offset), _at, f"diagonal({offset})", ..., t, s)


# --- selections --------------------------------------------------------------------------------------------


@check
def selection_stays_lazy(subject: Subject) -> None:
    """Slices and lists of queries give maps."""
    attn, (T, _) = subject.attn, subject.size
    _true(attn[...] is attn, "attn[...] is not the map itself")
    rows = list(range(T))[1::2]
    for index in ((..., slice(1, None), slice(None)), (..., rows, slice(None))):
        part = attn[index]
        _true(isinstance(part, AttentionMap), f"attn[{index}] is {type(part).__name__}, not a map")
        subject.agree(part.to_dense(), _at, f"attn[{index}].to_dense()", *index)
        subject.agree_on_entropy(part.entropy(), f"attn[{index}].entropy()", *index)


@check
def leading_indices(subject: Subject) -> None:
    """Integers, slices and lists of batches and heads give maps."""
    for dim, n in enumerate(subject.exact.shape[:-2]):
        for index in (n - 1, list(range(n))[::-1], slice(0, 1)):
            where = (slice(None),) * dim + (index,)
            part = subject.attn[where]
            _true(isinstance(part, AttentionMap), f"attn[{where}] is not a map")
            subject.agree(part.to_dense(), _at, f"attn[{where}].to_dense()", *where)


@check
def positions_follow_selection(subject: Subject) -> None:
    """A selected query keeps its position."""
    rows = list(range(subject.size[0]))[::-2]
    part = subject.attn[..., rows, :]
    subject.agree(part.distance(), lambda a: _distance(a, subject.at)[..., rows], "attn[..., rows, :].distance()")


# --- products ----------------------------------------------------------------------------------------------


@check
def product(subject: Subject) -> None:
    """A x, for x without and with leading dimensions."""
    S = subject.size[1]
    for lead in _leads(subject):
        x = _numbers(*lead, S, 3).to(subject.plain.dtype)
        subject.agree(subject.attn @ x, _times, f"attn @ {tuple(x.shape)}", x, terms=S)


@check
def product_of_grouped_heads(subject: Subject) -> None:
    """Query head h reads head h // (H/G) of x: interleaved, not tiled."""
    if len(subject.exact.shape) != 4 or subject.exact.shape[1] % 2:
        return
    B, H, _, S = subject.exact.shape
    x = _numbers(B, H // 2, S, 3).to(subject.plain.dtype)
    subject.agree(subject.attn @ x, _times, "attn @ grouped x", x.repeat_interleave(2, 1), terms=S)


@check
def transposed_product(subject: Subject) -> None:
    """Aᵀ y."""
    T = subject.size[0]
    for lead in _leads(subject):
        y = _numbers(*lead, T, 2).to(subject.plain.dtype)
        got = subject.attn.mT @ y
        subject.agree(got, _transposed_times, f"attn.mT @ {tuple(y.shape)}", y, terms=T)


@check
def adjoint(subject: Subject) -> None:
    """(A v) · w = v · (Aᵀ w)."""
    T, S = subject.size
    v, w = _numbers(S, 2)[:, :1].to(subject.plain.dtype), _numbers(T, 2)[:, 1:].to(subject.plain.dtype)
    left = ((subject.attn @ v).double() * w.double()).sum((-1, -2))
    right = (v.double() * (subject.attn.mT @ w).double()).sum((-1, -2))

    def size(a: Tensor) -> Tensor:  # the sum of magnitudes bounds what rounding can do
        return (a.double() @ v.abs().double() * w.abs().double()).sum((-1, -2))

    allowed = torch.finfo(subject.plain.dtype).eps * sum(subject.size) ** 0.5 * size(subject.plain)
    _true(
        ((left - right).abs() <= allowed).all(),
        f"(A v)·w and v·(Aᵀ w) differ by {(left - right).abs().amax():.3g}",
    )


@check
def nan_reaches_only_who_gives_it_weight(subject: Subject) -> None:
    """0 · NaN is 0 here."""
    T, S = subject.size
    if not (T and S):
        return
    x, y = torch.ones(S, 1, dtype=subject.plain.dtype), torch.ones(T, 1, dtype=subject.plain.dtype)
    x[S // 2], y[T // 2] = torch.nan, torch.nan
    got = subject.attn.to_dense()
    _same((subject.attn @ x)[..., 0].isnan().tolist(), (got[..., S // 2] > 0).tolist(), "rows that are NaN")
    _same(
        (subject.attn.mT @ y)[..., 0].isnan().tolist(),
        (got[..., T // 2, :] > 0).tolist(),
        "columns that are NaN",
    )


# --- statistics --------------------------------------------------------------------------------------------


@check
def rows_sum_to_at_most_1(subject: Subject) -> None:
    """1, or 0 for an empty row, or less with learned sinks."""
    ones = torch.ones(subject.size[1], 1, dtype=subject.plain.dtype)
    subject.agree((subject.attn @ ones)[..., 0], lambda a: a.sum(-1), "row sums", terms=subject.size[1])


@check
def entropy(subject: Subject) -> None:
    """-Σ A ln A, nats."""
    subject.agree_on_entropy(subject.attn.entropy(), "entropy()", ...)


@check
def distance(subject: Subject) -> None:
    """Σ A |position(t) - s|, tokens."""
    got = subject.attn.distance()
    subject.agree(got, lambda a: _distance(a, subject.at), "distance()", terms=subject.size[1])


@check
def received(subject: Subject) -> None:
    """Column sums."""
    subject.agree(subject.attn.received(), _received, "received()", terms=subject.size[0])


@check
def mass(subject: Subject) -> None:
    """Sets of keys: by index, by bool, none, and named twice."""
    S = subject.size[1]
    flags = torch.arange(S) % 3 == 1
    many = list(range(S))[::2] * 2  # named twice, counted once
    for keys, at in (
        (flags, flags),
        (many, torch.unique(torch.tensor(many, dtype=torch.long))),
        ([], slice(0, 0)),
    ):
        got = subject.attn.mass(keys)
        subject.agree(got, _mass, "mass(keys)", at, terms=S)
    if S:
        subject.agree(subject.attn.mass(0), _at, "mass(0)", ..., 0)
        subject.agree(
            subject.attn.mass([S - 1, 0]),
            _mass,
            "mass([-1, 0])",
            list({0, S - 1}),
            terms=2,
        )


@check
def topk(subject: Subject) -> None:
    """Largest first, every key once."""
    S = subject.size[1]
    for k in sorted({min(S, 1), min(S, 4), S if S < 50 else 1}):
        if k:
            values, indices = subject.attn.topk(k)
            subject.agree(values, _largest, f"topk({k}).values", k)
            at = values > 0
            found = subject.attn.to_dense().gather(-1, indices)
            subject.agree(torch.where(at, found, 0.0), _largest, f"weights at topk({k}).indices", k)
            taken = indices.masked_fill(~at, -1).sort(-1).values.diff(dim=-1)
            _true(
                ((taken != 0) | (~at).sort(-1, descending=True).values[..., 1:]).all(),
                "topk names a key twice",
            )


@check
def pool_max(subject: Subject) -> None:
    """Maxima over the bins ⌊t·R/T⌋, ⌊s·C/S⌋."""
    for size in _pictures(subject):
        subject.agree(subject.attn.pool_max(size), _pool, f"pool_max({size})", size, True)


@check
def pool_sum(subject: Subject) -> None:
    """Sums over the same bins."""
    for size in _pictures(subject):
        got = subject.attn.pool_sum(size)
        terms = sum(subject.size)
        subject.agree(got, _pool, f"pool_sum({size})", size, False, terms=terms)


@check
def statistics(subject: Subject) -> None:
    """One pass says what the single methods say."""
    (T, S), at = subject.size, subject.at
    got = subject.attn.statistics()
    here = (at >= 0) & (at < S)
    of: dict[str, Callable[[Tensor], Tensor]] = {
        "distance": lambda a: _distance(a, at),
        "to_first": lambda a: a[..., 0] if S else a.new_zeros(a.shape[:-1]),
        "to_self": lambda a: _pad(a)[..., torch.arange(T), torch.where(here, at, S)],
        "peak": lambda a: _pad(a).amax(-1),
        "received": _received,
        "received_peak": lambda a: a.amax(-2) if T else a.new_zeros((*a.shape[:-2], S)),
    }
    _same(sorted([*of, "entropy"]), sorted(f.name for f in fields(Statistics)), "fields of Statistics")
    subject.agree_on_entropy(got.entropy, "statistics().entropy", ...)
    for name, oracle in of.items():
        subject.agree(getattr(got, name), oracle, f"statistics().{name}", terms=max(T, S))


@check
def empty_rows_are_0(subject: Subject) -> None:
    """Every statistic of a query that may attend to nothing is 0."""
    empty = subject.exact.sum(-1) == 0
    found = subject.attn.statistics()
    for name in ("entropy", "distance", "to_first", "to_self", "peak"):
        _true((getattr(found, name)[empty] == 0).all(), f"{name} of a row with nothing to attend to is not 0")


@check
def tile_size_changes_nothing(subject: Subject) -> None:
    """Not bit for bit (the parts of a row's sum are added in another order), but within the same budget."""
    T, S = subject.size
    with tile_size(T // 2 + 1, S // 4 + 1):
        fresh = subject.make()
        subject.agree_on_entropy(fresh.entropy(), "entropy() in other tiles", ...)
        subject.agree(fresh.received(), _received, "received() in other tiles", terms=T)
        subject.agree(fresh.to_dense(), _at, "to_dense() in other tiles", ...)


# --- what a map refuses ------------------------------------------------------------------------------------


@check
def nothing_becomes_dense_by_accident(subject: Subject) -> None:
    """NumPy, iteration, truth and length are refused and name `to_dense()`."""
    attn = subject.attn
    for name, use in (("np.asarray", np.asarray), ("iter", iter), ("bool", bool), ("len", len)):
        _raises(TypeError, "to_dense()", partial(use, attn), name)


@check
def bad_indices_are_refused(subject: Subject) -> None:
    """Each with a message that says what to do."""
    attn, (T, S) = subject.attn, subject.size
    _raises(IndexError, r"attn.tile", lambda: attn[..., 0:1], "a slice of keys")
    _raises(IndexError, r"out of range", lambda: attn[..., T, :], "a query too many")
    _raises(IndexError, r"out of range", lambda: attn[..., S], "a key too many")
    _raises(IndexError, r"too many indices", lambda: attn[(0,) * (len(attn.shape) + 1)], "an index too many")
    _raises(IndexError, r"an index is", lambda: attn[None], "None")
    _raises(ValueError, r"topk", lambda: attn.topk(S + 1), "topk of more keys than there are")
    _raises(ValueError, r"pixels", lambda: attn.pool_max((T + 1, 1)), "more pixels than queries")
    _raises(ValueError, r"takes x", lambda: attn @ torch.ones(S + 1, 1), "x of another length")
    _raises(TypeError, r"float tensor", lambda: attn @ torch.ones(S, 1, dtype=torch.long), "x of integers")


@check
def repr_computes_nothing(subject: Subject) -> None:
    """Sizes come from shapes alone."""
    fresh = subject.make()
    with Allocations() as allocations:
        text = repr(fresh)
    _same(allocations.calls, 0, "operations that repr runs")
    for part in (f"T={subject.size[0]}", f"S={subject.size[1]}", "dense "):
        _true(part in text, f"repr does not say {part!r}: {text}")


# --- oracles, in any float dtype ---------------------------------------------------------------------------


def _at(a: Tensor, *index: Any) -> Tensor:
    return a[index]


def _times(a: Tensor, x: Tensor) -> Tensor:
    return a @ x.to(a.dtype)


def _transposed_times(a: Tensor, y: Tensor) -> Tensor:
    return a.mT @ y.to(a.dtype)


def _mass(a: Tensor, keys: Any) -> Tensor:
    return a[..., keys].sum(-1)


def _largest(a: Tensor, k: int) -> Tensor:
    return a.topk(k).values


def _entropy(a: Tensor) -> Tensor:
    return -torch.where(a > 0, a * torch.log(torch.where(a > 0, a, 1.0)), 0.0).sum(-1)


def _distance(a: Tensor, at: Tensor) -> Tensor:
    return (a * (at[:, None] - torch.arange(a.shape[-1])).abs().to(a.dtype)).sum(-1)


def _received(a: Tensor) -> Tensor:
    return a.sum(-2)


def _pool(a: Tensor, size: tuple[int, int], maximum: bool) -> Tensor:
    """Bin by bin: ⌊t·R/T⌋ = i, ⌊s·C/S⌋ = j."""
    for dim, bins in zip((-2, -1), size, strict=True):
        n = a.shape[dim]
        parts = [a.index_select(dim, (torch.arange(n) * bins // n == i).nonzero().squeeze(-1)) for i in range(bins)]
        a = torch.stack([p.amax(dim) if maximum else p.sum(dim) for p in parts], dim)
    return a


def _pad(a: Tensor) -> Tensor:
    """One more key of weight 0, for what lies outside."""
    return torch.nn.functional.pad(a, (0, 1))


# --- helpers -----------------------------------------------------------------------------------------------


def _numbers(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=torch.float64)


def _indices(n: int, count: int) -> Tensor:
    return torch.randint(0, n, (count,), generator=torch.Generator().manual_seed(n))


def _leads(subject: Subject) -> list[tuple[int, ...]]:
    """Nothing in front of (S, width), and everything."""
    lead = tuple(subject.exact.shape[:-2])
    return [(), lead] if lead else [()]


def _pictures(subject: Subject) -> list[tuple[int, int]]:
    T, S = subject.size
    return [(max(1, min(T, 7)), max(1, min(S, 5))), (T, 1)] if T and S and T < 200 else [(7, 5)] if T and S else []


def _same(got: object, want: object, what: str) -> None:
    if got != want:
        raise AssertionError(f"{what}: got {got}, expected {want}")


def _true(condition: bool | Tensor, otherwise: str) -> None:
    if not bool(condition):
        raise AssertionError(otherwise)


def _raises(kind: type[Exception], message: str, call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind as error:
        _true(message in str(error), f"{what}: the message does not say {message!r}: {error}")
    else:
        raise AssertionError(f"{what} is not refused")
