"""AttentionMap: the matrix A = softmax(scores) as a lazy operator, and everything that follows from two primitives.

A subclass says `shape` and `tile(rows, cols)`; rows, columns, products, statistics and pictures are derived here in
O(n) memory. Subclasses may override what they know a shorter way to.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from clearhead._checks import check_count, describe, has_numbers, index_tensor, position
from clearhead._format import size
from clearhead.errors import DTypeError, ShapeError
from clearhead.kernels import gradients, tiles
from clearhead.kernels.path import Path, Plan, force
from clearhead.maps import reductions as reduce
from clearhead.maps.reductions import Statistics
from clearhead.maps.transposed import Transposed
from clearhead.masks import Coverage

__all__ = ["AttentionMap", "Selection", "Statistics", "Transposed"]

# One pass over all weights answers these, and some maps have a shorter way.
PASSES = ("statistics", "overview", "entropy", "distance", "received", "mass", "topk", "pool_max", "pool_sum")
QUESTIONS = (*PASSES, "@", "mT @", "pick", "to_dense")
FEW_KEYS = 64  # up to here, gathering each (query, key) pair is cheaper than a pass over all keys


class AttentionMap(ABC):
    """The attention matrix as a lazy operator of shape (…, T, S), usually (B, H, T, S).

    Nothing is computed until it is asked for, and nothing but `to_dense()` makes a (…, T, S) tensor, not even a
    backward pass: what is read can be differentiated, maxima excepted, and then its tiles are computed a second time
    (where `create_graph=True` or `torch.func` differentiate them, they are kept). Indices:

    - `attn[0, 3]`: an integer drops a dimension; slices and lists of batches, heads or queries stay lazy;
    - `attn[0, 3, 17]`, `attn[..., 5]`: an integer query or key index reads weights, a tensor;
    - a slice of keys is `attn.tile(rows, cols)`.

    A row whose query may attend to nothing is all 0. Query t stands at position t + S - T.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(…, T, S)."""

    @abstractmethod
    def tile(self, rows: slice, cols: slice) -> Tensor:
        """The weights of a block, (…, t, s), float32 or wider. `rows` and `cols` are slices with start and stop."""

    # --- what a subclass may know better ----------------------------------------------------------------------

    _leaves: ClassVar[tuple[str, ...]] = ()  # the attributes from which weights are computed, for their gradients

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and statistics."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Where weights and statistics live."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        """The tensors that are held."""
        yield from ()

    @property
    def positions(self) -> Tensor:
        """The key position at which each query stands, (T,): t + S - T."""
        T, S = self.shape[-2:]
        return torch.arange(T, device=self.device) + S - T

    @property
    def heads_alike(self) -> bool:
        """Whether every head is known to see the same keys."""
        return False

    def _whole_rows(self, rows: slice, keys: list[slice]) -> list[Tensor]:
        """The weights of whole rows, which may see these ranges of keys: a tile of each."""
        return [self.tile(rows, cols) for cols in keys]

    def block(self, rows: slice, cols: slice) -> Coverage:
        """Whether the block's weights are all 0 (EMPTY); MIXED where that is not known."""
        return Coverage.MIXED if rows.stop > rows.start and cols.stop > cols.start else Coverage.EMPTY

    def _select(self, lead: tuple[int | Tensor, ...], rows: Tensor | None) -> AttentionMap:
        return Selection(self, lead, rows)

    def _lead_names(self) -> tuple[str, ...]:
        """The letters of the dimensions before T and S; only one called H has heads in groups, or an average."""
        n = len(self.shape) - 2
        return (*(f"n{i}" for i in range(n - 2)), *"BH"[max(0, 2 - n) :])

    def _notes(self) -> list[str]:
        return []

    # --- reading --------------------------------------------------------------------------------------------------

    @property
    def dense_nbytes(self) -> int:
        """What `to_dense()` would take, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        *lead, t, s = self._full_index(index)
        if isinstance(s, slice) and s != slice(None):
            raise IndexError(
                f"{self!r}[…, {_show(s)}]: a slice of keys is read with attn.tile(rows, cols), a tensor;"
                " [] takes batches, heads and queries, and one key."
            )
        if not isinstance(s, (slice, int)):
            raise IndexError(f"{self!r}: several keys at once are read with attn.pick(t, s), a tensor.")
        rows = None if _whole(t) else self._positions_of([t] if isinstance(t, int) else t, self.shape[-2], "query")
        if all(_whole(i) for i in lead) and rows is None:
            chosen: AttentionMap = self
        else:
            chosen = self._select(tuple(self._lead_index(i, n) for i, n in zip(lead, self.shape, strict=False)), rows)
        return chosen._read(t, s)

    def _read(self, t: Any, s: int | slice) -> Any:
        """Weights where an integer query or key was given, the map itself otherwise."""
        S = self.shape[-1]
        if isinstance(s, int):
            column = self.columns(torch.tensor([position(s, S, "key")], device=self.device))[..., 0]
            return column[..., 0] if isinstance(t, int) else column
        if isinstance(t, int):
            return self.to_dense()[..., 0, :]
        return self

    def _lead_index(self, index: Any, n: int) -> int | Tensor:
        if isinstance(index, int):
            return position(index, n, "batch or head")
        return self._positions_of(index, n, "batch or head")

    def _positions_of(self, index: Any, n: int, what: str) -> Tensor:
        at = index_tensor(index, n, what, self.device)
        if at.ndim != 1:
            raise IndexError(f"{self!r}: a {what} index of shape {tuple(at.shape)}; expected one dimension.")
        return at

    def _full_index(self, index: Any) -> list[Any]:
        given = list(index) if isinstance(index, tuple) else [index]
        given = [_plain(i) for i in given]
        rank = len(self.shape)
        if any(i is None or isinstance(i, bool) for i in given):
            raise IndexError(f"{self!r}[{_show(index)}]: an index is an integer, a slice, a list or ….")
        dots = [n for n, i in enumerate(given) if i is Ellipsis]
        if len(dots) > 1 or len(given) - len(dots) > rank:
            raise IndexError(f"{self!r}[{_show(index)}]: too many indices for {rank} dimensions.")
        at = dots[0] if dots else len(given)
        missing = [slice(None)] * (rank - len(given) + len(dots))
        return given[:at] + missing + given[at + len(dots) :]

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        """The weights at pairs (t, s), index tensors that broadcast together.

        Returns (…, *pairs), the map's dtype. Differentiable in q and k. Cost for a SoftmaxMap: O(D) a pair, and
        O(S·D) for the lse of a row where it is not known yet.
        """
        t, s = self._pairs(t, s)
        (picked,) = self._reduce(reduce.Pick(self.shape[:-2], t.reshape(-1), s.reshape(-1), self.like))
        return picked.reshape((*self.shape[:-2], *t.shape))

    def columns(self, keys: Tensor) -> Tensor:
        """The weights on some keys (n,), (…, T, n). Cost for a SoftmaxMap, once lse is known: O(T·n·D)."""
        return self.pick(torch.arange(self.shape[-2], device=self.device)[:, None], keys)

    def _pairs(self, t: Tensor | int, s: Tensor | int) -> tuple[Tensor, Tensor]:
        T, S = self.shape[-2:]
        t, s = index_tensor(t, T, "pick: query", self.device), index_tensor(s, S, "pick: key", self.device)
        try:
            return torch.broadcast_tensors(t, s)  # type: ignore[no-any-return, no-untyped-call]
        except RuntimeError:
            given = f"pick(t {tuple(t.shape)}, s {tuple(s.shape)})"
            raise ShapeError(f"{given}: expected queries and keys whose shapes broadcast together.") from None

    def diagonal(self, offset: int = 0) -> Tensor:
        """The weights at `offset` keys from each query's own position: diagonal(-1) is the previous token.

        Returns (…, L), L the number of queries for which that key exists; for T = S it is torch.diagonal(offset).
        With T ≠ S the main diagonal is lower-right (each query's own position). Cost: O(T·D).
        """
        at = self.positions + offset
        t = ((at >= 0) & (at < self.shape[-1])).nonzero().squeeze(-1)
        return self.pick(t, at[t])

    def to_dense(self) -> Tensor:
        """All weights, (…, T, S): the only way to a T×S tensor. `dense_nbytes` says what it takes."""
        collect = reduce.Collect(self.shape, self.like)
        tiles.stream(self, collect)
        return collect.dense

    # --- products -----------------------------------------------------------------------------------------------

    def __matmul__(self, x: Tensor) -> Tensor:
        """A @ x for x (S, Dx), (…, S, Dx) or grouped (B, G, S, Dx); returns (…, T, Dx). Differentiable.

        A NaN or infinity of x reaches the queries that give it weight, and no other.
        """
        x = self._operand(x, self.shape[-1], "attn @ x", "S")
        return self._product(x, transposed=False)

    @property
    def mT(self) -> Transposed:
        """The transposed operator: `attn.mT @ y` for y (…, T, Dy) is (…, S, Dy)."""
        return Transposed(self)

    def _product(self, x: Tensor, *, transposed: bool) -> Tensor:
        """A x or Aᵀ x; what is not finite reaches only the rows that give it weight (0 · NaN would be NaN)."""
        finite = torch.isfinite(x)
        if not has_numbers(x) or bool(finite.all()):
            return self._finite_product(x, transposed=transposed)
        with force("tiles"):  # elsewhere a weight that is nearly 0 may be rounded to 0, or not
            reached = self._finite_product((~finite).to(x.dtype), transposed=transposed)
        return self._finite_product(x.where(finite, 0), transposed=transposed).masked_fill(reached != 0, torch.nan)

    def _finite_product(self, x: Tensor, *, transposed: bool) -> Tensor:
        size = self.shape[-1 if transposed else -2]
        (product,) = self._reduce(reduce.Product(self.shape[:-2], size, x, self.like, transposed=transposed))
        return product

    def _operand(self, x: Tensor, length: int, call: str, axis: str) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise DTypeError(f"{call} with {describe(x)}: expected a float tensor.")
        if x.ndim < 2 or x.shape[-2] != length or not self._leads_fit(x.shape[:-2]):
            raise ShapeError(f"{call}: {self!r} takes x (…, {axis}={length}, width), got {describe(x)}.")
        return x.to(self.dtype)

    def _leads_fit(self, lead: tuple[int, ...]) -> bool:
        want = self.shape[:-2]
        if len(lead) > len(want):
            return False
        *outer, heads = lead or (1,)
        grouped = self._lead_names()[-1:] == ("H",) and heads > 0 and want[-1] % heads == 0
        fits = all(a in (1, b) for a, b in zip(reversed(outer), reversed(want[:-1]), strict=False))
        return fits and (heads == 1 or heads == (want[-1] if want else 1) or grouped)

    # --- statistics -----------------------------------------------------------------------------------------------

    def entropy(self) -> Tensor:
        """H[t] = -Σ_s A ln A in nats, (…, T); 0 for a query that may attend to nothing. Differentiable."""
        return self._per_query(reduce.entropy)

    def distance(self) -> Tensor:
        """The mean of |position(t) - s| under the row's weights, in tokens, (…, T). Differentiable."""
        return self._per_query(reduce.distance(self.positions))

    def received(self) -> Tensor:
        """Σ_t A[t, s], the attention each key receives, (…, S); summed in float64. Differentiable."""
        (received,) = self._reduce(reduce.PerKey(self.shape[:-2], self.shape[-1], self.like))
        return received

    def mass(self, keys: Tensor | list[int] | int) -> Tensor:
        """The weight each query gives to a set of keys (indices, or a bool tensor (S,)), (…, T). Differentiable.

        Cost: O(T·keys·D) for few keys, one pass otherwise. A key named twice counts once.
        """
        at = torch.unique(index_tensor(keys, self.shape[-1], "mass: key", self.device))
        if at.numel() <= FEW_KEYS:
            return self.columns(at).sum(-1)
        chosen = self.like.new_zeros(self.shape[-1])
        chosen[at] = 1
        return self._per_query(reduce.mass(chosen))

    @torch.no_grad()
    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of every row: (values, indices), each (…, T, k), as torch.topk.

        Where fewer than k keys are visible, the values end in 0. One pass, O(T·k) memory.
        """
        check_count("topk", "k", k, at_least=1)
        if k > self.shape[-1]:
            raise ShapeError(f"topk({k}): {self!r} has {self.shape[-1]} keys; expected 1 <= k <= that.")
        top = reduce.TopK(self.shape[:-2], self.shape[-2], k, self.like)
        self._stream(top)
        return top.result()

    @torch.no_grad()
    def pool_max(self, size: tuple[int, int]) -> Tensor:
        """A picture (…, R, C): pixel (i, j) is the largest weight with ⌊t·R/T⌋ = i, ⌊s·C/S⌋ = j. One pass."""
        return self._pool(size, maximum=True)

    def pool_sum(self, size: tuple[int, int]) -> Tensor:
        """A picture (…, R, C) of sums, in the bins of `pool_max`; all pixels add up to the rows that attend.

        Differentiable.
        """
        return self._pool(size, maximum=False)

    def statistics(self) -> Statistics:
        """Entropy, distance, weight on the first key and on itself, peak, and received attention, in one pass.

        Differentiable, in one more; the two peaks are not.
        """
        return Statistics(*self._reduce(*self._of_statistics()))

    def overview(self, size: tuple[int, int]) -> tuple[Statistics, Tensor]:
        """`statistics()` and `pool_max(size)`, in one pass."""
        *found, picture = self._reduce(*self._of_statistics(), self._picture(size, maximum=True))
        return Statistics(*found), picture

    def _of_statistics(self) -> list[reduce.Summed]:
        lead, (T, S), like = self.shape[:-2], self.shape[-2:], self.like
        measures = (reduce.entropy, reduce.distance(self.positions), reduce.to_first, reduce.to_self(self.positions))
        rows = [reduce.PerQuery(lead, T, like, measure) for measure in measures]
        rows.append(reduce.PerQuery(lead, T, like, reduce.peak, maximum=True))
        return [*rows, reduce.PerKey(lead, S, like), reduce.PerKey(lead, S, like, maximum=True)]

    def uniform(self) -> AttentionMap:
        """The head that spreads evenly over the keys it may see: the baseline of every score of a head.

        Which keys those are, a map that only has weights can tell by the weights: those above 0.
        """
        return Uniform(self)

    def _row_sums(self) -> Tensor:
        """The sum of each row, (…, T): of a softmax 1, or 0 for a query that may attend to nothing."""
        return self._product(self.like.new_ones(self.shape[-1], 1), transposed=False)[..., 0]

    def _per_query(self, measure: reduce.Measure) -> Tensor:
        (per_query,) = self._reduce(reduce.PerQuery(self.shape[:-2], self.shape[-2], self.like, measure))
        return per_query

    def _reduce(self, *reducers: reduce.Summed) -> tuple[Tensor, ...]:
        """One pass; on the graph where gradients are asked for, and then without keeping a tile."""
        return gradients.computed(reduce.Reduction(self, list(reducers)))

    def _stream(self, *reducers: Any) -> None:
        """Show every weight to the reducers, or give them their results in a shorter way."""
        tiles.stream(self, *reducers)

    def plan(self) -> Plan:
        """Which kernel would answer each question, and why: a dict with a line each as its text. Computes nothing.

        The `mass` of few keys is not such a pass: it is answered as `pick` is.
        """
        return Plan({question: self._path(question) for question in QUESTIONS})

    def _path(self, question: str) -> Path:
        return Path("tiles", "PyTorch, tile by tile")

    def _pool(self, size: tuple[int, int], *, maximum: bool) -> Tensor:
        (picture,) = self._reduce(self._picture(size, maximum=maximum))
        return picture

    def _picture(self, size: tuple[int, int], *, maximum: bool) -> reduce.Pool:
        T, S = self.shape[-2:]
        try:
            R, C = map(operator.index, size)
        except (TypeError, ValueError):
            raise ShapeError(f"a picture of size {size!r}: expected (rows, columns), two integers.") from None
        if not (1 <= R <= T and 1 <= C <= S):
            raise ShapeError(f"a picture of {R}×{C} pixels: {self!r} allows 1…{T} rows and 1…{S} columns.")
        return reduce.Pool(self.shape[:-2], T, S, (R, C), self.like, maximum=maximum)

    @property
    def like(self) -> Tensor:
        """An empty tensor with the dtype and device of weights and statistics: `attn.like.new_zeros(…)`."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    # --- pictures and words -------------------------------------------------------------------------------------

    def draw(self) -> Any:
        """A matplotlib figure: every head of the first batch entry; `clearhead.plots.attention` adds tokens."""
        from clearhead.maps.drawing import attention  # matplotlib is an extra, imported where used

        return attention(self)

    def __repr__(self) -> str:
        names = (*self._lead_names(), "T", "S")
        sizes = ", ".join(f"{n}={length}" for n, length in zip(names, self.shape, strict=True))
        notes = ", ".join([sizes, *self._notes(), str(self.dtype).removeprefix("torch.")])
        return f"{type(self).__name__}({notes}; holds {size(self.nbytes)}, dense {size(self.dense_nbytes)})"

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise TypeError(
            f"{what} of {self!r} would take {size(self.dense_nbytes)}: ask for it by name, attn.to_dense(),"
            f" or use {instead}."
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        self._refuse("a NumPy array", "attn.tile(rows, cols) for a block")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration", "attn[b, h] for one head and attn[b, h, t] for one row")

    def __len__(self) -> NoReturn:
        self._refuse("len()", "attn.shape")

    def __bool__(self) -> NoReturn:
        self._refuse("the truth value", "attn.shape")


class Derived(AttentionMap):
    """A map made of one other, which it stands beside: same dtype, device, bytes, positions and dimensions."""

    _leaves: ClassVar[tuple[str, ...]] = ("_attn",)

    def __init__(self, attn: AttentionMap) -> None:
        self._attn = attn

    @property
    def shape(self) -> tuple[int, ...]:
        return self._attn.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._attn.dtype

    @property
    def device(self) -> torch.device:
        return self._attn.device

    @property
    def nbytes(self) -> int:
        return self._attn.nbytes

    def _tensors(self) -> Iterator[Tensor]:
        return self._attn._tensors()

    @property
    def positions(self) -> Tensor:
        return self._attn.positions

    @property
    def heads_alike(self) -> bool:
        return self._attn.heads_alike

    def block(self, rows: slice, cols: slice) -> Coverage:
        return self._attn.block(rows, cols)

    def _lead_names(self) -> tuple[str, ...]:
        return self._attn._lead_names()

    def uniform(self) -> AttentionMap:
        return self._of(self._attn.uniform())

    def _of(self, attn: AttentionMap) -> AttentionMap:
        """The same of another map of the same shape."""
        raise NotImplementedError


class Selection(Derived):
    """Some batches, heads or queries of any map, still lazy."""

    def __init__(self, attn: AttentionMap, lead: tuple[int | Tensor, ...], rows: Tensor | None) -> None:
        super().__init__(attn)
        self._lead = lead
        self._rows = torch.arange(attn.shape[-2], device=attn.device) if rows is None else rows

    @property
    def shape(self) -> tuple[int, ...]:
        kept = (at.numel() for at in self._lead if isinstance(at, Tensor))
        return (*kept, self._rows.numel(), self._attn.shape[-1])

    @property
    def positions(self) -> Tensor:
        return self._attn.positions[self._rows]

    def block(self, rows: slice, cols: slice) -> Coverage:
        t = self._rows[rows]
        if not t.numel() or cols.stop <= cols.start:
            return Coverage.EMPTY
        hull = slice(int(t.min()), int(t.max()) + 1)  # its EMPTY and FULL hold for the queries in it
        return self._attn.block(hull, cols)

    def _lead_names(self) -> tuple[str, ...]:
        named = zip(self._attn._lead_names(), self._lead, strict=True)
        return tuple(name for name, at in named if isinstance(at, Tensor))

    def _of(self, attn: AttentionMap) -> Selection:
        return Selection(attn, self._lead, self._rows)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        parts = [self._attn.tile(run, cols) for run in _runs(self._rows[rows])]
        return pick_lead(torch.cat(parts, -2) if parts else self._attn.tile(slice(0, 0), cols), self._lead)


class Uniform(Derived):
    """Even weights over the keys to which another map gives any."""

    _leaves: ClassVar[tuple[str, ...]] = ()

    def __init__(self, attn: AttentionMap) -> None:
        super().__init__(attn)
        self._seen: Tensor | None = None  # (…, T) how many keys each query sees; counted when first needed

    def uniform(self) -> Uniform:
        return self

    def tile(self, rows: slice, cols: slice) -> Tensor:
        if self._seen is None:
            with torch.no_grad():
                self._seen = self._attn._per_query(lambda tile: (tile.weights > 0).to(self.dtype).sum(-1))
        return (self._attn.tile(rows, cols) > 0) / self._seen[..., rows, None].clamp(min=1)


def pick_lead(weights: Tensor, lead: tuple[int | Tensor, ...]) -> Tensor:
    """Some batches and heads of weights (…, T, S); an integer drops its dimension."""
    for dim in reversed(range(len(lead))):
        at = lead[dim]
        weights = weights.select(dim, at) if isinstance(at, int) else weights.index_select(dim, at)
    return weights


def _runs(rows: Tensor) -> list[slice]:
    """Consecutive row numbers as slices."""
    runs: list[slice] = []
    for t in rows.tolist():
        if runs and runs[-1].stop == t:
            runs[-1] = slice(runs[-1].start, t + 1)
        else:
            runs.append(slice(t, t + 1))
    return runs


def _plain(index: Any) -> Any:
    """NumPy's integers and 0-d integer tensors as the ints they stand for; everything else as it is."""
    if isinstance(index, (np.integer, Tensor, np.ndarray)) and index.ndim == 0:
        return operator.index(index)
    return index


def _whole(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _show(index: Any) -> str:
    if isinstance(index, slice):
        return ":".join("" if part is None else str(part) for part in (index.start, index.stop))
    return str(index)
