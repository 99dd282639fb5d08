"""The layer to ship against the textbook in float64, in every variant; and the ways in which it is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import DTypeError, ShapeError, masks, reference, scores
from clearhead.kernels import flash, fused
from clearhead.nn import Attention, MultiHeadAttention, convert_rotary
from clearhead.scores import Rotary
from clearhead.testing import assert_close
from clearhead.testing.memory import Allocations

B, T, D_IN, D_OUT, H = 2, 9, 5, 16, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "both ways": {"is_causal": False},
    "offsets": {"qkv_bias": True},
    "no output offset": {"out_bias": False},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "window": {"window": 3},
    "window and sinks": {"window": 3, "sink_tokens": 2},
    "rotary": {"rotary": Rotary(4)},
    "rotary, interleaved": {"rotary": Rotary(4, interleaved=True)},
    "rotary of a part": {"rotary": Rotary(2, base=500.0)},
    "alibi": {"bias": scores.alibi(H)},
    "soft-capped": {"softcap": 1.5, "window": 4},
    "normalised": {"qk_norm": True, "rotary": Rotary(4)},
    "scale": {"scale": 0.2},
    "all at once": {"num_kv_heads": 2, "window": 4, "rotary": Rotary(4), "qk_norm": True, "bias": scores.alibi(H)},
}
CACHED = [name for name in VARIANTS if name != "both ways"]


def make(name: str = "causal", *, dtype: torch.dtype = torch.float64, **more: Any) -> Attention:
    torch.manual_seed(0)
    layer = Attention(D_IN, D_OUT, num_heads=H, **VARIANTS[name] | more)
    for parameter in layer.parameters():  # norms begin as ones, which a wrong order of features would survive
        nn.init.uniform_(parameter, -1, 1)
    return layer.to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(shape or (B, T, D_IN), generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- the textbook --------------------------------------------------------------------------------------------------


@torch.no_grad()
def textbook(
    layer: Attention, x: Tensor, context: Tensor | None = None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output and the weights of a layer by dense formulas, in x's dtype."""
    source = x if context is None else context
    q, k, v = (_heads(layer, w, y) for w, y in (("W_query", x), ("W_key", source), ("W_value", source)))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _normal(q, layer.q_norm.weight), _normal(k, layer.k_norm.weight)
    if layer.rotary is not None:
        how = {"dim": layer.rotary.dim, "base": layer.rotary.base, "interleaved": layer.rotary.interleaved}
        q, k = reference.rotary(q, **how), reference.rotary(k, **how)
    mask = _visible(layer, x.shape[-2], source.shape[-2]) & (seen if seen is not None else torch.tensor(True))
    bias = reference.alibi(scores.alibi_slopes(H).to(x.dtype), T=x.shape[-2], S=source.shape[-2])
    weights = reference.weights(
        q, k, mask=mask, scale=layer.scale, softcap=layer.softcap, bias=bias if layer.bias is not None else None
    )
    v = v.repeat_interleave(H // layer.num_kv_heads, dim=-3)
    joined = torch.cat([weights[..., h, :, :] @ v[..., h, :, :] for h in range(H)], -1)
    return _linear(layer.out_proj, joined), weights


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    return x @ linear.weight.to(x.dtype).T + (0 if linear.bias is None else linear.bias.to(x.dtype))


def _heads(layer: Attention, name: str, x: Tensor) -> Tensor:
    features = _linear(getattr(layer, name), x)
    return torch.stack(features.split(D_OUT // H, -1), -3)


def _normal(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.to(x.dtype)


def _visible(layer: Attention, rows: int, cols: int) -> Tensor:
    if layer.window is not None:
        near = reference.sliding_window(rows, cols, layer.window)
        return near | (reference.causal(rows, cols) & (torch.arange(cols) < layer.sink_tokens))
    return reference.causal(rows, cols) if layer.is_causal else torch.ones(rows, cols, dtype=torch.bool)


@pytest.mark.parametrize("length", [1, 33, 129])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_textbook_s_formula(name: str, dtype: torch.dtype, length: int) -> None:
    layer, x = make(name, dtype=dtype), tokens(B, length, D_IN, dtype=dtype)
    out, attn = layer.attend(x)
    (exact, weights), (plain, plain_weights) = textbook(layer, x.double()), textbook(layer, x)
    terms = D_IN + D_OUT + length
    largest = float((attn.q.abs().max() * attn.k.abs().max()).detach()) * 4
    assert_close(out, exact, plain, terms=terms, score=largest, what="output")
    assert_close(attn.to_dense(), weights, plain_weights, terms=terms, score=largest, what="weights")
    assert torch.equal(layer(x), out)


def test_the_weights_of_the_last_rung_load_and_give_its_output() -> None:
    rung = MultiHeadAttention(D_IN, D_OUT, T, 0.0, H, qkv_bias=True)
    layer = Attention(D_IN, D_OUT, T, 0.0, H, True)
    layer.load_state_dict(rung.state_dict())
    x = tokens(dtype=torch.float32)
    torch.testing.assert_close(layer(x), rung(x), atol=1e-6, rtol=0)
    rung.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("name", VARIANTS)
def test_one_text_is_a_batch_of_one(name: str) -> None:
    layer, x = make(name), tokens(T, D_IN)
    out, attn = layer.attend(x)
    assert attn.shape == (H, T, T)
    torch.testing.assert_close(out, layer(x[None])[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "soft-capped"])
def test_dropout_is_for_training_and_not_in_the_reported_weights(name: str) -> None:
    layer, x = make(name, dropout=0.5), tokens()
    still = make(name).eval()
    assert torch.equal(layer.eval()(x), still(x))
    torch.manual_seed(0)
    out, attn = layer.train().attend(x)
    assert not torch.allclose(out, still(x))
    torch.testing.assert_close(attn.to_dense(), still.attend(x)[1].to_dense(), atol=1e-12, rtol=0)


# --- masks and padding ---------------------------------------------------------------------------------------------


def bool_masks() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {str(s): torch.rand(*s, generator=g) > 0.3 for s in [(T, T), (B, 1, T, T), (B, H, T, T), (1, H, T, T)]}


@pytest.mark.parametrize("shape", bool_masks())
@pytest.mark.parametrize("name", ["causal", "both ways", "window", "alibi", "soft-capped"])
def test_a_mask_is_joined_to_the_layer_s_own_rule(name: str, shape: str) -> None:
    layer, x, mask = make(name), tokens(), bool_masks()[shape]
    expected = textbook(layer, x, seen=mask)[0]
    hidden = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf)
    for given in (mask, masks.dense(mask), hidden):
        torch.testing.assert_close(layer(x, mask=given), expected, atol=1e-12, rtol=0)


def test_padding_hides_keys_and_silences_queries() -> None:
    layer, x = make(), tokens()
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
    out, attn = layer.attend(x, padding=real)
    seen = (real[:, None, :] * real[:, :, None]).bool()[:, None]
    torch.testing.assert_close(out, textbook(layer, x, seen=seen)[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(out[0, :3], layer.out_proj.bias.expand(3, -1))
    assert attn.to_dense()[0, :, :3].count_nonzero() == 0
    alone = layer(x[:1, 3:])
    torch.testing.assert_close(out[:1, 3:], alone, atol=1e-12, rtol=0)


def test_queries_and_keys_of_cross_attention_have_paddings_of_their_own() -> None:
    layer = make("both ways", d_context=3)
    x, context = tokens(), tokens(B, 7, 3, seed=2)
    real, there = torch.arange(T) < torch.tensor([[9], [6]]), torch.arange(7) < torch.tensor([[4], [7]])
    out, attn = layer.attend(x, context, padding=real, context_padding=there)
    seen = (real[:, :, None] & there[:, None, :])[:, None]
    expected, weights = textbook(layer, x, context, seen)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(attn.to_dense(), weights, atol=1e-12, rtol=0)
    assert attn.shape == (B, H, T, 7)


def test_changing_the_context_moves_the_output() -> None:
    layer = make("both ways", d_context=3)
    x, context = tokens(), tokens(B, 7, 3, seed=2)
    assert not torch.allclose(layer(x, context), layer(x, context + 1))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(name: str) -> None:
    layer, x = make(name), tokens().requires_grad_()
    mask = torch.ones(T, T, dtype=torch.bool)
    mask[4] = False
    out, attn = layer.attend(x, mask=mask)
    bias = torch.zeros(D_OUT) if layer.out_proj.bias is None else layer.out_proj.bias
    torch.testing.assert_close(out[:, 4], bias.double().expand(B, -1))
    assert attn[..., 4, :].count_nonzero() == 0
    assert bool((attn.lse[..., 4] == -torch.inf).all())
    out.sum().backward()
    for parameter in (x, *layer.parameters()):
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    layer, x = make(name), tokens(1, 5, D_IN).requires_grad_()
    named = dict(layer.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(named, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *named.values()))


# --- the cache -----------------------------------------------------------------------------------------------------

STEPS = {"one by one": [1] * 11, "a text, then one by one": [6, 1, 1, 1, 1, 1], "in pieces": [4, 1, 3, 2, 1]}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", [n for n in CACHED if n != "all at once"])
def test_the_cache_gives_what_the_whole_text_gives(name: str, steps: str) -> None:
    layer, x = make(name), tokens(B, 11, D_IN)
    cache = layer.new_cache(B, 11)
    with torch.no_grad():
        parts = [layer(piece, cache=cache) for piece in x.split(STEPS[steps], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), atol=1e-12, rtol=0)
    assert cache.tokens == 11


def test_a_rolling_cache_holds_no_more_than_sinks_and_window_however_long_the_text() -> None:
    layer, x = make("window and sinks"), tokens(B, 200, D_IN)
    cache = layer.new_cache(B)
    size = cache.nbytes
    with torch.no_grad():
        parts = [layer(x[:, t : t + 1], cache=cache) for t in range(200)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), atol=1e-12, rtol=0)
    assert (cache.tokens, cache.nbytes) == (200, size)
    assert len(cache) <= 2 + 3 + 1


def test_the_map_of_a_cached_step_outlives_the_next_step() -> None:
    layer, x = make("grouped"), tokens()
    cache = layer.new_cache(B, T)
    with torch.no_grad():
        _, first = layer.attend(x[:, :5], cache=cache)
        _, second = layer.attend(x[:, 5:6], cache=cache)
        layer(x[:, 6:], cache=cache)
        whole = layer.attend(x)[1].to_dense()
    torch.testing.assert_close(first.to_dense(), whole[:, :, :5, :5], atol=1e-12, rtol=0)
    torch.testing.assert_close(second.to_dense(), whole[:, :, 5:6, :6], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["causal", "window", "window and sinks"])
def test_left_padding_and_a_cache_go_together(name: str) -> None:
    layer, x = make(name), tokens()
    real = torch.arange(T) >= torch.tensor([[3], [0]])
    cache = layer.new_cache(B, T)
    with torch.no_grad():
        steps = [layer(x[:, t : t + 1], padding=real[:, : t + 1], cache=cache) for t in range(T)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x, padding=real), atol=1e-12, rtol=0)


def test_a_cache_begins_anew_after_reset() -> None:
    layer, x = make(), tokens()
    cache = layer.new_cache(B, T)
    with torch.no_grad():
        first = layer(x, cache=cache)
        cache.reset()
        assert len(cache) == cache.tokens == 0
        assert torch.equal(layer(x, cache=cache), first)


def test_a_cache_is_allocated_once() -> None:
    layer, x = make("grouped", dtype=torch.float32), tokens(1, 1, D_IN, dtype=torch.float32)
    cache = layer.new_cache(1, 4096)
    assert cache.nbytes == 2 * 4096 * 2 * 4 * 4  # 2 · n · G · D · bytes
    with torch.no_grad(), Allocations() as allocations:
        for _ in range(4):
            layer(x, cache=cache)
    assert allocations.largest < 4096


# --- conversions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_weights_of_pytorch_s_module_give_its_output_and_its_weights(batch_first: bool, bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(512, 8, bias=bias, batch_first=batch_first).eval()
    if bias:
        nn.init.normal_(module.in_proj_bias)
    x = torch.randn(2, 16, 512)
    given = x if batch_first else x.transpose(0, 1)
    with torch.no_grad():
        expected, averaged = module(given, given, given)
        _, per_head = module(given, given, given, average_attn_weights=False)
        layer = Attention.from_torch(module)
        out, attn = layer.attend(x)
    torch.testing.assert_close(out, expected if batch_first else expected.transpose(0, 1), atol=2e-6, rtol=0)
    torch.testing.assert_close(attn.to_dense(), per_head, atol=1e-6, rtol=0)
    torch.testing.assert_close(clearhead.average_heads(attn).to_dense(), averaged, atol=1e-6, rtol=0)
    assert sum(p.numel() for p in layer.parameters()) == (1_050_624 if bias else 1_048_576)
    back = layer.to_torch().state_dict()
    assert all(torch.equal(back[name], weight) for name, weight in module.state_dict().items())


def test_masks_of_pytorch_s_module_mean_the_opposite() -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True).double().eval()
    x, hidden = tokens(B, T, 16), torch.rand(T, T, generator=torch.Generator().manual_seed(0)) > 0.7
    padded = torch.arange(T) >= torch.tensor([[9], [6]])
    expected = module(x, x, x, attn_mask=hidden, key_padding_mask=padded)[0]
    out = Attention.from_torch(module)(x, mask=~hidden, padding=~padded)
    torch.testing.assert_close(out[~padded], expected[~padded], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kdim", [None, 3])
def test_cross_attention_of_pytorch_s_module_converts_too(kdim: int | None) -> None:
    module = nn.MultiheadAttention(16, 4, kdim=kdim, vdim=kdim, batch_first=True).double().eval()
    x, context = tokens(B, T, 16), tokens(B, 7, kdim or 16, seed=2)
    layer = Attention.from_torch(module, cross=True)
    torch.testing.assert_close(layer(x, context), module(x, context, context)[0], atol=1e-12, rtol=0)
    back = layer.to_torch()
    torch.testing.assert_close(back(x, context, context)[0], module(x, context, context)[0], atol=1e-12, rtol=0)


def test_a_bias_that_one_side_lacks_is_zero_on_the_other() -> None:
    layer = Attention(16, 16, num_heads=4, is_causal=False).double()
    x = tokens(B, T, 16)
    module = layer.to_torch().eval()
    torch.testing.assert_close(module(x, x, x)[0], layer(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dim", [2, 4])
def test_the_two_layouts_of_rotary_differ_by_the_order_of_features(dim: int, qk_norm: bool) -> None:
    half = make(rotary=Rotary(dim), num_kv_heads=2, qkv_bias=True, qk_norm=qk_norm)
    x = tokens()
    interleaved = convert_rotary(half, interleaved=True)
    torch.testing.assert_close(interleaved(x), half(x), atol=1e-12, rtol=0)
    back = convert_rotary(interleaved, interleaved=False)
    assert all(torch.equal(back.state_dict()[name], weight) for name, weight in half.state_dict().items())
    if dim == 4:  # one pair is one pair in either layout
        wrong = make(rotary=Rotary(dim, interleaved=True), num_kv_heads=2, qkv_bias=True, qk_norm=qk_norm)
        assert not torch.allclose(wrong(x), half(x))


# --- compiled, exported, half precision, copies --------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_the_exported_layer_gives_the_same_output(name: str) -> None:
    layer, x = make(name), tokens()
    program = torch.export.export(layer, (x,), {"padding": torch.ones(B, T, dtype=torch.bool)})
    real = torch.arange(T) >= torch.tensor([[3], [0]])
    torch.testing.assert_close(program.module()(x, padding=real), layer(x, padding=real), atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's, about itself
@pytest.mark.parametrize("name", ["causal", "all at once", "soft-capped"])
def test_the_compiled_layer_gives_the_same_output_and_gradients(name: str) -> None:
    torch._dynamo.reset()
    layer, x = make(name), tokens()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    real = torch.arange(T) >= torch.tensor([[3], [0]])
    out = compiled(x, padding=real)
    torch.testing.assert_close(out, layer(x, padding=real), atol=1e-12, rtol=0)
    (ours,) = torch.autograd.grad(out.sum(), layer.W_query.weight)
    (eager,) = torch.autograd.grad(layer(x, padding=real).sum(), layer.W_query.weight)
    torch.testing.assert_close(ours, eager, atol=1e-12, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_and_autocast_are_as_near_as_their_digits_allow(name: str) -> None:
    exact = make(name, dtype=torch.float32).eval()
    x = tokens(dtype=torch.float32)
    expected = exact(x)
    half = copy.deepcopy(exact).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        automatic, attn = exact.attend(x)
    eps = torch.finfo(torch.bfloat16).eps
    allowed = eps * float(expected.abs().max()) * 8  # eight roundings: x, W, q, k, v, heads, W_out, out
    for out in (half(x.bfloat16()), automatic):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, atol=allowed, rtol=0)
    torch.testing.assert_close(attn.to_dense().sum(-1), torch.ones(B, H, T), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_copy_and_a_reloaded_layer_give_the_same_output(name: str) -> None:
    layer, x = make(name), tokens()
    other = Attention(D_IN, D_OUT, num_heads=H, **VARIANTS[name]).double()
    other.load_state_dict(layer.state_dict() | {"mask": torch.ones(9, 9)})
    for same in (copy.deepcopy(layer), other):
        assert torch.equal(same(x), layer(x))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_recorder_sees_one_call_with_its_rules(name: str) -> None:
    layer, x = make(name), tokens()
    with clearhead.record(layer) as recording:
        out = layer(x)
    assert len(recording) == 1
    assert torch.equal(out, layer(x))
    torch.testing.assert_close(recording[0].to_dense(), layer.attend(x)[1].to_dense(), atol=1e-12, rtol=0)


# --- what it costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_all_but_soft_capping_goes_through_the_fused_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make(name), tokens()
    expected = layer(x)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the other kernel was called")

    monkeypatch.setattr(fused if layer.softcap is not None else flash, "attention", refuse)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", ["causal", "window", "alibi", "soft-capped"])
def test_no_matrix_of_all_scores_is_ever_held(name: str) -> None:
    n = 4096
    layer, x = make(name, dtype=torch.float32), tokens(1, n, D_IN, dtype=torch.float32).requires_grad_()
    with Allocations() as allocations:
        layer.attend(x)[0].sum().backward()
    assert allocations.largest < n * n * 4  # of one head; with four, the dense weights take four times that


def test_a_long_context_costs_nothing_until_it_is_used() -> None:
    with Allocations() as allocations:
        layers = nn.ModuleList(Attention(8, 8, 131_072, num_heads=2) for _ in range(32))
    weights = sum(p.numel() * 4 for p in layers.parameters())
    assert allocations.peak - weights < 10_000_000
    assert {name.split(".", 1)[1] for name in layers.state_dict()} == {
        *(f"W_{name}.weight" for name in ("query", "key", "value")),
        "out_proj.weight",
        "out_proj.bias",
    }


def test_sizes_of_gpt_2() -> None:
    assert sum(p.numel() for p in Attention(768, 768, 1024, num_heads=12).parameters()) == 2_360_064
    assert sum(p.numel() for p in Attention(768, 768, 1024, 0.0, 12, True).parameters()) == 2_362_368


# --- bad input -----------------------------------------------------------------------------------------------------

X, CONTEXT = tokens(dtype=torch.float32), tokens(B, 7, 3, dtype=torch.float32)


def small(**more: Any) -> Attention:
    return Attention(D_IN, D_OUT, num_heads=H, **more)


CACHE = small().new_cache(B, 20)


@torch.no_grad()
def half_full() -> Attention:
    """A layer for 8 tokens at most, and 9 in the cache."""
    CACHE.reset()
    small()(X, cache=CACHE)
    return small(context_length=8)


@torch.no_grad()
def cached(layer: Attention, *, batch: int = B, of: Attention | None = None, twice: bool = False, **more: Any) -> None:
    """Use a layer with a cache that another layer has made, or that two layers share."""
    cache = (of or layer).new_cache(batch, **{"length": 20} | more)
    layer(X, cache=cache)
    if twice:
        small()(X[:, :1], cache=cache)


BAD: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "heads": (ShapeError, "4 heads do not divide a width of 10", lambda: Attention(8, 10, num_heads=4)),
    "kv heads": (ShapeError, "num_kv_heads has to divide num_heads", lambda: small(num_kv_heads=3)),
    "no width": (ShapeError, "d_in=0", lambda: Attention(0, 8)),
    "dropout": (ShapeError, "dropout=1.5", lambda: small(dropout=1.5)),
    "window 0": (ShapeError, "window=0", lambda: small(window=0)),
    "sinks alone": (ShapeError, "give a window too", lambda: small(sink_tokens=4)),
    "window both ways": (ShapeError, "implies is_causal", lambda: small(window=4, is_causal=False)),
    "causal context": (ShapeError, "no order", lambda: small(d_context=3, is_causal=True)),
    "rotary context": (ShapeError, "no order", lambda: small(d_context=3, rotary=Rotary(4))),
    "wide rotary": (ShapeError, "only 4 wide", lambda: small(rotary=Rotary(8))),
    "odd rotary": (ShapeError, "in pairs", lambda: Rotary(3)),
    "capped dropout": (ShapeError, "no dropout", lambda: small(softcap=2.0, dropout=0.1)),
    "width": (ShapeError, "a width of 5", lambda: small()(X[..., :3])),
    "rank": (ShapeError, "tokens before features", lambda: small()(X[None])),
    "one vector": (ShapeError, "tokens before features", lambda: small()(X[0, 0])),
    "ids": (DTypeError, "embed token ids", lambda: small()(torch.arange(5)[None])),
    "array": (DTypeError, "torch.as_tensor", lambda: small()(X.numpy())),  # type: ignore[arg-type]
    "dtype": (DTypeError, r"convert with .to\(torch.float32\)", lambda: small()(X.double())),
    "device": (DTypeError, r"use .to\(cpu\)", lambda: small()(X.to("meta"))),
    "too long": (ShapeError, "context_length=4", lambda: small(context_length=4)(X)),
    "NaN": (DTypeError, "NaN", lambda: small(check_finite=True)(X / 0)),
    "a mask of one size": (ShapeError, "does not broadcast", lambda: small()(X, mask=torch.ones(4, 4).bool())),
    "a mask of rank 3": (ShapeError, r"attn_mask\[:, None\]", lambda: small()(X, mask=torch.ones(B, T, T).bool())),
    "a list as mask": (DTypeError, "a mask rule", lambda: small()(X, mask=[1, 0])),  # type: ignore[arg-type]
    "slopes": (ShapeError, "one slope per head", lambda: small(bias=scores.alibi(3))(X)),
    "padding": (ShapeError, r"\(2, 9\)", lambda: small()(X, padding=torch.ones(B, 4))),
    "padding of one": (ShapeError, "padding", lambda: small()(X, padding=torch.ones(1, T))),
    "no context": (ShapeError, "needs a context", lambda: small(d_context=3)(X)),
    "a context": (ShapeError, "without d_context", lambda: small()(X, CONTEXT)),
    "context width": (ShapeError, "context", lambda: small(d_context=4)(X, CONTEXT)),
    "context batch": (ShapeError, "batch size", lambda: small(d_context=3)(X, CONTEXT[:1])),
    "context padding": (ShapeError, "no context", lambda: small()(X, context_padding=torch.ones(B, T))),
    "context length": (
        ShapeError,
        r"\(2, 7\)",
        lambda: small(d_context=3)(X, CONTEXT, context_padding=torch.ones(B, T).bool()),
    ),
    "cache of what length": (ShapeError, "say for how many tokens", lambda: small().new_cache(2)),
    "cached context": (ShapeError, "another text", lambda: small(d_context=3).new_cache(2)),
    "no cache": (DTypeError, "new_cache", lambda: small()(X, cache={})),  # type: ignore[arg-type]
    "full cache": (ShapeError, "no room for 9 more", lambda: cached(small(), length=8)),
    "full context": (ShapeError, "together 13", lambda: half_full()(X[:, :4], cache=CACHE)),
    "another batch": (ShapeError, "B=3", lambda: cached(small(), batch=3)),
    "another dtype": (DTypeError, "float64", lambda: cached(small(), dtype=torch.float64)),
    "a graph in a cache": (DTypeError, "torch.no_grad", lambda: small()(X, cache=small().new_cache(B, 20))),
    "another window": (ShapeError, "not made by", lambda: cached(small(window=3), of=small(window=4))),
    "another layer": (ShapeError, "another layer", lambda: cached(small(), twice=True)),
    "a cache both ways": (ShapeError, "see later ones", lambda: small(is_causal=False).new_cache(2, 20)),
    "cache of length 0": (ShapeError, "length=0", lambda: small().new_cache(2, 0)),
    "cap 0": (ShapeError, "above 0", lambda: small(softcap=0.0)),
    "cap NaN": (DTypeError, "finite", lambda: small(softcap=float("nan"))),
    "scale of text": (DTypeError, "finite", lambda: small(scale="x")),
    "rotary of what": (DTypeError, "scores.Rotary", lambda: small(rotary=True)),
    "padding of lists": (ShapeError, "expected a tensor", lambda: small()(X, padding=[[1] * T] * B)),
    "padding rule": (ShapeError, "expected a tensor", lambda: small()(X, padding=masks.padding(torch.ones(T).bool()))),
    "numbers as mask": (DTypeError, "other numbers", lambda: small()(X, mask=torch.full((T, T), -10_000))),
    "numbers as padding": (DTypeError, "other numbers", lambda: small()(X, padding=torch.full((B, T), 2))),
    "sparse": (DTypeError, "sparse", lambda: small()(X.to_sparse())),
    "nested": (
        DTypeError,
        "nested",
        lambda: small()(torch.nested.nested_tensor([X[0], X[1, :4]], layout=torch.jagged)),
    ),
    "no module": (DTypeError, "nn.MultiheadAttention", lambda: Attention.from_torch(nn.Linear(2, 2))),  # type: ignore[arg-type]
    "key and value widths": (ShapeError, "kdim=3", lambda: Attention.from_torch(nn.MultiheadAttention(4, 2, kdim=3))),
    "added key": (
        ShapeError,
        "add_bias_kv",
        lambda: Attention.from_torch(nn.MultiheadAttention(4, 2, add_bias_kv=True)),
    ),
    "to torch": (ShapeError, "no num_kv_heads=2, no a window", lambda: make("grouped", window=2).to_torch()),
    "layouts": (ShapeError, "with rotary", lambda: convert_rotary(small(), interleaved=True)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_what_was_expected(name: str) -> None:
    error, message, call = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_a_call_that_raises_leaves_the_cache_as_it_was() -> None:
    layer, x = make(), tokens()
    cache = layer.new_cache(B, T)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        for wrong in ({"padding": torch.ones(B, 3).bool()}, {"mask": torch.ones(2, 2).bool()}):
            with pytest.raises(ShapeError):
                layer(x[:, 3:4], cache=cache, **wrong)
        torch.testing.assert_close(layer(x[:, 3:4], cache=cache), layer(x[:, :4])[:, 3:], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "rule", [~masks.first_tokens(1), masks.first_tokens(2), masks.documents(torch.arange(12) // 4)]
)
@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_a_rule_is_about_the_whole_text_where_a_cache_rolls(sink_tokens: int, rule: masks.MaskRule) -> None:
    layer, x = make(window=3, sink_tokens=sink_tokens, bias=scores.alibi(H)), tokens(B, 12, D_IN)
    dense = rule.bind(12, 12).tile(slice(0, 12), slice(0, 12), torch.arange(1), torch.arange(1))[0, 0]
    for pieces in ([1] * 12, [5, 1, 4, 2]):
        cache, past, parts = layer.new_cache(B), 0, []
        with torch.no_grad():
            for piece in x.split(pieces, 1):
                past += piece.shape[1]
                mask = masks.dense(dense[past - piece.shape[1] : past, :past])
                parts.append(layer(piece, cache=cache, mask=mask))
            torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask=rule), atol=1e-12, rtol=0)


def test_left_padding_stays_hidden_where_a_cache_rolls() -> None:
    layer, x = make("window and sinks"), tokens(B, 12, D_IN)
    real = torch.arange(12) >= torch.tensor([[4], [0]])
    cache = layer.new_cache(B)
    with torch.no_grad():
        steps = [layer(x[:, t : t + 1], padding=real[:, : t + 1], cache=cache) for t in range(12)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x, padding=real), atol=1e-12, rtol=0)


def test_a_cache_made_in_inference_mode_serves_outside_of_it_and_copies_are_free() -> None:
    layer, x = make(), tokens()
    with torch.inference_mode():
        cache = layer.new_cache(B, T)
        layer(x[:, :4], cache=cache)
    with torch.no_grad():
        other = copy.deepcopy(cache)
        for one in (cache, other):
            torch.testing.assert_close(layer(x[:, 4:], cache=one), layer(x)[:, 4:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_in_is_nothing_out(name: str) -> None:
    layer = make(name)
    for shape in ((B, 0, D_IN), (0, T, D_IN), (0, D_IN)):
        out, attn = layer.attend(torch.zeros(shape, dtype=torch.float64))
        assert out.shape == (*shape[:-1], D_OUT)
        assert attn.shape[-2:] == (shape[-2], shape[-2])


def test_a_learned_bias_belongs_to_the_layer() -> None:
    table = nn.Parameter(torch.randn(32, H, generator=torch.Generator().manual_seed(0)))
    layer = make(bias=scores.t5_bias(table) + scores.alibi(H))
    x = tokens()
    assert "score_bias.left_table" in layer.state_dict()
    layer(x).sum().backward()
    assert table.grad is not None
    assert table.grad.count_nonzero() > 0
    other = make(bias=scores.t5_bias(nn.Parameter(torch.zeros(32, H))) + scores.alibi(H))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_a_large_bias_does_not_become_infinite_in_half_precision() -> None:
    layer, x = make("both ways", dtype=torch.float32), tokens(dtype=torch.float32)
    mask = torch.full((T, T), -70_000.0) + 100 * torch.eye(T)
    out, attn = copy.deepcopy(layer).half().attend(x.half(), mask=mask)
    torch.testing.assert_close(out.float(), layer(x, mask=mask), atol=0.02, rtol=0)
    torch.testing.assert_close(attn.diagonal(), torch.ones(B, H, T))


def test_gradients_are_zero_and_not_missing_where_nothing_is_visible() -> None:
    layer = make(qkv_bias=True)
    layer(tokens(), padding=torch.zeros(B, T).bool()).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert layer.W_key.weight.grad.count_nonzero() == layer.W_value.weight.grad.count_nonzero() == 0


def test_an_inverted_mask_is_noticed() -> None:
    with pytest.warns(UserWarning, match="True means may attend") as caught:
        small()(X, mask=torch.ones(T, T).triu(1).bool())
    assert caught[0].filename == __file__


@pytest.mark.full
@torch.no_grad()
def test_a_compiled_layer_generates_in_one_graph_of_any_length() -> None:
    torch._dynamo.reset()
    layer, x = make(rotary=Rotary(4), num_kv_heads=2), tokens(B, 24, D_IN)
    compiled, cache = torch.compile(layer, backend="aot_eager", fullgraph=True), layer.new_cache(B, 24)
    steps = [compiled(x[:, t : t + 1], cache=cache) for t in range(24)]  # a graph a step would be refused after eight
    torch.testing.assert_close(torch.cat(steps, 1), layer(x), atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:.*performance drop")  # PyTorch's, about its own kernel
@pytest.mark.parametrize("name", ["causal", "rotary", "grouped"])
def test_a_batch_of_batches_gives_the_same(name: str) -> None:
    layer, x = make(name), tokens(3, B, T, D_IN)
    expected = torch.stack([layer(one) for one in x])
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected, atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:.*performance drop")  # PyTorch's, about its own kernel
@pytest.mark.parametrize("name", ["causal", "soft-capped", "all at once"])
def test_padding_goes_with_vmap_and_with_the_meta_device(name: str) -> None:
    layer, x = make(name), tokens(3, B, T, D_IN)
    real = torch.arange(T) >= torch.tensor([[[3], [0]], [[1], [2]], [[0], [0]]])
    if layer.softcap is None:
        got = torch.func.vmap(lambda x, real: layer(x, padding=real))(x, real)
        expected = torch.stack([layer(one, padding=flags) for one, flags in zip(x, real, strict=True)])
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    assert layer.to("meta")(x[0].to("meta"), padding=real[0].to("meta")).shape == (B, T, D_OUT)


def test_a_mask_of_many_texts_stays_small() -> None:
    layer, x = make(dtype=torch.float32), tokens(16, 1024, D_IN, dtype=torch.float32)
    real = torch.arange(1024) >= torch.arange(16)[:, None]
    with torch.no_grad(), Allocations() as allocations:
        layer(x, padding=real)
    assert allocations.largest <= 2**25
