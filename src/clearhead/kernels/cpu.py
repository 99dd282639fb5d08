"""All statistics of softmax attention in one pass on the CPU: each block of scores is read while it is in cache.

One matrix product gives the scores of some queries, of all heads that share a key head, on every key that they may
see; compiled loops (`cpu_tile.py`) say everything about them before the next block takes their place. Rows are whole,
so that their log-sum-exp need not be known; where it is, the pass is a little faster.

One worker a core, each with the matrix products of a single thread: which worker computes which block is fixed, so
that the same call gives the same bits. Column sums are carried from block to block in float64.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.kernels.cpu_layout import STEP, Layout, Layouts
from clearhead.kernels.tiles import Bounded
from clearhead.kernels.workers import together

# Measured (9 heads, 4,096 tokens, causal, two cores with 2 MB of cache each): 96 … 192 rows within 3 %.
ROWS = 128  # queries a block, of all heads that share a product
FEWEST = 64  # fewer make the product slow: all keys are read for each block (65,536: 0.63 of the time with 16)
SCORES = 1 << 20  # 4 MB: more would not stay in cache
GAP = 16  # unused scores at the end of a row: rows a power of two apart would fight for one place in the cache
LARGEST = 2.0**30  # powers of 2 in a row's lse: scores are then rounded by 32 of them, and beyond 127 is no float
REMEMBERED = 256  # keys a row: so much of a mask is remembered from one key head to the next


class Above(Protocol):
    """Who wants the weights at or above a threshold."""

    threshold: float

    def take_some(self, rows: slice, heads: slice, counts: Any, keys: Any, weights: Any) -> None:
        """Those of some rows and heads, in this order; counts (heads, rows). Several threads may call."""


class Part(Protocol):
    """One batch entry, and the query heads that share a key head."""

    def moved(self, scores: Tensor, rows: slice, cols: slice) -> Tensor:
        """Scores (1, h, t, s) after soft-cap and bias."""

    def hidden(self, rows: slice, cols: slice) -> Tensor:
        """What the mask hides of a block, bool (1, h or 1, t, s)."""


@dataclass(frozen=True)
class Source:
    """What a pass needs to know of softmax(scale · Q Kᵀ, moved and masked)."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    scale: float
    positions: Tensor  # (T,)
    bounded: Bounded
    part: Callable[[int, slice], Part]
    interval: tuple[Tensor, Tensor] | None = None  # (T,) each query's first key and the one after its last, if known
    lse: Tensor | None = None  # (B, H, T)
    sinks: Tensor | None = None  # (H,)
    is_moved: bool = False  # whether there is a soft-cap or a bias
    is_alike: bool = True  # whether all batch entries and heads see the same keys


@dataclass(frozen=True)
class Wanted:
    """What a pass is to find; what is left out is not computed."""

    rows: bool = False
    columns: bool = False
    picture: tuple[int, int] | None = None
    best: int = 0
    blocks: int = 0  # queries and keys of a block whose largest weight is wanted
    above: Above | None = None  # of a map with one batch entry
    values: Tensor | None = None  # (S,): then the moment of a row is Σ A · values, else Σ A · |position - s|


@dataclass(frozen=True)
class Found:
    """What was found, float32; a query that may attend to nothing has lse -inf and 0 elsewhere. None: not wanted."""

    lse: Tensor  # (B, H, T)
    best: tuple[Tensor, Tensor]  # weights and keys, (B, H, T, k)
    entropy: Tensor | None = None  # (B, H, T), as are the next four
    moment: Tensor | None = None
    to_first: Tensor | None = None
    to_self: Tensor | None = None
    peak: Tensor | None = None
    received: Tensor | None = None  # (B, H, S), as is the next
    received_peak: Tensor | None = None
    picture_sum: Tensor | None = None  # (B, H, R, C), as is the next
    picture_max: Tensor | None = None
    blocks: Tensor | None = None  # (B, H, ⌈T/side⌉, ⌈S/side⌉)


def _tile() -> Any:
    """The compiled loops; numba is imported here, where it is used."""
    from clearhead.kernels import cpu_tile

    return cpu_tile


@cache
def missing() -> str | None:
    """Why there are no compiled loops here; None where there are."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    try:
        _tile()
    except ImportError as error:
        return f"numba does not load: {error}"
    return "numba is told not to compile (NUMBA_DISABLE_JIT)" if _tile().DISABLED else None


def look(source: Source, wanted: Wanted, threads: int) -> Found | None:
    """One pass. None where scores are not finite, or so large that y would be rounded by more than it may be: tiles."""
    work = _Pass(source, wanted)
    workers = max(1, min(threads, work.B * work.G * len(work.layouts)))
    shares = [_Share(work, n, workers) for n in range(workers)]
    together([share.run for share in shares])
    return _found(work, shares)


class _Pass:
    """What all workers share: what is given, where rows go, and how blocks are laid out."""

    def __init__(self, source: Source, wanted: Wanted) -> None:
        self.tile = _tile()
        self.source, self.wanted = source, wanted
        self.B, self.H, self.T, self.D = source.q.shape
        self.G, self.S = source.k.shape[1:3]
        self.heads = self.H // max(1, self.G)
        lowest = max(1, FEWEST // max(1, self.heads))
        ends = None if source.interval is None else (source.interval[0].numpy(), source.interval[1].numpy())
        self.layouts = Layouts(source.bounded, ends, self.T, self.S, ROWS, lowest, SCORES // max(1, self.heads))
        self.given = _given(source, wanted)
        self.rows, self.best, self._peaks = self._rows(), self._best(), self._block_peaks()

    def _rows(self) -> Any:
        every = (self.B, self.H, self.T)
        sizes = [every] * 2 + [every if self.wanted.rows else (0, 0, 0)] * 6
        rows = self.tile.Rows(*(np.zeros(size, np.float32) for size in sizes))
        rows.first[:] = rows.itself[:] = -np.inf
        return rows

    def _best(self) -> Any:
        size = (self.B, self.H, self.T, self.wanted.best)
        return self.tile.Best(np.full(size, -np.inf, np.float32), np.zeros(size, np.int64))

    def _block_peaks(self) -> Any:
        side = self.wanted.blocks
        size = (self.B, self.H, -(-self.T // side), -(-self.S // side)) if side else (0, 0, 0, 0)
        return np.zeros(size, np.float32)

    def columns(self) -> Any:
        """A worker's own columns and picture."""
        heads, nothing = (self.B, self.H), (0, 0, 0)
        wanted, side = self.wanted, self.wanted.blocks
        keys = (*heads, self.S) if wanted.columns else nothing
        picture = (*heads, *wanted.picture) if wanted.picture else (*nothing, 0)
        scratch = self.layouts.widest if wanted.columns or wanted.picture or side else 0
        pixels = blocks = [np.zeros(0, np.int64)] * 2
        peaks = self._peaks
        if side:
            blocks = [np.arange(n) // side for n in (self.T, self.S)]
            peaks = peaks if ROWS % side == 0 else self._block_peaks()  # else two workers may raise one row
        if wanted.picture:
            sizes = zip((self.T, self.S), wanted.picture, strict=True)
            pixels = [np.arange(n) * bins // n for n, bins in sizes]
        sums = [np.zeros(size, dtype) for size in (keys, picture) for dtype in (np.float64, np.float32)]
        rows = [np.zeros(scratch, np.float32) for _ in range(2)]
        return self.tile.Columns(*rows, *sums[:2], *pixels, *sums[2:], *blocks, peaks)


def _given(source: Source, wanted: Wanted) -> Any:
    """What the compiled loops read."""
    at = source.positions
    if wanted.values is not None:
        vector, offsets = wanted.values, torch.zeros_like(at)
    else:  # |position - s| for every s is a part of …, 2, 1, 0, 1, 2, …
        low, high = (int(end) for end in at.aminmax()) if at.numel() else (0, 0)
        vector, offsets = torch.arange(-high, source.k.shape[2] - low, device=at.device).abs(), high - at
    known = (at.new_empty(0, 0, 0, dtype=torch.float32),) * 2
    if source.lse is not None and not wanted.blocks and wanted.above is None:
        powers = source.lse.double() * float(_tile().LOG2E)
        reference = powers.round().nan_to_num(neginf=0)  # of a query that may attend to nothing
        known = reference.float(), (powers - reference).exp2().float()
    sinks = at.new_empty(0, dtype=torch.float32) if source.sinks is None else source.sinks.float()
    ends = (at.new_empty(0),) * 2 if source.interval is None else source.interval
    tensors = (*known, sinks, *ends, at, F.pad(vector.float(), (0, STEP)), offsets)
    return _tile().Given(*(x.detach().contiguous().numpy() for x in tensors))


class _Room(NamedTuple):
    """A worker's room for one block: the same for all heads."""

    queries: slice  # of all that share a key head
    products: list[tuple[Tensor, Tensor]]  # the keys that they are multiplied by, and where the product goes
    block: Any  # the scores, and what is hidden of them where that is the same for all heads


class _Share:
    """The blocks of one worker."""

    def __init__(self, work: _Pass, number: int, workers: int) -> None:
        self.work, self._turns = work, _turns(work, number, workers)
        self.columns = work.columns()
        height, lowest = (n * work.heads for n in (work.layouts.height, work.layouts.lowest))
        size = max(SCORES, lowest * work.layouts.widest) + height * GAP
        self._keys, self._scores = (work.source.q.new_empty(n, dtype=torch.float32) for n in ((work.D, work.S), size))
        self._rooms: dict[int, _Room] = {}
        above = work.wanted.above
        most = 0 if above is None else height * int(1.01 / above.threshold + 1)
        self._chosen = np.zeros(most, np.int64), np.zeros(most, np.float32)

    def run(self) -> None:
        """Block by block."""
        work, before = self.work, None
        for b, g, n in self._turns:
            if before != (b, g):
                before, heads = (b, g), slice(g * work.heads, (g + 1) * work.heads)
                part = work.source.part(b, heads)
                queries = work.source.q[b, heads].transpose(0, 1).reshape(-1, work.D).float()  # (T · heads, D)
                self._keys.copy_(work.source.k[b, g].T).mul_(work.source.scale)
            for layout in work.layouts[n]:
                if layout.width:
                    self._look(part, queries, b, heads.start, layout)

    def _look(self, part: Part, queries: Tensor, b: int, first: int, layout: Layout) -> None:
        work, start = self.work, layout.rows.start
        room = self._rooms.get(start) or self._room(layout, part)
        left = queries[room.queries]
        for right, out in room.products:
            torch.mm(left, right, out=out)
        if work.source.is_moved:
            self._move(part, layout, room)
        block = room.block
        if block.hidden is None:
            block = block._replace(hidden=layout.hidden(part.hidden))
        chosen = self._room_to_choose(layout.height)
        work.tile.look(block, work.heads, b, first, start, work.given, work.rows, self.columns, work.best, chosen)
        if work.wanted.above is not None:
            keys, weights = (some[: chosen.at[0]] for some in self._chosen)
            heads = slice(first, first + work.heads)
            work.wanted.above.take_some(layout.rows, heads, chosen.counts, keys, weights)

    def _room_to_choose(self, rows: int) -> Any:
        above, size = self.work.wanted.above, (self.work.heads, rows)
        counts = np.zeros((0, 0) if above is None else size, np.int32)
        threshold = np.full(1, 2.0 if above is None else above.threshold, np.float32)
        return self.work.tile.Chosen(*self._chosen, counts, np.zeros(1, np.int64), threshold)

    def _room(self, layout: Layout, part: Part) -> _Room:
        """Made once a layout: slices of tensors take longer than one would think."""
        heads = self.work.heads
        n = layout.height * heads
        scores = self._scores[: n * (layout.width + GAP)].view(n, -1)
        products = [
            (self._keys[:, key : key + keys], scores[:, column : column + keys])
            for column, _, key, keys in layout.runs.tolist()
        ]
        few = sum(cols.stop - cols.start for cols in layout.partly) <= REMEMBERED
        hidden = layout.hidden(part.hidden) if few and (self.work.source.is_alike or not layout.partly) else None
        block = self.work.tile.Block(scores.numpy(), layout.runs, hidden, layout.spots)
        room = _Room(slice(layout.rows.start * heads, layout.rows.stop * heads), products, block)
        return self._rooms.setdefault(layout.rows.start, room)

    def _move(self, part: Part, layout: Layout, room: _Room) -> None:
        """Soft-cap and bias."""
        for (*_, key, keys), (_, scores) in zip(layout.runs.tolist(), room.products, strict=True):
            heads = scores.reshape(layout.height, -1, keys).transpose(0, 1)[None]  # (1, heads, rows, keys)
            heads.copy_(part.moved(heads, layout.rows, slice(key, key + keys)))


def _turns(work: _Pass, number: int, workers: int) -> Iterator[tuple[int, int, int]]:
    """A worker's blocks: batch entry, key head, and rows.

    As many key heads as can be are one worker's own. The blocks of the others are dealt out: of each turn a worker has
    the first and the last, so that all have as many long rows of a causal map. These come first: a short block would
    be done before another thread could begin.
    """
    groups, rows, turn = list(product(range(work.B), range(work.G))), len(work.layouts), 2 * workers
    own = len(groups) - len(groups) % workers
    for at, (b, g) in enumerate(groups):
        for n in reversed(range(rows)):
            dealt = ((at - own) * rows + n) % turn in (number, turn - 1 - number)
            if dealt if at >= own else at % workers == number:
                yield b, g, n


def _found(work: _Pass, shares: list[_Share]) -> Found | None:
    """The shares together, and what follows from each row's sums."""
    r, normaliser, total, inner, moment, most, first, itself = (torch.from_numpy(x) for x in work.rows)
    if not bool(torch.isfinite(normaliser).all()) or bool((r.abs() > LARGEST).any()):
        return None
    log2e, log2 = float(work.tile.LOG2E), normaliser.double().log2()
    lse = (r + log2) / log2e
    if work.source.sinks is not None:  # rows that see nothing were not looked at
        lse = torch.where(normaliser == 0, work.source.sinks.double()[:, None], lse)
    found = {"lse": lse}
    if work.wanted.rows:
        entropy = (log2.clamp(min=-1e9).float() * total - inner) * math.log(2)
        to_first, to_self = ((score.double() * log2e - r).float().exp2() for score in (first, itself))
        share = normaliser.reciprocal().masked_fill(normaliser == 0, 0)
        rows = {"entropy": entropy.clamp(min=0), "moment": moment, "to_first": to_first, "to_self": to_self}
        found |= {name: x * share for name, x in (rows | {"peak": most}).items()}
    columns = [share.columns for share in shares]
    if work.wanted.columns:
        found["received"] = torch.from_numpy(sum(x.received for x in columns))
        found["received_peak"] = torch.from_numpy(np.maximum.reduce([x.received_peak for x in columns]))
    if work.wanted.picture:
        found["picture_sum"] = torch.from_numpy(sum(x.picture_sums for x in columns))
        found["picture_max"] = torch.from_numpy(np.maximum.reduce([x.picture_peaks for x in columns]))
    if work.wanted.blocks:
        peaks = list({id(x.block_peaks): x.block_peaks for x in columns}.values())
        found["blocks"] = torch.from_numpy(peaks[0] if len(peaks) == 1 else np.maximum.reduce(peaks))
    scores, keys = (torch.from_numpy(x) for x in work.best)
    weights = torch.exp(scores.double() - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return Found(best=(weights.float(), keys), **{name: x.float() for name, x in found.items()})
