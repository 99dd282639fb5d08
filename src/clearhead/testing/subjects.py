"""The registry: one decorator puts a map into every test of the contract."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from clearhead import reference
from clearhead.maps import AdditiveMap, AttentionMap, DenseMap, LinearMap, SoftmaxMap, average_heads
from clearhead.maps.across import ValueWeighted, rollout
from clearhead.maps.base import Selection
from clearhead.maps.composed import OneSequence, Stitched
from clearhead.maps.replaced import replace_heads
from clearhead.masks import MaskRule
from clearhead.testing.cases import Case
from clearhead.testing.contract import Subject

SUBJECTS: dict[str, Callable[[Case], Subject]] = {}


def subject(name: str) -> Callable[[Callable[[Case], Subject]], Callable[[Case], Subject]]:
    """Register a function that makes, from a case, a map and the weights it must have."""

    def register(make: Callable[[Case], Subject]) -> Callable[[Case], Subject]:
        SUBJECTS[name] = make
        return make

    return register


def softmax_map(case: Case) -> SoftmaxMap:
    """The map that a case describes."""
    return SoftmaxMap(
        case.q,
        case.k,
        mask=case.mask,
        bias=case.bias,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )


def _made(case: Case, make: Callable[[], AttentionMap], of: Callable[[Tensor], Tensor]) -> Subject:
    """A map that is a part of, or made from, the whole; `of` does the same to dense weights."""
    T, S = case.shape[-2:]
    row = of((torch.arange(T) + S - T).expand(*case.shape[:2], T)[..., None].double())
    positions = row.reshape(-1, row.shape[-2])[0].round().long() if row.numel() else torch.arange(row.shape[-2]) + S - T
    return Subject(
        make,
        of(case.exact()),
        of(case.plain()),
        positions=positions,
        terms=case.terms,
        score=case.largest_score(),
    )


@subject("SoftmaxMap")
def _whole(case: Case) -> Subject:
    return _made(case, lambda: softmax_map(case), lambda a: a)


@subject("SoftmaxMap[1, 1]")
def _one_head(case: Case) -> Subject:
    return _made(case, lambda: softmax_map(case)[1, 1], lambda a: a[1, 1])


@subject("SoftmaxMap[:, [1, 0], 2:]")
def _heads_and_rows(case: Case) -> Subject:
    return _made(case, lambda: softmax_map(case)[:, [1, 0], 2:], lambda a: a[:, [1, 0], 2:])


@subject("SoftmaxMap[1][..., scattered, :]")
def _scattered_rows(case: Case) -> Subject:
    rows = list(range(case.shape[-2]))[::-3]
    return _made(case, lambda: softmax_map(case)[1][..., rows, :], lambda a: a[1][..., rows, :])


@subject("SoftmaxMap (T, D)")
def _matrices(case: Case) -> Subject:
    case = _first_head(case)
    return _made(case, lambda: _of_rank(case, 2), lambda a: a[0, 0])


@subject("SoftmaxMap (B, T, D)")
def _batches(case: Case) -> Subject:
    case = _first_head(case)
    return _made(case, lambda: _of_rank(case, 3), lambda a: a[:, 0])


@subject("DenseMap")
def _dense(case: Case) -> Subject:
    weights = case.plain().to(case.q.dtype)
    return _given(case, weights, lambda: DenseMap(weights))


@subject("DenseMap (H, T, S) of an array")
def _array(case: Case) -> Subject:
    weights = case.plain()[1]
    return _given(case, weights, lambda: DenseMap(weights.numpy()))


@subject("DenseMap of a tuple")
def _layers(case: Case) -> Subject:
    weights = case.plain()
    return _given(case, torch.stack([weights, weights.flip(1)]), lambda: DenseMap((weights, weights.flip(1))))


@subject("HeadAverage")
def _average(case: Case) -> Subject:
    return _made(case, lambda: average_heads(softmax_map(case)), lambda a: a.mean(1, dtype=a.dtype))


@subject("OneSequence")
def _one_sequence(case: Case) -> Subject:
    return _made(case, lambda: OneSequence(softmax_map(case)[1]), lambda a: a[1][None])


@subject("Replaced")
def _replaced(case: Case) -> Subject:
    """One head attends to nothing."""
    return _made(case, lambda: replace_heads(softmax_map(case), {1: "nothing"}), _without_head_1)


def _without_head_1(weights: Tensor) -> Tensor:
    return torch.cat([weights[:, :1], torch.zeros_like(weights[:, 1:2]), weights[:, 2:]], 1)


@subject("Rollout")
def _rollout(case: Case) -> Subject:
    """Two layers, of the first heads' weights on the keys that are queries too."""
    n, weights = min(case.shape[-2:]), case.plain()
    layers = [weights[:, heads, :n, :n] for heads in (slice(0, 2), slice(1, 2))]
    exact, plain = (_product([layer.to(dtype) for layer in layers]) for dtype in (torch.float64, weights.dtype))
    return Subject(lambda: rollout([DenseMap(layer) for layer in layers]), exact, plain, terms=2 * case.terms)


def _product(layers: list[Tensor]) -> Tensor:
    mixed = [layer.mean(1) + torch.eye(layer.shape[-1], dtype=layer.dtype) for layer in layers]
    first, second = (layer / layer.sum(-1, keepdim=True) for layer in mixed)
    return second @ first


@subject("ValueWeighted")
def _value_weighted(case: Case) -> Subject:
    weights = case.plain()
    norms = torch.linspace(0.5, 2, case.shape[-1]).to(weights.dtype).expand(*case.shape[:2], -1)
    return _given(case, weights * norms[..., None, :], lambda: ValueWeighted(DenseMap(weights), norms))


@subject("Stitched")
def _stitched(case: Case) -> Subject:
    cuts = [0, case.shape[-2] // 3, case.shape[-2] // 2, case.shape[-2]]
    rows = [slice(*cut) for cut in itertools.pairwise(cuts)]
    return _made(case, lambda: Stitched([softmax_map(case)[..., part, :] for part in rows]), lambda a: a)


@subject("Stitched, on growing and sliding keys")
def _stitched_windows(case: Case) -> Subject:
    """As steps see them: the first rows not the last keys, the last rows not the first."""
    T, S = case.shape[-2:]
    last, weights = min(T // 3, S), case.plain().clone()
    first, start = T - last, S // 5
    weights[..., :first, S - last :], weights[..., first:, :start] = 0, 0
    parts = weights[..., :first, : S - last], weights[..., first:, start:]
    return _given(case, weights, lambda: Stitched([DenseMap(part) for part in parts], [0, start]))


@subject("Stitched[1, 1]")
def _stitched_head(case: Case) -> Subject:
    T = case.shape[-2]
    parts = slice(0, T // 2), slice(T // 2, T)
    return _made(case, lambda: Stitched([softmax_map(case)[..., t, :] for t in parts])[1, 1], lambda a: a[1, 1])


@subject("Selection")
def _selection(case: Case) -> Subject:
    rows = torch.tensor([t for t in range(case.shape[-2]) if t % 37 != 2], dtype=torch.long)
    return _made(
        case,
        lambda: Selection(softmax_map(case), (1, torch.tensor([1, 0])), rows),
        lambda a: a[1, [1, 0]][..., rows, :],
    )


@subject("AdditiveMap")
def _additive(case: Case) -> Subject:
    score = torch.linspace(-1, 2, case.q.shape[-1]).to(case.q.dtype)
    return _compared(case, score, case.q, case.k, case.mask, case.seen)


@subject("AdditiveMap (B, T, A)")
def _additive_batches(case: Case) -> Subject:
    case, score = _first_head(case), torch.linspace(-1, 2, case.q.shape[-1]).to(case.q.dtype)
    return _compared(case, score, case.q[:, 0], case.k[:, 0], case.seen, case.seen[:, 0])


def _compared(case: Case, score: Tensor, q: Tensor, k: Tensor, mask: MaskRule | Tensor | None, seen: Tensor) -> Subject:
    """An additive map and its weights, queries and keys already projected."""
    wide = torch.promote_types(q.dtype, torch.float32)

    def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        same = torch.eye(q.shape[-1], dtype=dtype)
        keys = k if k.ndim < 4 else k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = reference.additive_scores(q.to(dtype), keys.to(dtype), same, same, score.to(dtype))
        return reference.softmax(scores, seen), scores[seen].abs()

    (exact, scores), (plain, _) = weights(torch.float64), weights(wide)
    largest = float(scores.max()) if scores.numel() else 0.0
    return Subject(lambda: AdditiveMap(q, k, score, mask=mask), exact, plain, terms=case.terms, score=largest)


@subject("LinearMap")
def _linear(case: Case) -> Subject:
    return _linear_of(case.q, case.k, case.terms)


@subject("LinearMap, causal and padded")
def _linear_causal(case: Case) -> Subject:
    """With more or fewer queries than keys there is no causal one: padding alone."""
    B, _, T, S = case.shape
    real = torch.arange(S) >= torch.tensor([S // 3, 0])[:B, None]
    return _linear_of(case.q, case.k, case.terms, is_causal=T == S, padding=real)


@subject("LinearMap (T, D)")
def _linear_matrices(case: Case) -> Subject:
    return _linear_of(case.q[0, 0], case.k[0, 0], case.terms)


def _linear_of(q: Tensor, k: Tensor, terms: int, *, is_causal: bool = False, padding: Tensor | None = None) -> Subject:
    T, S = q.shape[-2], k.shape[-2]
    seen = torch.ones(T, S, dtype=torch.bool).tril() if is_causal else torch.ones(T, S, dtype=torch.bool)
    seen = seen if padding is None else seen & padding[:, None, None]
    exact, plain = (
        reference.linear_weights(q.to(dtype), k.to(dtype), mask=seen)
        for dtype in (torch.float64, torch.promote_types(q.dtype, torch.float32))
    )
    return Subject(lambda: LinearMap(q, k, is_causal=is_causal, padding=padding), exact, plain, terms=terms)


@subject("SoftmaxMap.uniform()")
def _uniform(case: Case) -> Subject:
    seen = case.seen if case.added is None else case.seen & (case.added > -math.inf)
    even = seen / seen.sum(-1, keepdim=True).clamp(min=1).double()
    plain = even.to(torch.promote_types(case.q.dtype, torch.float32))
    return Subject(lambda: softmax_map(case).uniform(), even, plain, terms=case.terms)


@subject("uniform() of a DenseMap")
def _uniform_of_weights(case: Case) -> Subject:
    weights = case.plain()
    even = (weights > 0) / (weights > 0).sum(-1, keepdim=True).clamp(min=1).double()
    return Subject(lambda: DenseMap(weights).uniform(), even, even.to(weights.dtype), terms=case.terms)


class Toy(AttentionMap):
    """The least that a map is: a shape and a tile."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._weights.shape)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        return self._weights[..., rows, cols]


@subject("ten-line toy")
def _toy(case: Case) -> Subject:
    weights = case.plain().float()
    return _given(case, weights, lambda: Toy(weights))


@subject("selection of a toy")
def _part_of_toy(case: Case) -> Subject:
    weights = case.plain().float()
    return _given(case, weights[:, 1], lambda: Toy(weights)[:, 1])


def _given(case: Case, weights: Tensor, make: Callable[[], AttentionMap]) -> Subject:
    """A map over weights that are what they are: exact in their own dtype."""
    plain = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return Subject(make, weights.double(), plain, terms=case.terms)


def _first_head(case: Case) -> Case:
    """The same with one head; a mask or bias that differs between heads becomes the first head's, dense."""
    seen, added = case.seen[:, :1], None if case.added is None else case.added[:, :1]
    sinks = None if case.sinks is None else case.sinks[:1]
    q, k = case.q[:, :1], case.k[:, :1]
    return replace(case, q=q, k=k, mask=seen, seen=seen, bias=added, added=added, sinks=sinks)


def _of_rank(case: Case, rank: int) -> SoftmaxMap:
    """q (T, D) or (B, T, D) of a case with one head; the mask and the bias are (T, S) or (B, 1, T, S)."""
    q, k, mask, bias = case.q[:, 0], case.k[:, 0], case.seen, case.added
    if rank == 2:
        q, k, mask, bias = q[0], k[0], mask[0, 0], None if bias is None else bias[0, 0]
    return SoftmaxMap(q, k, mask=mask, bias=bias, scale=case.scale, softcap=case.softcap, sinks=case.sinks)
