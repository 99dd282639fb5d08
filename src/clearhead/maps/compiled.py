"""SoftmaxMaps and the compiled pass on the CPU: when it is taken, and which of its results each reducer wants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.kernels import cpu
from clearhead.kernels.path import forced
from clearhead.kernels.workers import apart
from clearhead.maps import reductions as reduce
from clearhead.maps.expected import Expected, ExpectedMass
from clearhead.maps.scored import is_precise

if TYPE_CHECKING:
    from clearhead.maps.softmax import SoftmaxMap

# Measured: at 9 heads of 1,024 tokens the compiled pass takes 0.45 of the time of tiles, at 512 tokens as long.
FEW = 1 << 22  # weights: for fewer, loading the compiled loops takes longer than the pass
FEW_OF_A_HEAD = 1 << 18  # with fewer, PyTorch is faster: it takes many heads at once
PICKED, PAIRS = 128, 1 << 12  # queries, and pairs, whose weights are computed at a time
MOST = 64  # of the largest weights of a row: they are put in order one by one


def against(attn: SoftmaxMap) -> str | None:
    """What speaks against the compiled pass."""
    if forced() in ("tiles", "fused"):
        return "forced"
    if attn.device.type != "cpu":
        return f"the compiled loops run on the CPU, and q is on {attn.device}"
    if attn.dtype is not torch.float32:
        return f"the compiled loops compute in float32, and this is {attn.dtype}".replace("torch.", "")
    if not attn._has_numbers:
        return "q or k have no numbers (traced, on the meta device, or under vmap)"
    if not math.prod(attn.shape):
        return "there are no weights"
    if forced() is None and math.prod(attn.shape) < FEW:
        return f"{math.prod(attn.shape):,} weights are too few for compiled loops to pay"
    if forced() is None and math.prod(attn.shape[-2:]) < FEW_OF_A_HEAD:
        return f"{math.prod(attn.shape[-2:]):,} weights a head are too few for compiled loops to pay"
    return cpu.missing()


def look(attn: SoftmaxMap, wanted: cpu.Wanted) -> cpu.Found | None:
    """One compiled pass, which also finds every row's lse; None where tiles must do it."""
    if against(attn) is not None or attn._needs_graph():
        return None
    attn._check_unchanged()
    return apart(partial(_look, attn, wanted, torch.get_num_threads()))


def _look(attn: SoftmaxMap, wanted: cpu.Wanted, threads: int) -> cpu.Found | None:
    found = cpu.look(_source(attn), wanted, threads)
    if found is not None:
        attn._kept_lse().copy_(found.lse)
    return found


def stream(attn: SoftmaxMap, reducers: Sequence[Any]) -> list[Any]:
    """Give every reducer that it can its result; those that tiles must serve are left, with every row's lse known."""
    later: list[ExpectedMass] = []
    left: list[Any] = []
    taken: dict[str, list[Any]] = {}
    how: dict[str, Any] = {}
    for reducer in reducers:
        name, wants = _asked(attn, reducer)
        if type(reducer) is ExpectedMass:  # once every row's lse is known
            later.append(reducer)
        elif name is None or any(_differ(how.get(key, value), value) for key, value in wants.items()):
            left.append(reducer)  # a pass finds one moment, and pictures of one size
        else:
            taken.setdefault(name, []).append(reducer)
            how |= wants
    found = look(attn, cpu.Wanted(**how)) if taken or later else None
    if found is None:
        for reducer in taken.get("above", ()):
            reducer.forget()
        return list(reducers)
    taken.pop("above", None)  # which have been told on the way
    for name, same in taken.items():
        result = getattr(found, name)
        for reducer in same:
            reducer.take(*map(attn._shown, result if isinstance(result, tuple) else (result,)))
    if later:
        _take_expected(attn, later)
    return left


def _differ(one: Any, other: Any) -> bool:
    return one is not other and (isinstance(other, Tensor) or one != other)


def _take_expected(attn: SoftmaxMap, reducers: Sequence[ExpectedMass]) -> None:
    wanted = [reducer.expected for reducer in reducers]
    found = apart(partial(_on_expected, attn, wanted, torch.get_num_threads()))
    for reducer, sums in zip(reducers, found, strict=True):
        reducer.take(*map(attn._shown, sums))


def _on_expected(attn: SoftmaxMap, wanted: Sequence[Expected], threads: int) -> list[tuple[Tensor, Tensor]]:
    """What queries give to their expected keys (B, H, T), and what keys get so (B, H, S), both float64."""
    if not wanted:
        return []
    sees = _interval(attn)
    if sees is None or attn.bias is not None or attn.softcap is not None:
        return [_picked(attn, expected) for expected in wanted]
    from clearhead.kernels.cpu_expected import Gather  # numba is imported here, where it is used

    lse = attn._kept_lse()
    each = [Gather(q * attn.scale, k, a, sees) for q, k, a in zip(attn._q, attn._k, lse, strict=True)]
    found = [[gather(one.keys, one.start, one.stop, one.but, threads) for gather in each] for one in wanted]
    return [(torch.stack([mass for mass, _ in one]), torch.stack([got for _, got in one])) for one in found]


def _picked(attn: SoftmaxMap, expected: Expected) -> tuple[Tensor, Tensor]:
    """The same from single weights, some queries at a time."""
    (B, H, T, _), S, lse = attn._q.shape, attn.shape[-1], attn._kept_lse()
    mass, got = (lse.new_zeros(B, H, n, dtype=torch.float64) for n in (T, S))
    before = len(expected.start) - T
    for start in range(0, T, PICKED):
        t, s = expected.pairs(start + before, min(start + PICKED, T) + before)
        for some, keys in zip(torch.split(t - before, PAIRS), torch.split(s, PAIRS), strict=True):
            weights = attn._pick(some, keys, lse[:, :, some]).double()
            mass.index_add_(-1, some, weights)
            got.index_add_(-1, keys, weights)
    return mass, got


def _interval(attn: SoftmaxMap) -> tuple[Tensor, Tensor] | None:
    """Each query's first key and the one after its last, if it sees all between them, whatever the head."""
    if attn.mask is None:
        return torch.zeros_like(attn._t), torch.full_like(attn._t, attn.shape[-1])
    return attn.mask.interval(attn._t, *attn._bound)


def _asked(attn: SoftmaxMap, reducer: Any) -> tuple[str | None, dict[str, Any]]:
    """What a reducer wants, by its name in `cpu.Found`, and what the pass must be told; None: only tiles can."""
    if type(reducer) is reduce.PerQuery:
        return _asked_of_rows(reducer)
    if type(reducer) is reduce.PerKey:
        return "received_peak" if reducer.maximum else "received", {"columns": True}
    if type(reducer) is reduce.Pool:
        return "picture_max" if reducer.maximum else "picture_sum", {"picture": reducer.size}
    if type(reducer) is reduce.Blocks:
        return "blocks", {"blocks": reducer.side}
    if isinstance(reducer, reduce.Above) and len(attn.shape) == 3 and len(attn._q) == 1:
        return "above", {"above": reducer}
    if type(reducer) is reduce.TopK and reducer.k <= MOST:
        return "best", {"best": reducer.k}
    return None, {}


def _asked_of_rows(reducer: reduce.PerQuery) -> tuple[str | None, dict[str, Any]]:
    measure: Any = reducer.measure
    if measure is reduce.peak and reducer.maximum:
        return "peak", {"rows": True}
    if reducer.maximum:
        return None, {}
    function = measure.func if isinstance(measure, partial) else measure
    names = {reduce.entropy: "entropy", reduce.to_first: "to_first", reduce._to_self: "to_self"}
    names |= {reduce._distance: "moment", reduce._mass: "moment"}
    wants: dict[str, Any] = {"rows": True}
    if names.get(function) == "moment":
        wants["values"] = measure.args[0] if function is reduce._mass else None
    return names.get(function), wants


class _Part:
    """One batch entry, and the query heads that share a key head: a map of its own."""

    def __init__(self, attn: SoftmaxMap, batch: int, heads: slice) -> None:
        self._whole, self._batch, self._heads = attn, batch, heads

    @cached_property
    def _attn(self) -> Any:
        whole = self._whole
        at = {"B": slice(self._batch, self._batch + 1), "H": self._heads}
        return whole[tuple(at[axis] for axis in whole._axes)]

    def moved(self, scores: Tensor, rows: slice, cols: slice) -> Tensor:
        moved: Tensor = self._attn._biased(scores, *self._attn._grid(rows, cols))
        return moved

    def hidden(self, rows: slice, cols: slice) -> Tensor:
        return _hidden(self._attn, rows, cols)[0]


def _hidden(attn: SoftmaxMap, rows: slice, cols: slice) -> Tensor:
    """What the mask hides, (B or 1, H or 1, t, s)."""
    assert attn.mask is not None  # without a mask no range is partly visible
    return ~attn.mask.allows(*attn._indices(*attn._grid(rows, cols)))


def _source(attn: SoftmaxMap) -> cpu.Source:
    kept, one = attn._kept_lse(), slice(0, 1)
    return cpu.Source(
        attn._q,
        attn._k,
        attn.scale,
        attn.positions,
        attn,
        partial(_Part, attn),
        interval=_interval(attn),
        lse=kept if is_precise(kept) else None,  # else it is found again, more exactly
        sinks=None if attn.sinks is None else attn.sinks[attn._h],
        is_moved=attn.bias is not None or attn.softcap is not None,
        is_alike=attn.mask is None or _hidden(attn, one, one).shape[:2] == (1, 1),
    )
