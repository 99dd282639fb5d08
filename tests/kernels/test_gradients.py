"""Gradients of what is said about a map: those of the dense formula, in O(n) memory."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

from clearhead import SoftmaxMap, masks, record, reference, scores
from clearhead.kernels import gradients, tiles
from clearhead.maps import AttentionMap, LinearMap
from clearhead.nn import Attention
from clearhead.testing import SUBJECTS, Allocations, build_case, pairwise
from clearhead.testing.cases import BIASES, MASKS

B, H, G, T, S, D = 2, 4, 2, 9, 13, 3


@contextmanager
def few(weights: int) -> Iterator[None]:
    """Maps of up to so many weights keep their tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "FEW", weights)
        yield


@pytest.fixture
def recomputed() -> Iterator[None]:
    """However small a map is, its tiles are computed again."""
    with few(-1):
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def qk() -> list[Tensor]:
    return [random(B, H, T, D).requires_grad_(), random(B, G, S, D).requires_grad_()]


def entropy(a: Tensor) -> Tensor:
    seen = a > 0
    return -(a * torch.where(seen, a, 1).log()).sum(-1)


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
REAL = torch.arange(S) >= torch.tensor([6, 0])[:, None]  # left padding: the first text's first queries see nothing
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments of SoftmaxMap, and of the textbook
    "all seen": ({}, {}),
    "padded, causal": (
        {"mask": masks.causal() & masks.padding(keys=REAL)},
        {"mask": reference.causal(T, S) & REAL[:, None, None]},
    ),
    "sinks and window": (
        {"mask": masks.first_tokens(2) & masks.causal() | masks.sliding_window(3), "scale": 0.7},
        {"mask": reference.causal(T, S) & (torch.arange(S) < 2) | reference.sliding_window(T, S, 3), "scale": 0.7},
    ),
    "soft-capped": ({"softcap": 1.2}, {"softcap": 1.2}),
}


def check(ours: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    """The same numbers and the same gradients."""
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-13)
    weight = random(*want.shape, seed=5)
    got, exact = (
        torch.autograd.grad(out, inputs, weight, allow_unused=True, retain_graph=True) for out in (ours, want)
    )
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-11, atol=1e-13)


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


# --- memory and work ---------------------------------------------------------------------------------------


def _peaks(n: int, read: Callable[[AttentionMap], Tensor], rule: masks.MaskRule | None = None) -> tuple[int, int]:
    """Largest tensor and peak of one step, in bytes."""
    q, k = (torch.randn(1, heads, n, 8).requires_grad_() for heads in (4, 2))
    with Allocations() as allocations:
        read(SoftmaxMap(q, k, mask=rule)).square().sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0
    return allocations.largest, allocations.peak


TILE = 4 * tiles.TILE_ELEMENTS


@pytest.mark.parametrize("name", ["entropy", "received", "@", "pick", "mass", "lse", "statistics"])
def test_trap_10_no_quadratic_memory(name: str) -> None:
    """2,048 tokens, four heads: all weights are 67 MB, and a dense step holds several such tensors."""
    reads: dict[str, Callable[[Any], Tensor]] = {
        "entropy": lambda m: m.entropy(),
        "received": lambda m: m.received(),
        "@": lambda m: m @ torch.ones(2048, 1).cumsum(0),
        "pick": lambda m: m.diagonal(-1),
        "mass": lambda m: m.mass([0, 1]),
        "lse": lambda m: m.lse,
        "statistics": lambda m: m.statistics().distance,
    }
    biggest, peak = _peaks(2048, reads[name], masks.sliding_window(512))
    assert biggest <= TILE < 2048 * 2048 * 4
    assert peak <= 8 * TILE


def test_memory_grows_with_n_and_not_with_its_square() -> None:
    (_, one), (_, two) = (_peaks(n, lambda m: m.entropy(), masks.sliding_window(64)) for n in (1024, 2048))
    assert two <= 2.2 * one


def test_an_entropy_penalty_on_a_layer_of_4096_tokens_trains() -> None:
    """Dense, the weights of one step are 268 MB, and its backward pass holds several such tensors."""
    torch.manual_seed(0)
    layer, x = Attention(16, 16, 4096, num_heads=4, num_kv_heads=2, is_causal=True), torch.randn(1, 4096, 16)
    optimiser, losses = torch.optim.Adam(layer.parameters(), lr=0.05), []
    with Allocations() as allocations:
        for _ in range(2):
            _, attn = layer.attend(x)
            loss = attn.entropy().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[1] < 0.99 * losses[0]
    assert allocations.largest <= TILE < 4096 * 4096  # a byte for each pair of one head
    assert allocations.peak <= 8 * TILE < 4 * 4096 * 4096 * 4


def test_the_gradients_of_a_recorded_models_entropy_are_those_of_its_own_eager_weights(recomputed: None) -> None:
    """GPT-2 of the transformers library."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=4, n_positions=32, **ends)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").double().eval()
    ids, parameters = torch.randint(60, (2, 20)), [*model.transformer.h[0].parameters()]
    eager = torch.stack([entropy(a).mean() for a in model(ids, output_attentions=True).attentions]).sum()
    want = torch.autograd.grad(eager, parameters)
    model.set_attn_implementation("sdpa")
    with record(model, detach=False) as recording:
        model(ids)
    ours = torch.stack([attn.entropy().mean() for attn in recording]).sum()
    torch.testing.assert_close(torch.autograd.grad(ours, parameters), want, rtol=1e-9, atol=1e-14)


def test_one_weights_gradient_computes_the_rows_of_one_block_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[slice] = []
    scored = SoftmaxMap._scores

    def count(self: Any, rows: slice, cols: Any) -> Tensor:
        computed.append(rows)
        return scored(self, rows, cols)

    q, k = (random(1, 2, 200, 4).requires_grad_() for _ in range(2))
    with tiles.tile_size(20, 50), few(-1):
        weight = SoftmaxMap(q, k).pick(70, 3)
        monkeypatch.setattr(SoftmaxMap, "_scores", count)
        weight.sum().backward()
    assert {(rows.start, rows.stop) for rows in computed} == {(60, 80)}


def test_a_result_keeps_its_map_no_longer_than_itself(recomputed: None) -> None:
    """No cycle: the last reference frees them, without the collector."""
    gc.disable()
    try:
        attn = SoftmaxMap(*qk())
        found, alive = attn.statistics(), weakref.ref(attn)
        found.entropy.sum().backward()
        del attn, found
        assert alive() is None
    finally:
        gc.enable()


# --- where gradients are taken -----------------------------------------------------------------------------


def _loss(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    attn = SoftmaxMap(q, k, **(how or {"mask": masks.causal()}))
    return (attn.entropy() * attn.mass(0)).sum() + attn.received().square().sum()


def _dense_loss(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    a = reference.weights(q, k, **(how or {"mask": reference.causal(q.shape[-2], k.shape[-2])}))
    return (entropy(a) * a[..., 0]).sum() + a.sum(-2).square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_keep_the_tiles(kind: str, recomputed: None) -> None:
    def twice(loss: Callable[..., Tensor], how: dict[str, Any]) -> tuple[Tensor, ...]:
        q, k = qk()
        first = torch.autograd.grad(loss(q, k, **how), (q, k), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k))

    ours, textbook = (how or {"scale": 0.5} for how in KINDS[kind])
    with tiles.tile_size(4, 3):
        torch.testing.assert_close(twice(_loss, ours), twice(_dense_loss, textbook), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's, about itself
def test_torch_func_sees_the_tiles(recomputed: None) -> None:
    q, k = (x.detach() for x in qk())
    for take in (func.grad, lambda of: func.jacfwd(of)):
        torch.testing.assert_close(take(lambda q: _loss(q, k))(q), take(lambda q: _dense_loss(q, k))(q))
    held = q.clone().requires_grad_()
    entropies = SoftmaxMap(held, k)
    got = func.grad(lambda c: (c * entropies.entropy()).sum())(torch.ones(()).double())
    torch.testing.assert_close(got, entropy(reference.weights(q, k)).sum())


def test_autocast_rounds_nothing(recomputed: None) -> None:
    def gradient(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        attn = SoftmaxMap(q, k, mask=masks.causal())
        loss = attn.entropy().square().sum() + (attn @ k).square().sum() + attn.lse.sum()
        return torch.autograd.grad(loss, (q, k))

    q, k = (random(2, n, 4).float().requires_grad_() for n in (9, 13))
    want = gradient(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradient(q, k)
    assert all(map(torch.equal, got, want))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's, about itself
@pytest.mark.filterwarnings("ignore:.*of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_step_breaks_the_graph_and_keeps_no_tile(recomputed: None) -> None:
    torch._dynamo.reset()
    held: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor.numel())
        return tensor

    q, k = (random(1, 2, 100, 4).requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = torch.compile(lambda q, k: SoftmaxMap(2 * q, k).entropy().sum(), backend="aot_eager")(q, k)
    assert 0 < max(held) < 100 * 100
    want = entropy(reference.weights(2 * q, k)).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, (q, k)), torch.autograd.grad(want, (q, k)))


def test_a_hook_on_the_queries_runs_once(recomputed: None) -> None:
    q, k = qk()
    ran: list[Tensor] = []
    doubled = 2 * q
    doubled.register_hook(ran.append)
    SoftmaxMap(doubled, k).entropy().sum().backward()
    assert len(ran) == 1


def test_a_checkpointed_layer(recomputed: None) -> None:
    """Activation checkpointing around it: what the layer computes again is what the gradient is taken of."""
    layer = nn.Linear(D, D).double()

    def run(q: Tensor, k: Tensor) -> Tensor:
        return _loss(layer(q), layer(k))

    q, k = qk()
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, q, k, use_reentrant=False), (q, k))
    torch.testing.assert_close(got, torch.autograd.grad(_dense_loss(layer(q), layer(k)), (q, k)))


def test_what_was_overwritten_before_the_backward_pass_is_noticed(recomputed: None) -> None:
    for which in range(3):
        tensors = [2 * x for x in (*qk(), random(S, 2).requires_grad_())]
        out = (SoftmaxMap(*tensors[:2]) @ tensors[2]).sum()
        tensors[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
