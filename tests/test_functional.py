"""scaled_dot_product_attention: PyTorch's output bit for bit, the weights beside it, and no silent guess."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import DTypeError, ShapeError, SoftmaxMap, masks, reference, scaled_dot_product_attention
from clearhead.kernels import fused
from clearhead.testing import assert_close, build_case
from clearhead.testing.cases import MASKS

DATA = Path(__file__).parent / "data"
CHAPTER = json.loads((DATA / "ch03.json").read_text())["entries"]
SEEDS = json.loads((DATA / "seeds.json").read_text())


def chapter(name: str) -> Tensor:
    return torch.tensor(CHAPTER[name]["values"])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# --- the output is PyTorch's -------------------------------------------------------------------------------

B, H, T, D = 2, 4, 9, 8
TENSOR_MASKS = {
    "none": None,
    "(T, S)": torch.rand(T, T, generator=torch.Generator().manual_seed(1)) > 0.4,
    "(B, 1, T, S)": torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(2)) > 0.4,
    "(B, H, T, S)": torch.rand(B, H, T, T, generator=torch.Generator().manual_seed(3)) > 0.4,
    "float": torch.randn(T, T, generator=torch.Generator().manual_seed(4)),
    "finfo.min": torch.triu(torch.full((T, T), torch.finfo(torch.float32).min), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", TENSOR_MASKS)
@pytest.mark.parametrize("groups", [4, 2])
def test_output_is_bit_identical_to_pytorch(mask: str, groups: int, dtype: torch.dtype) -> None:
    q, k, v = (random(B, h, T, d, dtype=dtype) for h, d in ((H, D), (groups, D), (groups, D)))
    tensor = TENSOR_MASKS[mask]
    if tensor is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    arguments = {"attn_mask": tensor, "enable_gqa": groups != H}
    for scale in (None, 0.7):
        out, attn = scaled_dot_product_attention(q, k, v, scale=scale, **arguments)  # type: ignore[arg-type]
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, scale=scale, **arguments))  # type: ignore[arg-type]
        assert isinstance(attn, SoftmaxMap)
        wide = v.double().repeat_interleave(H // groups, 1)
        assert_close((attn @ v).to(dtype), _exact(q, k, tensor, scale) @ wide, out, terms=T + D)


def _exact(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    if mask is None or mask.dtype == torch.bool:
        return reference.weights(q.double(), k.double(), mask=mask, scale=scale)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return reference.weights(
        q.double(), k.double(), mask=~hidden, bias=mask.double().masked_fill(hidden, 0), scale=scale
    )


@pytest.mark.parametrize("shape", [(T, D), (B, T, D), (B, H, T, D), (B, H, 1, D), (B, H, 0, D), (0, H, T, D)])
@pytest.mark.parametrize("causal", [False, True])
def test_requirement_13_every_rank(shape: tuple[int, ...], causal: bool) -> None:
    q = random(*shape)
    out, attn = scaled_dot_product_attention(q, q, q, is_causal=causal)
    want = F.scaled_dot_product_attention(q, q, q, is_causal=causal) if q.numel() else torch.empty_like(q)
    assert torch.equal(out, want)
    assert attn.shape == (*shape[:-1], shape[-2])
    exact = reference.weights(q.double(), q.double(), mask=reference.causal(shape[-2], shape[-2]) if causal else None)
    torch.testing.assert_close(attn.to_dense(), exact.float())


def test_trap_02_same_random_state_and_gradients() -> None:
    q, k, v = (random(B, H, T, D).requires_grad_() for _ in range(3))
    state = torch.get_rng_state()
    out, _ = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(state, torch.get_rng_state())
    ours = torch.autograd.grad(out.square().sum(), (q, k, v))
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_trap_08_reported_weights_are_those_before_dropout() -> None:
    q = random(1, 2, 5, 4)
    torch.manual_seed(0)
    out, attn = scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(out, F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    torch.testing.assert_close(attn.to_dense().sum(-1), torch.ones(1, 2, 5))


def test_trap_23_the_output_is_pytorchs_own_even_where_nan_leaks() -> None:
    q, k, v = random(1, 1, 4, 4), random(1, 1, 4, 4), random(1, 1, 4, 4)
    mask = torch.tensor([True, True, False, True]).expand(4, 4)
    v[0, 0, 2] = math.nan
    out, attn = scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(out.isnan(), F.scaled_dot_product_attention(q, k, v, mask).isnan())
    assert attn.to_dense().isfinite().all()
    assert (attn @ v).isfinite().all()


# --- rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("size", ["33x33", "33x127", "127x33", "129x129", "0x5", "5x0"])
@pytest.mark.parametrize("name", [n for n in MASKS if not n.startswith("dense") and n != "none"])
def test_a_rule_gives_what_the_dense_mask_gives(
    name: str, size: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "ROWS", 50)  # several blocks of queries, the last one short
    case = build_case(
        {
            "mask": name,
            "size": size,
            "dtype": dtype,
            "heads": "4/2",
            "layout": "tokens first",
            "bias": "none",
            "tile": "default",
        }
    )
    v = random(*case.k.shape[:-1], 5, dtype=case.q.dtype)
    out, attn = scaled_dot_product_attention(case.q, case.k, v, case.mask, enable_gqa=True)
    exact = case.exact() @ v.double().repeat_interleave(2, 1)
    plain = F.scaled_dot_product_attention(case.q, case.k, v, case.seen, enable_gqa=True)
    # A head narrower than its values takes PyTorch's math path; the same formula, so the same budget.
    assert_close(out, exact, plain, terms=case.terms + case.k.shape[2])
    assert (out[(case.exact().sum(-1) == 0)] == 0).all()
    assert attn.mask is case.mask


def test_gradients_through_a_rule_are_finite_and_right() -> None:
    q, k, v = (random(2, 2, 7, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    rule = masks.causal() & masks.padding(keys=torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]))

    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, rule)[0]

    assert torch.autograd.gradcheck(of, (q, k, v))
    grads = torch.autograd.grad(of(q, k, v).sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_trap_07_causal_together_with_a_mask_is_and() -> None:
    q, k, v = random(1, 2, 6, 4), random(1, 2, 6, 4), random(1, 2, 6, 4)
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) > 0.3
    bias = random(6, 6)
    causal = reference.causal(6, 6)
    for given, seen, added in (
        (mask, mask & causal, None),
        (bias, causal, bias),
        (masks.sliding_window(2), reference.sliding_window(6, 6, 2), None),
    ):
        out, attn = scaled_dot_product_attention(q, k, v, given, is_causal=True)
        want = reference.weights(q, k, mask=seen, bias=added)
        torch.testing.assert_close(attn.to_dense(), want)
        torch.testing.assert_close(out, want @ v)


# --- errors, never guesses ---------------------------------------------------------------------------------


def test_trap_06_causal_with_unequal_lengths_names_both_rules() -> None:
    q, k = random(1, 1, 2, 4), random(1, 1, 5, 4)
    with pytest.raises(
        ShapeError, match=r"2 queries and 5 keys.*masks.causal\(\) .lower-right.*masks.causal_upper_left"
    ):
        scaled_dot_product_attention(q, k, k, is_causal=True)
    out, attn = scaled_dot_product_attention(q, k, k, masks.causal_upper_left())
    assert torch.equal(attn.to_dense()[0, 0] > 0, torch.tensor(SEEDS["torch_is_causal_2q_5k_weights"]) > 0)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, k, is_causal=True))


def test_trap_06_one_query_against_five_cached_keys() -> None:
    q, k = random(1, 1, 1, 4), random(1, 1, 5, 4)
    out, attn = scaled_dot_product_attention(q, k, k, masks.causal())
    assert attn.shape == (1, 1, 1, 5)
    assert (attn.to_dense() > 0).all()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, k))


@pytest.mark.parametrize("mask", [torch.ones(2, 3, 3).bool(), torch.zeros(2, 3, 3)])
def test_trap_13_three_dimensions_beside_4d_queries_are_not_guessed(mask: Tensor) -> None:
    q = random(2, 2, 3, 4)  # B == H: PyTorch would read it per head
    with pytest.raises(ShapeError, match=r"attn_mask\[:, None\] \(B, 1, T, S\) or attn_mask\[None\] \(1, H, T, S\)"):
        scaled_dot_product_attention(q, q, q, mask)


def test_trap_13_shapes_mean_what_they_say() -> None:
    q = random(2, 3, 4, 4)
    per_batch = torch.ones(2, 1, 4, 4).bool()
    per_batch[1, :, :, 0] = False
    weights = scaled_dot_product_attention(q, q, q, per_batch)[1].to_dense()
    assert (weights[0, ..., 0] > 0).all()
    assert (weights[1, ..., 0] == 0).all()
    one = random(2, 4, 4)  # (B, T, d): one head, so (B, T, S) is a mask per batch entry
    weights = scaled_dot_product_attention(one, one, one, per_batch[:, 0])[1].to_dense()
    assert (weights[0, ..., 0] > 0).all()
    assert (weights[1, ..., 0] == 0).all()


def test_trap_13_a_padding_mask_is_taken_by_name_only() -> None:
    q = random(2, 2, 4, 4)
    with pytest.raises(ShapeError):
        scaled_dot_product_attention(q, q, q, torch.ones(2, 4).bool())
    real = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    _, attn = scaled_dot_product_attention(q, q, q, masks.padding(keys=real))
    assert (attn.to_dense()[0, ..., 2:] == 0).all()


def test_trap_03_an_inverted_mask_is_noticed() -> None:
    q = random(1, 2, 5, 4)
    blocked = torch.triu(torch.ones(5, 5), 1).bool()  # nn.MultiheadAttention's causal mask: True = blocked
    with pytest.warns(UserWarning, match=r"True means may attend.*nn.MultiheadAttention.*pass ~mask") as caught:
        scaled_dot_product_attention(q, q, q, blocked)
    assert caught[0].filename == __file__
    scaled_dot_product_attention(q, q, q, ~blocked)  # no warning, and warnings are errors here
    scaled_dot_product_attention(q[:, :, :3], q, q, blocked[:3])  # nor where it is no self-attention
    scaled_dot_product_attention(q[:, :, :1], q[:, :, :1], q[:, :, :1], blocked[:1, :1])


def test_trap_15_grouped_heads_are_asked_for() -> None:
    q, k = random(1, 4, 3, 4), random(1, 2, 3, 4)
    with pytest.raises(ShapeError, match=r"4 query heads and 2 key heads: pass enable_gqa=True"):
        scaled_dot_product_attention(q, k, k)
    out, attn = scaled_dot_product_attention(q, k, k, enable_gqa=True)
    interleaved = k.repeat_interleave(2, 1)
    torch.testing.assert_close(out, reference.attention(q, interleaved, interleaved))
    assert attn.k.shape == (1, 2, 3, 4)  # never expanded


def test_trap_24_what_is_no_mask() -> None:
    q = random(1, 1, 3, 4)
    with pytest.raises(DTypeError, match="expected a mask rule, a bool or a float tensor, or None"):
        scaled_dot_product_attention(q, q, q, "causal")  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"q=ndarray of shape \(1, 1, 3, 4\)"):
        scaled_dot_product_attention(q.numpy(), q, q)  # type: ignore[arg-type]


# --- what the mission demands (REQUIREMENTS) ---------------------------------------------------------------


def test_requirement_05_and_12_softmax_of_scores_times_values() -> None:
    """Against a triple loop."""
    q, k, v = random(5, 3), random(7, 3), random(7, 2)
    out, attn = scaled_dot_product_attention(q, k, v)
    for t in range(5):
        scores = [sum(float(q[t, d]) * float(k[s, d]) for d in range(3)) / math.sqrt(3) for s in range(7)]
        total = sum(math.exp(x) for x in scores)
        weights = [math.exp(x) / total for x in scores]
        assert attn[t].tolist() == pytest.approx(weights, abs=5e-7)
        for d in range(2):
            want = sum(w * float(v[s, d]) for s, w in enumerate(weights))
            assert float(out[t, d]) == pytest.approx(want, abs=5e-7)


def test_requirement_06_a_weighted_average_stays_between_its_values() -> None:
    q, k, v = random(2, 3, 9, 4), random(2, 3, 9, 4), random(2, 3, 9, 5)
    out, _ = scaled_dot_product_attention(q, k, v)
    assert (out <= v.amax(-2, keepdim=True) + 1e-6).all()
    assert (out >= v.amin(-2, keepdim=True) - 1e-6).all()
    torch.testing.assert_close(scaled_dot_product_attention(q, k, torch.full_like(k, 3.0))[0], torch.full_like(q, 3.0))


def test_requirement_07_rows_are_distributions() -> None:
    weights = scaled_dot_product_attention(random(2, 9, 4), random(2, 9, 4), random(2, 9, 4))[1].to_dense()
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 9), atol=1e-6, rtol=0)


def test_requirement_08_editing_the_future_changes_nothing_earlier() -> None:
    q, k, v = random(9, 4), random(9, 4), random(9, 4)
    out, attn = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (attn.to_dense().triu(1) == 0).all()
    k[6:], v[6:] = 100.0, -100.0
    assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True)[0][:6], out[:6])


def test_requirement_09_renormalising_after_softmax_is_the_same_until_it_underflows() -> None:
    q, k = random(6, 4), random(6, 4)
    attn = scaled_dot_product_attention(q, k, k, is_causal=True)[1].to_dense()
    zeroed = torch.softmax(q @ k.T / 2, -1).tril()
    torch.testing.assert_close(zeroed / zeroed.sum(-1, keepdim=True), attn)
    k[1:] = 1000.0  # the future's scores are so high that the past underflows to 0 before it is renormalised
    q = torch.ones(6, 4)
    zeroed = torch.softmax(q @ k.T / 2, -1).tril()
    assert (zeroed / zeroed.sum(-1, keepdim=True))[0].isnan().all()
    first_row = scaled_dot_product_attention(q, k, k, is_causal=True)[1][0]
    assert first_row.tolist() == SEEDS["renorm_vs_inf"]["underflow_row_inf"]


def test_requirement_10_journey_keeps_only_your_and_journey() -> None:
    x = chapter("x")
    q, k, v = (x @ chapter(f"SelfAttention_v2.{name}") for name in ("W_query", "W_key", "W_value"))
    out, attn = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, chapter("SelfAttention_v2.out"))
    torch.testing.assert_close(attn.to_dense(), chapter("SelfAttention_v2.weights"))
    _, attn = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attn.to_dense(), chapter("causal.softmax_of_masked"))
    assert attn[1].tolist() == pytest.approx([0.5517, 0.4483, 0, 0, 0, 0], abs=5e-5)


def test_the_chapter_without_weights_and_with() -> None:
    x = chapter("x")
    _, attn = scaled_dot_product_attention(x, x, x, scale=1.0)
    torch.testing.assert_close(attn.to_dense(), chapter("simple.alpha_all"))
    torch.testing.assert_close(attn @ x, chapter("simple.z_all"))
    q, k, v = (x @ chapter(f"trainable.{name}") for name in ("W_query", "W_key", "W_value"))
    out, attn = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attn.to_dense(), chapter("SelfAttention_v1.weights"))
    torch.testing.assert_close(out, chapter("SelfAttention_v1.out"))


def test_requirement_11_zeros_and_ones_are_bools_and_an_empty_row_is_0() -> None:
    q = random(1, 2, 4, 4)
    mask = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0]])
    (out, attn), (same, same_attn) = (scaled_dot_product_attention(q, q, q, m) for m in (mask, mask.bool()))
    assert torch.equal(out, same)
    assert torch.equal(attn.to_dense(), same_attn.to_dense())
    assert (out[:, :, 0] == 0).all()
    assert (attn.to_dense()[:, :, 0] == 0).all()


@pytest.mark.parametrize(("width", "unscaled", "scaled"), [(64, 0.177, 0.305), (1024, 0.048, 0.305)])
def test_requirement_15_the_scale_keeps_the_softmax_steep(width: int, unscaled: float, scaled: float) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(4000, 1, width, generator=g), torch.randn(4000, 16, width, generator=g)

    def jacobian_norm(scale: float | None) -> float:
        p = scaled_dot_product_attention(q, k, k, scale=scale)[1].to_dense()[:, 0]
        return float((torch.diag_embed(p) - p[:, :, None] * p[:, None]).norm(dim=(1, 2)).mean())

    assert jacobian_norm(1.0) == pytest.approx(unscaled, abs=0.01)
    assert jacobian_norm(None) == pytest.approx(scaled, abs=0.01)


def test_requirement_14_the_root_of_the_width_stops_score_growth() -> None:
    g = torch.Generator().manual_seed(0)
    for width in (4, 64, 512):
        products = (torch.randn(20_000, width, generator=g) * torch.randn(20_000, width, generator=g)).sum(-1)
        assert float(products.var()) / width == pytest.approx(1, rel=0.03)


def test_requirement_28_cross_attention() -> None:
    q, k, v = random(2, 5, 4), random(2, 7, 4), random(2, 7, 3)
    out, attn = scaled_dot_product_attention(q, k, v)
    assert out.shape == (2, 5, 3)
    assert attn.shape == (2, 5, 7)
    moved, _ = scaled_dot_product_attention(q, k + 1, v * 2)
    assert not torch.equal(out, moved)


def test_requirement_29_self_attention_is_the_case_of_one_source() -> None:
    x = random(2, 5, 4)
    (out, attn), (cross, cross_attn) = (scaled_dot_product_attention(x, y, y) for y in (x, x.clone()))
    assert torch.equal(out, cross)
    assert torch.equal(attn.to_dense(), cross_attn.to_dense())


def test_trap_23_check_finite_names_what_is_not() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    scaled_dot_product_attention(q, k, v, check_finite=True)
    v[0, 1, 3, 2] = torch.nan
    with pytest.raises(DTypeError, match=r"v \(a float32 tensor .*\) holds 1 numbers .* the first at \[0, 1, 3, 2\]"):
        scaled_dot_product_attention(q, k, v, check_finite=True)
