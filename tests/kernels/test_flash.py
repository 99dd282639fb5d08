"""FlashAttention written out: the dense formula's numbers and gradients, and one tile of scores at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.nn import functional as F

from clearhead import DTypeError, ShapeError, masks, nn, reference
from clearhead.functional import flash_attention, scaled_dot_product_attention
from clearhead.kernels import flash
from clearhead.masks import BoundMask, Coverage
from clearhead.testing import Allocations, Case, build_case, pairwise
from clearhead.testing.cases import BIASES, MASKS, SIZES

FLASH = json.loads((Path(__file__).parents[1] / "data" / "defs.json").read_text())["flash"]
N = 37  # tokens: 37² = 1,369 scores a head
assert FLASH["naive"] == N * N


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def qkv(T: int = N, S: int = N, H: int = 2, G: int = 1, D: int = 4) -> list[Tensor]:
    sizes = ((H, T, D), (G, S, D), (G, S, 3))
    return [random(2, *size, seed=i).requires_grad_() for i, size in enumerate(sizes)]


def dense(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    return reference.weights(q, k, **arguments) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


# --- the same numbers --------------------------------------------------------------------------------------

TILES = [(1, 1), (1, N), (N, 1), (8, 8), (5, 7), (16, 3), (N, N), (100, 100)]


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("tile", TILES)
def test_requirement_34_equals_the_dense_formula_for_every_tile_size(
    tile: tuple[int, int], softcap: float | None
) -> None:
    q, k, v = qkv()
    seen, weight = reference.causal(N, N), random(2, 2, N, 3, seed=9)
    out, _ = flash_attention(q, k, v, mask=masks.causal(), softcap=softcap, tile=tile)
    want = dense(q, k, v, mask=seen, softcap=softcap)
    torch.testing.assert_close(out, want, rtol=0, atol=8 * FLASH["max_diff_any_tile"])
    ours, theirs = (torch.autograd.grad(o, (q, k, v), weight) for o in (out, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)


def test_the_kept_log_sum_exp_is_natural() -> None:
    q, k, v = qkv()
    _, lse = flash.attention(q, k, v, tile=(8, 8))
    want = torch.logsumexp(reference.scores(q, k), -1)
    torch.testing.assert_close(lse, want, rtol=0, atol=4 * FLASH["logsumexp_diff"])
    assert not lse.requires_grad


NAMES = pairwise(
    {
        "mask": list(MASKS),
        "size": [size for size in SIZES if "1025" not in size],
        "bias": [bias for bias in BIASES if bias != "learned sinks"],
        "layout": ["contiguous", "tokens first", "stride 0", "every other"],
        "dtype": ["float32", "bfloat16", "float64"],
        "heads": ["2/2", "4/2", "3/1"],
        "tile": ["default", "third", "wide"],
    }
)


def _inputs(case: Case, dtype: torch.dtype, v: Tensor) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in (case.q, case.k, v)]


def _by_the_textbook(case: Case, dtype: torch.dtype, v: Tensor, d_out: Tensor) -> list[Tensor]:
    """Output and gradients, dense, in any dtype."""
    q, k, v = _inputs(case, dtype, v)
    seen, bias = case.seen, None
    if case.added is not None:
        hidden = case.added == -torch.inf
        seen, bias = seen & ~hidden, case.added.masked_fill(hidden, 0).to(dtype)
    out = dense(q, k, v, mask=seen, scale=case.scale, softcap=case.softcap, bias=bias)
    return [out, *torch.autograd.grad(out, (q, k, v), d_out.to(dtype))]


def _magnitudes(case: Case, v: Tensor, d_out: Tensor) -> list[Tensor]:
    """What the terms of output and gradients add up to without their signs: rounding is relative to that."""
    (B, H, _, S), G, D = case.shape, v.shape[1], case.q.shape[-1]
    scale, p = D**-0.5 if case.scale is None else case.scale, case.exact()
    q, k, v, d_out = (x.double().abs() for x in (case.q, case.k, v, d_out))
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    d_scores = p * (d_out @ v.mT + (d_out * (p @ v)).sum(-1, keepdim=True)) * scale
    d_k, d_v = (d_scores.mT @ q).reshape(B, G, H // G, S, D), (p.mT @ d_out).reshape(B, G, H // G, S, 5)
    return [p @ v, d_scores @ k, d_k.sum(2), d_v.sum(2)]


@pytest.mark.parametrize("number", range(len(NAMES)), ids=lambda n: ", ".join(NAMES[n].values()))
def test_every_mask_bias_layout_and_dtype(number: int) -> None:
    case = build_case(NAMES[number], seed=number)
    dtype, (B, H, T, S) = case.q.dtype, case.shape
    wide = torch.promote_types(dtype, torch.float32)
    v, d_out = random(B, case.k.shape[1], S, 5, dtype=dtype), random(B, H, T, 5, dtype=dtype)
    inputs = _inputs(case, dtype, v)
    out, attn = flash_attention(
        *inputs, mask=case.mask, bias=case.bias, scale=case.scale, softcap=case.softcap, tile=case.tile or (128, 128)
    )
    got = [out.detach(), *torch.autograd.grad(out, inputs, d_out)]
    exact, plain = (_by_the_textbook(case, some, v, d_out) for some in (torch.float64, wide))
    for name, ours, want, theirs, size in zip(
        ("out", "dq", "dk", "dv"), got, exact, plain, _magnitudes(case, v, d_out), strict=True
    ):
        assert ours.dtype == dtype
        assert ours.shape == want.shape
        rounding = torch.finfo(wide).eps * ((case.terms + H * T) ** 0.5 + case.largest_score())
        allowed = largest(theirs.to(dtype) - want) + rounding * largest(size)
        allowed += torch.finfo(dtype).eps / 2 * largest(want)  # the result itself is rounded
        assert largest(ours - want) <= allowed, name
    empty = case.exact().sum(-1) == 0
    assert (out[empty] == 0).all()
    assert (got[1][empty] == 0).all()
    assert attn.shape == case.shape


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def test_half_precision_is_summed_in_float32() -> None:
    """4,096 equal values: a bfloat16 sum would stop at 256."""
    q, k = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 4096, 8, dtype=torch.bfloat16)
    v = torch.ones(1, 1, 4096, 1, dtype=torch.bfloat16)
    out, lse = flash.attention(q, k, v, tile=(8, 8))
    assert out.dtype == torch.bfloat16
    assert out.item() == 1
    assert lse.item() == pytest.approx(8.317766, abs=1e-5)


def test_autocast_rounds_no_tile() -> None:
    q, k, v = qkv()
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    want = flash_attention(q, k, v)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = flash_attention(q, k, v)[0]
        assert torch.equal(torch.autograd.grad(got.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0])
    assert torch.equal(got, want)


def test_a_mask_and_a_bias_per_text_may_have_three_dimensions_beside_queries_of_three() -> None:
    q, k, v = (random(2, 4, 3, seed=seed) for seed in range(3))
    mask = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)) > 0.3
    for given in ({"mask": mask}, {"bias": random(2, 4, 4)}):
        (value,) = given.values()
        out, attn = flash_attention(q, k, v, **given)
        want, same = scaled_dot_product_attention(q, k, v, value)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(attn.to_dense(), same.to_dense())


def test_trap_03_an_inverted_mask_is_noticed() -> None:
    x, blocked = random(4, 3), torch.ones(4, 4).triu(1).bool()
    with pytest.warns(UserWarning, match=r"^mask=a bool tensor .* pass ~mask") as caught:
        flash_attention(x, x, x, mask=blocked)
    assert caught[0].filename == __file__
    flash_attention(x, x, x, mask=~blocked)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_gradcheck(groups: int, softcap: float | None) -> None:
    q, k, v = qkv(T=5, S=6, H=4, G=groups, D=3)
    rule = masks.causal() & masks.padding(keys=torch.tensor([[0, 0, 1, 1, 0, 1], [1] * 6]))

    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, mask=rule, softcap=softcap, bias=random(5, 6), tile=(2, 4))[0]

    assert torch.autograd.gradcheck(of, (q, k, v))


def test_trap_04_a_row_that_sees_nothing_is_0_with_gradients_of_0() -> None:
    q, k, v = qkv(T=4, S=6)
    out, lse = flash.attention(q, k, v, mask=masks.causal() & ~masks.first_tokens(4), tile=(3, 2), softcap=2.0)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -torch.inf).all()
    d_q, d_k, d_v = torch.autograd.grad(out.sum(), (q, k, v))
    assert (d_q[:, :, :2] == 0).all()
    for gradient in (d_k, d_v):
        assert (gradient[:, :, :4] == 0).all()
        assert gradient.isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (x.float() * 100 for x in qkv())
    out, _ = flash_attention(q, k, v, tile=(8, 8), scale=1.0)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True))


# --- one tile at a time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(20) | masks.first_tokens(2)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_requirement_34_no_tensor_of_scores_is_larger_than_a_tile(
    mask: masks.MaskRule | None, softcap: float | None
) -> None:
    """One feature, so that nothing else is as large: 37 tokens of one number each beside tiles of 8 × 8."""
    q, k, v = (random(1, 1, N, 1, seed=i).requires_grad_() for i in range(3))
    with Allocations() as forward:
        out, _ = flash.attention(q, k, v, mask=mask, softcap=softcap, tile=(8, 8))
    with Allocations() as backward:
        torch.autograd.grad(out.sum(), (q, k, v))
    for allocations in (forward, backward):
        assert allocations.largest == 8 * FLASH["peak_score_elements_8x8"] == 8 * 8 * 8  # float64
        assert allocations.peak <= 16 * allocations.largest
    with Allocations() as naive:
        dense(q, k, v, mask=None if mask is None else reference.causal(N, N), softcap=softcap)
    assert naive.largest == 8 * FLASH["naive"]


def test_memory_grows_with_n_and_not_with_its_square() -> None:
    def peak(n: int) -> int:
        q, k, v = (random(1, 1, n, 4, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
        with Allocations() as allocations:
            out, _ = flash.attention(q, k, v, mask=masks.causal(), softcap=2.0, tile=(32, 32))
            torch.autograd.grad(out.sum(), (q, k, v))
        return allocations.peak

    assert peak(1024) <= 2 * peak(512)


def test_trap_15_keys_are_never_expanded() -> None:
    """64 query heads on one key head, in two batch entries."""
    q, k = (random(2, h, n, 16, dtype=torch.float32).requires_grad_() for h, n in ((64, 4), (1, 4096)))
    with Allocations() as allocations:
        out, _ = flash.attention(q, k, k, tile=(4, 4096))
        out.sum().backward()
    assert allocations.largest == 4 * 2 * 64 * 4 * 4096  # a tile of scores; the keys, expanded, would be four times it


# --- work follows the mask ---------------------------------------------------------------------------------


def _blocks(rule: masks.MaskRule, n: int, size: int) -> list[Coverage]:
    bound, at = rule.bind(n, n), [slice(i, min(i + size, n)) for i in range(0, n, size)]
    return [bound.block(rows, cols) for rows in at for cols in at]


@pytest.mark.parametrize(
    "rule",
    [
        masks.causal(),
        masks.sliding_window(20),
        masks.first_tokens(3) & masks.causal() | masks.sliding_window(9),
        masks.documents(torch.arange(N) // 10),
    ],
)
def test_requirement_35_empty_blocks_are_skipped_and_full_ones_read_no_mask(
    rule: masks.MaskRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv()
    counts = {"tiles": 0, "masks": 0}
    capped, call = flash.Scoring.capped, BoundMask.__call__

    def count_tiles(self: Any, q: Tensor, k: Tensor) -> Tensor:
        counts["tiles"] += 1
        return capped(self, q, k)

    def count_masks(self: Any, *at: Tensor) -> Tensor:
        counts["masks"] += 1
        return call(self, *at)

    monkeypatch.setattr(flash.Scoring, "capped", count_tiles)
    monkeypatch.setattr(BoundMask, "__call__", count_masks)
    found = _blocks(rule, N, 8)
    out, _ = flash.attention(q, k, v, mask=rule, tile=(8, 8))
    want = {"tiles": len(found) - found.count(Coverage.EMPTY), "masks": found.count(Coverage.MIXED)}
    assert counts == want
    assert want["tiles"] < len(found)
    torch.autograd.grad(out.sum(), (q, k, v))
    assert counts == {name: 2 * n for name, n in want.items()}


# --- torch.func, compiled, without numbers -----------------------------------------------------------------


def _both(seen: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Attention over tiles and the dense formula, of q, k and v."""
    rule, mask = (masks.causal(), reference.causal(5, 5)) if seen else (None, None)
    return (
        lambda q, k, v: flash_attention(q, k, v, mask=rule, softcap=1.5, tile=(3, 2))[0],
        lambda q, k, v: dense(q, k, v, mask=mask, softcap=1.5),
    )


def _square(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: of(*inputs).square().sum()


ALL = (0, 1, 2)


@pytest.mark.parametrize("seen", [True, False])
def test_torch_func_gives_the_dense_formulas_derivatives(seen: bool) -> None:
    q, k, v = (x.detach() for x in qkv(T=5, S=5, H=4, G=2))
    ours, theirs = _both(seen)
    for take in (func.grad, func.jacrev):
        one, two = (_square(of) if take is func.grad else of for of in (ours, theirs))
        torch.testing.assert_close(take(one, ALL)(q, k, v), take(two, ALL)(q, k, v))
    for one, two in zip(
        func.vjp(ours, q, k, v)[1](ours(q, k, v)), func.grad(_square(theirs), ALL)(q, k, v), strict=True
    ):
        torch.testing.assert_close(2 * one, two)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 1, None), (None, None, 2), (0, 1, -1), (-2, 0, 0)])
def test_vmap_gives_what_a_loop_gives(dims: tuple[int | None, ...]) -> None:
    inputs = [x.detach() for x in qkv(T=5, S=5, H=4, G=2)]
    many = [x if dim is None else torch.stack([x, 2 * x, -x], dim) for x, dim in zip(inputs, dims, strict=True)]

    def one(i: int) -> list[Tensor]:
        return [x if dim is None else x.select(dim, i) for x, dim in zip(many, dims, strict=True)]

    ours, theirs = _both(seen=True)
    want = torch.stack([theirs(*one(i)) for i in range(3)])
    torch.testing.assert_close(torch.vmap(ours, dims)(*many), want)
    got = torch.vmap(func.grad(_square(ours), ALL), dims)(*many)
    for i in range(3):
        torch.testing.assert_close(tuple(x[i] for x in got), func.grad(_square(theirs), ALL)(*one(i)))


def test_vmap_within_vmap() -> None:
    _, k, v = (x.detach() for x in qkv(T=5, S=5, H=4, G=2))
    q, (ours, theirs) = random(2, 3, 2, 4, 5, 4), _both(seen=True)
    got = torch.vmap(torch.vmap(lambda x: ours(x, k, v)), in_dims=1)(q)
    torch.testing.assert_close(got, torch.stack([torch.stack([theirs(x, k, v) for x in row]) for row in q.unbind(1)]))


def test_per_sample_gradients_of_a_soft_capped_layer() -> None:
    layer, x = nn.Attention(8, 8, num_heads=4, num_kv_heads=2, softcap=2.0).double(), random(3, 5, 8)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return func.functional_call(layer, parameters, (x,)).square().sum()

    got = torch.vmap(func.grad(loss), (None, 0))(parameters, x)
    for i, text in enumerate(x):
        want = torch.autograd.grad(layer(text).square().sum(), list(parameters.values()))
        torch.testing.assert_close(tuple(got[name][i] for name in parameters), want)


def test_a_mask_or_bias_of_vmaps_is_refused() -> None:
    q, k, v = (x.detach() for x in qkv(T=4, S=4))
    with pytest.raises(DTypeError, match=r"with padding\(keys=\(2, 4\)\), over whose tensors vmap runs"):
        torch.vmap(lambda keys: flash_attention(q, k, v, mask=masks.padding(keys=keys))[0])(torch.ones(3, 2, 4) > 0)
    with pytest.raises(DTypeError, match=r"with dense_bias\(.*Give mask and bias a batch dimension"):
        torch.vmap(lambda bias: flash_attention(q, k, v, bias=bias)[0])(torch.ones(3, 4, 4))


FORWARD = {
    "jvp": lambda of, x: func.jvp(of, (x,), (x,)),
    "jacfwd": lambda of, x: func.jacfwd(of)(x),
    "hessian": lambda of, x: func.hessian(lambda x: of(x).sum())(x),
    "in vmap": lambda of, x: torch.vmap(lambda x: func.jvp(of, (x,), (x,)))(x[None]),
    "of a gradient": lambda of, x: func.jvp(
        lambda c: func.grad(lambda x: (c * of(x)).sum())(x), (x.sum(),), (x.sum(),)
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's, about itself
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused(name: str) -> None:
    q, k, v = (x.detach() for x in qkv(T=4, S=4))
    with pytest.raises(RuntimeError, match=r"forward-mode derivatives \(jvp, jacfwd, hessian\) are not computed"):
        FORWARD[name](lambda x: flash_attention(x, k, v)[0], q)


def test_gradients_of_gradients_are_refused_when_they_are_asked_for() -> None:
    q, k, v = qkv(T=4, S=4)
    (once,) = torch.autograd.grad(flash_attention(q, k, v)[0].sum(), q, create_graph=True)
    torch.testing.assert_close(once, torch.autograd.grad(dense(q, k, v).sum(), q)[0])
    with pytest.raises(RuntimeError, match="gradients of gradients are not computed"):
        once.sum().backward()
    with pytest.raises(RuntimeError, match="gradients of gradients are not computed"):
        func.jacrev(func.grad(lambda x: flash_attention(x, k, v)[0].sum()))(q.detach())


@pytest.mark.parametrize("shape", [(2, 5, 8), (5, 8)])
def test_on_the_meta_device_there_are_shapes(shape: tuple[int, ...]) -> None:
    layer = nn.Attention(8, 8, num_heads=4, softcap=2.0).to("meta")
    x = torch.randn(shape, device="meta", requires_grad=True)
    out = layer(x)
    assert (out.shape, out.device.type) == (shape, "meta")
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's, about itself
def test_compiled_whole_it_gives_the_same() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(T=4, S=4, H=4, G=2)
    of, _ = _both(seen=False)
    out = torch.compile(of, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(out, of(q, k, v))
    got, want = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, of(q, k, v)))
    torch.testing.assert_close(got, want)


# --- shapes and errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 3, 5, 4), (2, 3, 0, 4), (0, 3, 5, 4)])
def test_every_rank_and_no_tokens(shape: tuple[int, ...]) -> None:
    x = random(*shape).requires_grad_()
    out, attn = flash_attention(x, x, x, tile=(2, 2))
    torch.testing.assert_close(out, reference.attention(x, x, x))
    assert out.shape == shape
    assert attn.shape == (*shape[:-1], shape[-2])
    assert torch.autograd.grad(out.sum(), x)[0].shape == shape


def test_no_keys_give_0() -> None:
    q, k = random(2, 3, 5, 4).requires_grad_(), random(2, 3, 0, 4).requires_grad_()
    out, _ = flash_attention(q, k, k)
    assert out.shape == (2, 3, 5, 4)
    assert (out == 0).all()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(out.sum(), (q, k)))


def test_the_map_beside_the_output_is_the_same_attention() -> None:
    q, k, v = qkv()
    out, attn = flash_attention(q, k, v, mask=reference.causal(N, N), bias=random(N, N), softcap=2.0, scale=0.3)
    torch.testing.assert_close(attn @ v, out)


def test_a_bias_gets_no_gradient_and_it_is_said() -> None:
    q, k, v = qkv()
    bias = random(N, N).requires_grad_()
    with pytest.raises(DTypeError, match=r"bias=dense_bias.*requires a gradient.*Detach the bias"):
        flash_attention(q, k, v, bias=bias)
    torch.testing.assert_close(flash_attention(q, k, v, bias=bias.detach())[0], dense(q, k, v, bias=bias.detach()))
    with torch.no_grad():
        flash_attention(q, k, v, bias=bias)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tile": (0, 8)}, ShapeError, r"flash_attention\(tile\[0\]=0\): expected an integer >= 1"),
        ({"tile": 8}, ShapeError, r"flash_attention\(tile=8\): expected \(queries, keys\)"),
        ({"softcap": -1.0}, ShapeError, "expected a number above 0"),
        ({"mask": torch.ones(2, 3, 3).bool()}, ShapeError, r"\(B, 1, T, S\) for one mask"),
        ({"mask": torch.ones(4, 4).bool()}, ShapeError, "does not broadcast"),
        ({"mask": torch.zeros(N, N)}, DTypeError, "pass it as a bias"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attention(*qkv(), **arguments)


def test_trap_21_sizes_that_do_not_fit_name_the_call() -> None:
    q, k, v = qkv(H=3, G=2)
    with pytest.raises(ShapeError, match=r"flash_attention\(q=.*multiple of the number of key heads"):
        flash_attention(q, k, v)
