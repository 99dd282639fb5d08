"""Gradients of what is said about a map: those of the dense formula, for every reading and every map."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import SoftmaxMap, masks, reference, scores
from clearhead.kernels import tiles
from clearhead.maps import AttentionMap, LinearMap
from clearhead.testing import SUBJECTS, build_case, pairwise
from clearhead.testing.cases import BIASES, MASKS

from .small_maps import KINDS, B, G, H, S, T, check, entropy, few, qk, random


def distance(a: Tensor) -> Tensor:
    T, S = a.shape[-2:]
    return (a * (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()).sum(-1)


def pooled(a: Tensor, size: tuple[int, int]) -> Tensor:
    for dim, bins in zip((-2, -1), size, strict=True):
        at = torch.arange(a.shape[dim]) * bins // a.shape[dim]
        a = torch.stack([a.index_select(dim, (at == i).nonzero()[:, 0]).sum(dim) for i in range(bins)], dim)
    return a


def statistics(a: Tensor) -> Tensor:
    at = torch.arange(T) + S - T
    parts = [entropy(a), distance(a), a[..., 0], a[..., torch.arange(T), at], a.sum(-2)]
    return torch.cat(parts, -1)


X, Y = random(S, 2), random(T, 2)
# What is read, and the same of dense weights.
READINGS: dict[str, tuple[Callable[[AttentionMap], Tensor], Callable[[Tensor], Tensor]]] = {
    "entropy": (lambda m: m.entropy(), entropy),
    "distance": (lambda m: m.distance(), distance),
    "received": (lambda m: m.received(), lambda a: a.sum(-2)),
    "statistics": (
        lambda m: torch.cat(
            [getattr(m.statistics(), f.name) for f in fields(m.statistics()) if "peak" not in f.name], -1
        ),
        statistics,
    ),
    "pool_sum": (lambda m: m.pool_sum((4, 5)), lambda a: pooled(a, (4, 5))),
    "@": (lambda m: m @ X, lambda a: a @ X),
    "mT @": (lambda m: m.mT @ Y, lambda a: a.mT @ Y),
    "mass of few": (lambda m: m.mass([0, 3]), lambda a: a[..., [0, 3]].sum(-1)),
    "mass of many": (lambda m: m.mass(torch.arange(S) != 2), lambda a: a.sum(-1) - a[..., 2]),
    "pick": (lambda m: m.pick([[1], [7]], [0, 5, 9]), lambda a: a[..., [[1], [7]], [0, 5, 9]]),
    "column": (lambda m: m[..., 4], lambda a: a[..., 4]),
    "row": (lambda m: m[..., 5, :], lambda a: a[..., 5, :]),
    "diagonal": (lambda m: m.diagonal(-1), lambda a: a.diagonal(S - T - 1, -2, -1)),
}
# --- the dense formula's gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READINGS)
def test_gradients_are_the_dense_formulas(name: str, kind: str, recomputed: None) -> None:
    (read, of), (ours, textbook) = READINGS[name], KINDS[kind]
    q, k = qk()
    want = of(reference.weights(q, k, **textbook))
    for tile in ((100, 100), (4, 3), (1, 1)):
        with tiles.tile_size(*tile):
            check(read(SoftmaxMap(q, k, **ours)), want, [q, k])


@pytest.mark.parametrize("name", ["entropy", "mT @", "mass of few"])
def test_gradients_of_what_stands_between(name: str, recomputed: None) -> None:
    """Biases of three kinds, one of which hides pairs, and learned sinks; some seen by several heads or texts."""
    (read, of), (q, k) = READINGS[name], qk()
    table, slopes = random(32, H).requires_grad_(), random(H).requires_grad_()
    dense, sinks = random(1, H, T, S).requires_grad_(), random(H).requires_grad_()
    away = torch.arange(S) - (torch.arange(T)[:, None] + S - T)
    hidden = torch.zeros(1, 1, T, S).masked_fill(away == -2, -torch.inf).double()
    buckets = scores.t5_buckets(away)
    ours = scores.t5_bias(table) + scores.alibi(slopes) + scores.dense_bias(dense) + scores.dense_bias(hidden)
    added = table[buckets].permute(2, 0, 1) + slopes[:, None, None] * away + dense
    a = reference.weights(q, k, mask=(away <= 0) & (away != -2), bias=added, sinks=sinks)
    for tile in ((100, 100), (4, 3)):
        with tiles.tile_size(*tile):
            attn = SoftmaxMap(q, k, mask=masks.causal(), bias=ours, sinks=sinks)
            check(read(attn), of(a), [q, k, table, slopes, dense, sinks])
            check(read(attn[:, [3, 3, 0]]), of(a[:, [3, 3, 0]]), [q, k, table, slopes, dense, sinks])


NAMES = pairwise(
    {
        "reading": ["entropy", "received", "@", "lse"],
        "mask": list(MASKS),
        "bias": list(BIASES),
        "size": ["33x33", "33x127", "127x33", "1x33", "0x5", "5x0"],
        "heads": ["2/2", "4/2", "3/1"],
        "layout": ["contiguous", "tokens first", "stride 0", "every other"],
        "dtype": ["float32", "bfloat16", "float64"],
        "tile": ["default", "third", "wide"],
    }
)


@pytest.mark.parametrize("number", range(len(NAMES)), ids=lambda n: ", ".join(NAMES[n].values()))
def test_every_mask_bias_layout_and_dtype(number: int, recomputed: None) -> None:
    """As wrong as the dense formula in the dtype of statistics is, and what rounding in another order adds."""
    case, name = build_case(NAMES[number], seed=number), NAMES[number]["reading"]
    dtype, wide = case.q.dtype, torch.promote_types(case.q.dtype, torch.float32)
    q, k = (x.detach().clone().requires_grad_() for x in (case.q, case.k))
    with tiles.tile_size(*(case.tile or (128, 128))):
        attn = SoftmaxMap(
            q, k, mask=case.mask, bias=case.bias, scale=case.scale, softcap=case.softcap, sinks=case.sinks
        )
        out = {"entropy": attn.entropy, "received": attn.received, "lse": lambda: attn.lse, "@": lambda: attn @ x}
        x = random(case.shape[-1], 2).to(wide)
        read = out[name]()
        weight = random(*read.shape).to(wide)
        if name == "lse":
            weight = weight.masked_fill(read == -torch.inf, 0)
        got = torch.autograd.grad(read, (q, k), weight)
    exact, plain = (_by_the_textbook(case, some, name, x, weight) for some in (torch.float64, wide))
    for ours, want, theirs, size in zip(got, exact, plain, _magnitudes(case, name, x, weight), strict=True):
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        terms, score = case.terms + case.shape[1] * case.shape[2], case.largest_score()
        score += math.log(case.shape[3] + 1) / 2  # a weight is exp(score - lse), and lse as much larger than its scores
        rounding = torch.finfo(wide).eps * (terms**0.5 + score)
        allowed = largest(theirs - want) + rounding * largest(size)
        allowed += torch.finfo(dtype).eps / 2 * largest(want)  # the gradient itself is rounded
        assert largest(ours - want) <= allowed


def _dense(case: Any, dtype: torch.dtype, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp by the textbook."""
    seen, bias = case.seen, None
    if case.added is not None:
        seen, bias = seen & (case.added > -torch.inf), case.added.nan_to_num(neginf=0).to(dtype)
    how = {"scale": case.scale, "softcap": case.softcap, "bias": bias}
    s = reference.scores(q, k, **how).masked_fill(~seen, -torch.inf)
    sinks = None if case.sinks is None else case.sinks.to(dtype)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    some = (s > -torch.inf).any(-1, keepdim=True)
    lse = torch.where(some, s, 0).logsumexp(-1) if s.shape[-1] else s.sum(-1)
    return reference.weights(q, k, mask=seen, **how, sinks=sinks), torch.where(some[..., 0], lse, 0)


def _said(name: str, a: Tensor, x: Tensor) -> Tensor:
    return {"entropy": entropy, "received": lambda a: a.sum(-2), "@": lambda a: a @ x.to(a.dtype)}[name](a)


def _by_the_textbook(case: Any, dtype: torch.dtype, name: str, x: Tensor, weight: Tensor) -> list[Tensor]:
    q, k = (some.detach().to(dtype).requires_grad_() for some in (case.q, case.k))
    a, lse = _dense(case, dtype, q, k)
    out = lse if name == "lse" else _said(name, a, x)
    return list(torch.autograd.grad(out, (q, k), weight.to(dtype)))


def _magnitudes(case: Any, name: str, x: Tensor, weight: Tensor) -> list[Tensor]:
    """What the terms of the gradients add up to without their signs: rounding is relative to that."""
    (b, h, _, s), g, d = case.shape, case.k.shape[1], case.q.shape[-1]
    q, k = case.q.double(), case.k.double()
    a = _dense(case, torch.float64, q, k)[0].requires_grad_()
    if name == "lse":
        d_scores = a * weight[..., None].abs()
    else:
        of_a = torch.autograd.grad(_said(name, a, x), a, weight.double())[0].abs()
        d_scores = a * (of_a + (a * of_a).sum(-1, keepdim=True))
    d_scores = d_scores.detach() * (d**-0.5 if case.scale is None else case.scale)
    d_k = (d_scores.mT @ q.abs()).reshape(b, g, h // g, s, d).sum(2)
    return [d_scores @ k.abs().repeat_interleave(h // g, 1), d_k]


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


@pytest.mark.parametrize("name", READINGS)
def test_gradcheck(name: str, recomputed: None) -> None:
    arguments = KINDS["padded, causal"][0]
    assert torch.autograd.gradcheck(
        lambda q, k: READINGS[name][0](SoftmaxMap(q, k, softcap=2.0, **arguments)), qk(), fast_mode=True
    )


def test_the_other_factor_of_a_product_has_its_gradient(recomputed: None) -> None:
    (q, k), x, y = qk(), random(B, G, S, 2).requires_grad_(), random(H, T, 2).requires_grad_()
    a = reference.weights(q, k)
    with tiles.tile_size(4, 5):
        check(SoftmaxMap(q, k) @ x, a @ x.repeat_interleave(H // G, 1), [q, k, x])
        check(SoftmaxMap(q.detach(), k.detach()).mT @ y, a.detach().mT @ y, [y])


def test_trap_04_a_row_that_sees_nothing_has_gradients_of_0(recomputed: None) -> None:
    for name, (read, _) in READINGS.items():
        q, k = qk()
        out = read(SoftmaxMap(q, k, mask=masks.causal() & ~masks.first_tokens(S - 3)))
        d_q, d_k = torch.autograd.grad(out.sum(), (q, k))
        assert d_q.isfinite().all(), name
        assert (d_q[:, :, : T - 3] == 0).all(), name
        assert (d_k[:, :, : S - 3] == 0).all(), name


def test_the_maxima_have_no_gradient_however_large_the_map() -> None:
    for weights in (-1, 1 << 20):
        with few(weights):
            found = SoftmaxMap(*qk()).statistics()
        asked = {f.name: getattr(found, f.name).requires_grad for f in fields(found)}
        assert [name for name, graph in asked.items() if not graph] == ["peak", "received_peak"]


# --- every map ---------------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[AttentionMap], Tensor]] = {
    "entropy": lambda m: m.entropy(),
    "received": lambda m: m.received(),
    "@": lambda m: m @ random(m.shape[-1], 2).to(m.dtype),
    "mT @": lambda m: m.mT @ random(m.shape[-2], 2).to(m.dtype),
    "pool_sum": lambda m: m.pool_sum((3, 2)),
    "pick": lambda m: m.pick([0, -1], [1, 0]),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # what the case measures about q
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_map_has_the_gradients_that_its_kept_tiles_have(name: str) -> None:
    names = {"mask": "sinks + window", "bias": "alibi", "heads": "4/2", "layout": "contiguous", "dtype": "float64"}
    case = build_case({**names, "size": "33x127", "tile": "default"})
    q, k = (x.requires_grad_() for x in (case.q, case.k))
    if "array" in name:
        q, k = q.detach(), k.detach()
    make = SUBJECTS[name](replace(case, q=q, k=k)).make
    for what, ask in ASKED.items():
        with tiles.tile_size(10, 130):
            with few(-1):
                ours = ask(make())
            with few(1 << 30):
                want = ask(make())
        assert ours.requires_grad == want.requires_grad
        if want.requires_grad:
            got, kept = (torch.autograd.grad(x.square().sum(), (q, k), retain_graph=True) for x in (ours, want))
            torch.testing.assert_close(got, kept, rtol=1e-9, atol=1e-11, msg=lambda text, what=what: f"{what}: {text}")


def test_a_linear_maps_past_has_a_gradient(recomputed: None) -> None:
    q, k, past = random(1, 2, 6, 3).requires_grad_(), random(1, 1, 6, 3).requires_grad_(), random(1, 1, 3).exp()
    past.requires_grad_()
    with tiles.tile_size(4, 4):
        assert torch.autograd.gradcheck(lambda *of: LinearMap(of[0], of[1], past=of[2]).entropy(), (q, k, past))


class Shifted(scores.Bias):
    """A rule of somebody else's that does not say which tensors it holds."""

    def __init__(self, by: Tensor) -> None:
        self.by = [by]

    def values(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, T: int, S: int) -> Tensor:
        return self.by[0][k]


def test_a_tensor_that_a_class_of_somebody_elses_hides_keeps_its_gradient(recomputed: None) -> None:
    (q, k), by = qk(), random(S).requires_grad_()
    check(SoftmaxMap(q, k, bias=Shifted(by)).entropy(), entropy(reference.weights(q, k, bias=by)), [q, k, by])
