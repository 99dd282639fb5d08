"""The calls of one layer over a text that grows, as one map.

Single queries that see every key so far are what one causal call sees, and single queries on the same keys are what
one call of cross-attention sees; a generating model makes little else. Such calls are joined into one again. Calls
with more to them (a bias that moves scores, a window, a mask by head) stay apart, as row blocks of a stitched map.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.maps import AttentionMap
from clearhead.maps.composed import Stitched
from clearhead.masks import MaskRule, causal, causal_upper_left, padding
from clearhead.recording.calls import AnyCall, Call

__all__ = ["Step", "stitched"]


@dataclass(frozen=True, eq=False)
class Step:
    """A call, its padding, and at which key of the text its keys begin."""

    call: AnyCall
    padding: MaskRule | None
    start: int


def stitched(steps: Sequence[Step]) -> AttentionMap:
    """One map of calls whose queries follow one another and whose keys are parts of one text's."""
    joined = list(_joined(steps))
    maps = [step.call.to_map(step.padding) for step in joined]
    return maps[0] if len(maps) == 1 else Stitched(maps, [step.start for step in joined])


def _joined(steps: Sequence[Step]) -> Iterator[Step]:
    """The same with runs of plain calls put into one each."""
    run: list[_Plain] = []
    for step in steps:
        plain = _as_plain(step)
        if run and (plain is None or not _goes_on(run, plain)):
            yield _one(run)
            run = []
        if plain is None:
            yield step
        else:
            run.append(plain)
    if run:
        yield _one(run)


@dataclass(frozen=True, eq=False)
class _Plain:
    """A step whose queries see every key up to their own, padded ones excepted."""

    step: Step
    call: Call
    real: Tensor | None  # (B or 1, S) bool; None where all are

    @property
    def size(self) -> tuple[int, int]:
        return self.call.shape[2], self.call.shape[3]


def _as_plain(step: Step) -> _Plain | None:
    call = step.call
    if not isinstance(call, Call) or step.start:
        return None
    T, S = call.shape[2:]
    if T > 1:
        rules = (causal(), causal_upper_left()) if T == S else (causal(),)
        known = len(call.masks) == 1 and not isinstance(call.masks[0], Tensor) and call.masks[0] in rules
        return _Plain(step, call, None) if known and not call.biases and step.padding is None else None
    real = _seen(call, step.padding)
    return None if real is None else _Plain(step, call, None if bool(real.all()) else real)


def _seen(call: Call, padding_of: MaskRule | None) -> Tensor | None:
    """The keys that the only query of a call sees, (B or 1, S); None where heads differ, or scores are moved."""
    rule, device = call.rule(padding_of), call.q.device
    if rule is not None and rule.per_head:
        return None
    seen = torch.ones(1, call.shape[3], dtype=torch.bool, device=device)
    if rule is not None:
        at = [torch.arange(n, device=device) for n in (call.shape[0], 1)]
        seen = rule.bind(*call.shape[2:]).tile(slice(0, 1), slice(0, call.shape[3]), *at)[:, 0, 0]
    for bias in call.biases:
        row = bias[:, :, 0] if isinstance(bias, Tensor) else torch.ones(1, 1, 1, device=device)
        hidden = row <= torch.finfo(row.dtype).min
        if not bool(((row == 0) | hidden).all() & (hidden == hidden[:, :1]).all()):
            return None
        seen = seen & ~hidden[:, 0]
    return seen


def _goes_on(run: list[_Plain], other: _Plain) -> bool:
    """Whether the other is the next step of the run: on one key more for each query, or on the same keys."""
    (T, S), last = other.size, run[-1]
    mine, its = last.call, other.call
    before = last.size[1]
    alike = mine.scale == its.scale and mine.softcap == its.softcap and _same(mine.sinks, its.sinks)
    alike = alike and mine.changed == its.changed
    if alike and T == 1 and run[0].size == other.size == last.size:
        return _equal(last.real, other.real) and (mine.k is its.k or mine.k.data_ptr() == its.k.data_ptr())
    grown = len(run) == 1 or run[-2].size[1] < before
    return alike and grown and before + T == S and _equal(last.real, _first(other.real, before))


def _one(run: list[_Plain]) -> Step:
    """One call of all queries of a run."""
    if len(run) == 1:
        return run[0].step
    last, q = run[-1], torch.cat([each.call.q for each in run], 2)
    rules = (causal(),) if run[0].size[1] < last.size[1] else ()
    real = None if last.real is None else padding(keys=last.real.expand(len(q), -1))
    return Step(replace(last.call, q=q, v=last.call.no_keys, masks=rules, biases=(), real_queries=None), real, 0)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr())


def _first(real: Tensor | None, n: int) -> Tensor | None:
    return None if real is None else real[:, :n]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both say the same of the keys; None stands for all True."""
    if a is None or b is None:
        return all(one is None or bool(one.all()) for one in (a, b))
    return bool((a == b).all())
