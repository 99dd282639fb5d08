"""Compiled loops over a block of scores while it is in cache: one pass over each row, and one over four rows at once.

A row of scores s is read as powers of 2, e = 2^y with y = s · log₂e - r, where r is a whole number near the row's
largest y: so scaling costs nothing, and the exponential is a polynomial and a shift. Everything is a sum or a maximum
of e, divided by the row's sum in the end. Loops hold 16 numbers at a time: no infinity or NaN may be assumed away
(masked scores are -inf), so of the fast-math flags only those are set that let sums be taken in another order.

This file imports numba, and is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

DISABLED = bool(config.DISABLE_JIT)  # type: ignore[attr-defined]
PADDING = 64  # rows are filled up to a multiple, with scores of -inf: no loop has a tail

f32 = np.float32
LOG2E = f32(1.4426950408889634)
# 2^f = 1 + f·(C1 + f·(C2 + …)) on [-1/2, 1/2], fitted to the largest relative error, 9.2e-8; 1.8e-7 once rounded.
C1, C2, C3, C4, C5 = (f32(c) for c in (0.69314698, 0.24022242, 0.05550734, 0.00967152, 0.00132647))
# Added to y, it leaves y rounded to a whole number in the last bits, and 127, a float's exponent of 1, beside it.
ROUND = f32(1.5 * 2**23 + 127)
LOWEST = f32(-127)  # 2^-127 comes out as 0
ZERO, ONE, NOTHING = f32(0), f32(1), f32(-np.inf)

Function = Callable[..., Any]
_compile: Function = njit
_intrinsic: Function = intrinsic
_sums = partial(_compile, fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy", forceinline=True)
_exact = partial(_compile, fastmath={"contract"}, error_model="numpy", forceinline=True)


def _entry(function: Function) -> Function:
    """Compiled, and kept on disk where there is a place that can be written to."""
    compiled: Function = partial(_sums, forceinline=False, nogil=True)
    try:
        return compiled(function, cache=True)  # type: ignore[no-any-return]
    except RuntimeError:  # numba finds none
        return compiled(function)  # type: ignore[no-any-return]


@_intrinsic
def _float(context: Any, bits: Any) -> Any:
    """The float32 that these 32 bits are."""
    return types.float32(types.int32), lambda context, builder, _, args: builder.bitcast(args[0], ir.FloatType())


@_intrinsic
def _bits(context: Any, value: Any) -> Any:
    """The bits of a float32; of two that are not negative the larger has the larger bits."""
    return types.int32(types.float32), lambda context, builder, _, args: builder.bitcast(args[0], ir.IntType(32))


@_intrinsic
def _wide(context: Any) -> Any:
    """Let the function's loops use 512-bit registers where there are any: LLVM prefers 256, here 1.4 times slower."""

    def mark(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        attributes = builder.function.attributes
        if isinstance(attributes, set):  # llvmlite knows no name for this one
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), mark


@_intrinsic
def _borrow(context: Any, arrays: Any) -> Any:
    """The same arrays, of which numba does not count references: it does, atomically, whenever one is passed on."""

    def borrow(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        borrowed = []
        for kind, value in zip(arrays, cgutils.unpack_tuple(builder, args[0]), strict=True):
            array = context.make_array(kind)(context, builder, value)
            array.meminfo = cgutils.get_null_value(array.meminfo.type)
            borrowed.append(array._getvalue())
        return context.make_tuple(builder, arrays, borrowed)

    return arrays(arrays), borrow


@_exact
def _power(y: Any) -> Any:
    """2^y for -127 <= y < 128."""
    rounded = y + ROUND
    f = y - (rounded - ROUND)
    p = ((((C5 * f + C4) * f + C3) * f + C2) * f + C1) * f + ONE
    return p * _float(_bits(rounded) << np.int32(23))


@_sums
def _reference(scores: Any, m: Any, width: Any) -> Any:
    """A whole number within 1/2 of the largest s · log₂e of a row; 0 where all are -inf."""
    _wide()
    most = np.int32(-(2**31))
    for j in range(width):
        most = max(most, _bits(scores[m, j] * LOG2E + ROUND))
    if _float(most) > ZERO:
        return _float(most) - ROUND
    top = NOTHING  # all below -2²³, where bits are in another order, or -inf
    for j in range(width):
        top = max(top, scores[m, j])
    return np.rint(top * LOG2E) if top > NOTHING else ZERO


@_exact
def _read(score: Any, r: Any) -> Any:
    """y and e of a score."""
    y = score * LOG2E - r
    y = LOWEST if y < LOWEST else y  # in this order, NaN stays NaN
    return y, _power(y)


@_sums
def _total(scores: Any, m: Any, left: Any, right: Any, r: Any) -> Any:
    """e in the place of the scores; Σ e."""
    _wide()
    total = ZERO
    for j in range(left, right):
        _, e = _read(scores[m, j], r)
        scores[m, j] = e
        total += e
    return total


@_sums
def _measure(scores: Any, m: Any, left: Any, right: Any, r: Any, vector: Any, away: Any) -> Any:
    """e in the place of the scores; Σ e, Σ e · y, Σ e · vector, and the largest e."""
    _wide()
    total = inner = moment = ZERO
    most = np.int32(0)
    for j in range(left, right):
        y, e = _read(scores[m, j], r)
        scores[m, j] = e
        total += e
        inner += e * y
        moment += e * vector[away + j]
        most = max(most, _bits(e))
    return total, inner, moment, _float(most)


@_sums
def _measure_all(
    scores: Any, m: Any, left: Any, right: Any, r: Any, vector: Any, away: Any, factor: Any, sums: Any, peaks: Any
) -> Any:
    """As `_measure`, where the factor that makes weights of e is known before; sums and maxima of columns with it."""
    _wide()
    total = inner = moment = ZERO
    most = np.int32(0)
    for j in range(left, right):
        y, e = _read(scores[m, j], r)
        total += e
        inner += e * y
        moment += e * vector[away + j]
        most = max(most, _bits(e))
        weight = e * factor
        sums[j] += weight
        peaks[j] = weight if weight > peaks[j] else peaks[j]
    return total, inner, moment, _float(most)


@_sums
def _collect(scores: Any, at: Any, factors: Any, width: Any, sums: Any, peaks: Any) -> None:
    """Sums and maxima of columns over four rows of e."""
    _wide()
    a, b, c, d = at[0], at[1], at[2], at[3]
    of_a, of_b, of_c, of_d = factors[0], factors[1], factors[2], factors[3]
    for j in range(width):
        one, two, three, four = scores[a, j] * of_a, scores[b, j] * of_b, scores[c, j] * of_c, scores[d, j] * of_d
        sums[j] += (one + two) + (three + four)
        left = one if one > two else two
        right = three if three > four else four
        left = left if left > right else right
        peaks[j] = left if left > peaks[j] else peaks[j]


@_sums
def _best(row: Any, key: Any, values: Any, keys: Any) -> None:
    """Insert the scores of a row that belong to its largest so far, which are in order; the first of equals stays."""
    _wide()
    last = values.size - 1
    for start in range(0, row.size, PADDING):
        low, more = values[last], np.int32(0)
        for j in range(PADDING):
            more += np.int32(row[start + j] > low)
        for j in range(start, start + PADDING if more > 0 else start):
            if row[j] > values[last]:
                at = last
                while at > 0 and values[at - 1] < row[j]:
                    values[at], keys[at] = values[at - 1], keys[at - 1]
                    at -= 1
                values[at], keys[at] = row[j], key + j


@_sums
def _hide(part: Any, hidden: Any) -> None:
    """-inf where the mask hides."""
    _wide()
    for j in range(part.size):
        part[j] = NOTHING if hidden[j] else part[j]


@_sums
def _add(sums: Any, total: Any) -> None:
    _wide()
    for j in range(sums.size):
        total[j] += sums[j]


@_sums
def _raise(peaks: Any, top: Any) -> None:
    _wide()
    for j in range(peaks.size):
        top[j] = peaks[j] if peaks[j] > top[j] else top[j]


@_sums
def _cap(peaks: Any, blocks: Any, row: Any) -> None:
    """Raise a row of block peaks to a strip's columns; `blocks` says which block each column belongs to."""
    _wide()
    at, top = blocks[0], ZERO
    for j in range(peaks.size):
        if blocks[j] != at:
            row[at] = max(row[at], top)
            at, top = blocks[j], ZERO
        top = max(top, peaks[j])
    row[at] = max(row[at], top)


@_sums
def _choose(row: Any, runs: Any, factor: Any, chosen: Any, h: Any, t: Any) -> None:
    """Append the weights of a row of e that are at or above the threshold."""
    _wide()
    before = at = chosen.at[0]
    threshold = chosen.threshold[0]
    for n in range(runs.shape[0]):
        left, right, key = runs[n, 0], runs[n, 1], runs[n, 2] - runs[n, 0]
        for start in range(left, right, PADDING):
            more = np.int32(0)
            for j in range(start, start + PADDING):
                more += np.int32(row[j] * factor >= threshold)
            for j in range(start, start + PADDING if more > 0 else start):
                if row[j] * factor >= threshold and at < chosen.keys.size:
                    chosen.keys[at], chosen.weights[at] = key + j, row[j] * factor
                    at += 1
    chosen.counts[h, t], chosen.at[0] = at - before, at


@_sums
def _paint(sums: Any, peaks: Any, pixels: Any, row_of_sums: Any, row_of_peaks: Any) -> None:
    """Add a strip's columns to one row of a picture; `pixels` says which pixel each column belongs to."""
    _wide()
    at, total, top = pixels[0], 0.0, ZERO
    for j in range(sums.size):
        if pixels[j] != at:
            row_of_sums[at] += total
            row_of_peaks[at] = max(row_of_peaks[at], top)
            at, total, top = pixels[j], 0.0, ZERO
        total += sums[j]
        top = max(top, peaks[j])
    row_of_sums[at] += total
    row_of_peaks[at] = max(row_of_peaks[at], top)


class Block(NamedTuple):
    """Scores of some rows of the query heads that share a key head, on the keys that any of the rows may see."""

    scores: Any  # (rows · heads, width or more), row by row, head by head
    runs: Any  # (n, 4): first column, column after the last (a multiple of PADDING), first key, how many keys
    hidden: Any  # (rows, or rows · heads, m) bool: what the mask hides of the columns that it leaves partly visible
    spots: Any  # (n, 3): first column in the scores, how many, first column in `hidden`


class Given(NamedTuple):
    """What is known before."""

    reference: Any  # (B, H, T) where lse is known, with the next, or empty: then they are found on the way
    normaliser: Any  # (B, H, T) 2^(lse · log₂e - reference); 0 for a query that may attend to nothing
    sinks: Any  # (H,) or empty
    first: Any  # (T,) the first key that a query sees, or empty: then the block says what is hidden
    after: Any  # (T,) the key after the last
    positions: Any  # (T,)
    vector: Any  # (n,): the moment of a row is Σ weight · vector[offset + key]
    offsets: Any  # (T,)


class Rows(NamedTuple):
    """What is found of each row, (B, H, T), all empty but the first two where it was not asked for; scores are raw."""

    reference: Any
    normaliser: Any  # Σ e and the sink
    total: Any  # Σ e
    inner: Any  # Σ e · y
    moment: Any
    most: Any  # the largest e
    first: Any  # the score of key 0
    itself: Any  # the score of the key at the query's own position


class Columns(NamedTuple):
    """What is found of each key and of each pixel, empty where it was not asked for; `sums` and `peaks` are scratch."""

    sums: Any
    peaks: Any
    received: Any  # (B, H, S) float64
    received_peak: Any  # (B, H, S)
    pixel_rows: Any  # (T,) which row of the picture a query belongs to
    pixel_columns: Any  # (S,)
    picture_sums: Any  # (B, H, R, C) float64
    picture_peaks: Any  # (B, H, R, C)
    block_rows: Any  # (T,) which row of blocks a query belongs to
    block_columns: Any  # (S,)
    block_peaks: Any  # (B, H, R, C)


class Best(NamedTuple):
    """The largest scores of each row and their keys, (B, H, T, k); k = 0 where they were not asked for."""

    scores: Any
    keys: Any


class Chosen(NamedTuple):
    """The weights of a block that are at or above a threshold, head by head, row by row; n = 0: not asked for."""

    keys: Any  # (n,), more than a block can have: a row's weights add up to 1
    weights: Any  # (n,)
    counts: Any  # (heads, rows): how many of each row
    at: Any  # (1,): how many in all
    threshold: Any  # (1,)


@_sums
def _prepare(block: Any, heads: Any, b: Any, first: Any, t: Any, given: Any, rows: Any, best: Any) -> None:
    """Hide what the mask hides, fill the rows up, and keep the scores that are asked for one by one."""
    _wide()
    for m in range(block.scores.shape[0]):
        r, h = m // heads, first + m % heads
        position = given.positions[t + r]
        row, hidden = block.scores[m], block.hidden[m if block.hidden.shape[0] == block.scores.shape[0] else r]
        for n in range(block.spots.shape[0]):
            start, size, column = block.spots[n, 0], block.spots[n, 1], block.spots[n, 2]
            _hide(row[start : start + size], hidden[column : column + size])
        for n in range(block.runs.shape[0]):
            start, stop, key, keys = block.runs[n, 0], block.runs[n, 1], block.runs[n, 2], block.runs[n, 3]
            left, right = start, start + keys
            if given.first.size:
                left = max(start, min(right, start + given.first[t + r] - key))
                right = min(right, max(start, start + given.after[t + r] - key))
            for j in range(start, left):
                row[j] = NOTHING
            for j in range(right, stop):
                row[j] = NOTHING
            if rows.first.size and key == 0:
                rows.first[b, h, t + r] = row[start]
            if rows.first.size and key <= position < key + keys:
                rows.itself[b, h, t + r] = row[start + position - key]
            if best.scores.shape[3]:
                _best(row[start:stop], key, best.scores[b, h, t + r], best.keys[b, h, t + r])


@_sums
def _strip(pixel_rows: Any, block_rows: Any, start: Any, stop: Any) -> Any:
    """The end of the rows that belong to one row of the picture, and of blocks; all of them without either."""
    end = start + 1
    while end < stop and (
        (pixel_rows.size == 0 or pixel_rows[end] == pixel_rows[start])
        and (block_rows.size == 0 or block_rows[end] == block_rows[start])
    ):
        end += 1
    return end


@_sums
def _hand_over(runs: Any, b: Any, h: Any, t: Any, columns: Any) -> None:
    """What a strip of rows adds to the columns, and to one row of the picture."""
    _wide()
    for n in range(runs.shape[0]):
        start, key, keys = runs[n, 0], runs[n, 2], runs[n, 3]
        sums, peaks = columns.sums[start : start + keys], columns.peaks[start : start + keys]
        if columns.received.size:
            _add(sums, columns.received[b, h, key : key + keys])
            _raise(peaks, columns.received_peak[b, h, key : key + keys])
        if columns.pixel_rows.size:
            i, pixels = columns.pixel_rows[t], columns.pixel_columns[key : key + keys]
            _paint(sums, peaks, pixels, columns.picture_sums[b, h, i], columns.picture_peaks[b, h, i])
        if columns.block_rows.size:
            _cap(peaks, columns.block_columns[key : key + keys], columns.block_peaks[b, h, columns.block_rows[t]])


@_entry
def look(
    block: Any, heads: Any, b: Any, first: Any, t: Any, given: Any, rows: Any, columns: Any, best: Any, chosen: Any
) -> None:
    """Add what a block says to rows, columns, best, and, where no lse is given, chosen.

    Its queries begin at `t`, its `heads` heads at `first`.

    All in one function: numba counts references to every array that is passed on, which would double the time.
    """
    _wide()
    block, given, rows, columns, best, chosen = (
        _borrow(block),
        _borrow(given),
        _borrow(rows),
        _borrow(columns),
        _borrow(best),
        _borrow(chosen),
    )
    _prepare(block, heads, b, first, t, given, rows, best)
    scores, runs, height = block.scores, block.runs, block.scores.shape[0] // heads
    width = np.uint64(block.runs[-1, 1])
    sums, peaks, vector, offsets = columns.sums, columns.peaks, given.vector, given.offsets
    known, sinking, measured, collected = (
        given.reference.size > 0,
        given.sinks.size > 0,
        rows.inner.size > 0,
        sums.size > 0,
    )
    factors, at = np.zeros(4, np.float32), np.zeros(4, np.uint64)
    for h in range(first, first + heads):
        start = 0
        while start < height:
            stop = _strip(columns.pixel_rows, columns.block_rows, t + start, t + height) - t
            if collected:
                sums[:width] = ZERO
                peaks[:width] = ZERO
            for four in range(start, stop, 4):
                for i in range(4):
                    at[i], factors[i] = min(four + i, stop - 1) * heads + h - first, ZERO
                for i in range(min(4, stop - four)):
                    m, query = at[i], t + four + i
                    normaliser = total = inner = moment = most = ZERO
                    if known:
                        r, normaliser = given.reference[b, h, query], given.normaliser[b, h, query]
                        factors[i] = ONE / normaliser if normaliser > ZERO else ZERO
                    else:
                        r = _reference(scores, m, width)
                        if sinking:
                            r = max(r, np.rint(given.sinks[h] * LOG2E))
                            normaliser = f32(np.exp2(np.float64(given.sinks[h]) * LOG2E - r))
                    for n in range(runs.shape[0]):
                        left, right = np.uint64(runs[n, 0]), np.uint64(runs[n, 1])
                        away = np.uint64(offsets[query] + runs[n, 2] - runs[n, 0])
                        if known and collected:
                            some = _measure_all(scores, m, left, right, r, vector, away, factors[i], sums, peaks)
                        elif measured:
                            some = _measure(scores, m, left, right, r, vector, away)
                        else:
                            some = _total(scores, m, left, right, r), ZERO, ZERO, ZERO
                        total, inner, moment, most = (
                            total + some[0],
                            inner + some[1],
                            moment + some[2],
                            max(most, some[3]),
                        )
                    if not known:
                        normaliser += total
                        factors[i] = ONE / normaliser if normaliser != ZERO else ZERO
                    if chosen.keys.size:
                        _choose(scores[m], runs, factors[i], chosen, h - first, four + i)
                    rows.reference[b, h, query], rows.normaliser[b, h, query] = r, normaliser
                    if measured:
                        rows.total[b, h, query], rows.inner[b, h, query] = total, inner
                        rows.moment[b, h, query], rows.most[b, h, query] = moment, most
                if collected and not known:
                    _collect(scores, at, factors, width, sums, peaks)
            if collected:
                _hand_over(runs, b, h, t + start, columns)
            start = stop
