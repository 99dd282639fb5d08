"""Rollout equals the dense product and its rows sum to 1; value-weighted maps are norms of vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import DenseMap, RecordingError, ShapeError, SoftmaxMap, average_heads, masks, record
from clearhead.maps import across, rollout, value_weighted
from clearhead.testing import Allocations


def layers(n: int, T: int, *, heads: int = 4, dtype: torch.dtype = torch.float64) -> list[SoftmaxMap]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(n, 2, 2, heads, T, 8, generator=generator, dtype=dtype)
    return [SoftmaxMap(q, k[:, ::2], mask=masks.causal(), scale=1.0) for q, k in draw]


def dense_product(weights: list[Tensor]) -> Tensor:
    """Abnar & Zuidema 2020: A' = ½ mean_h A + ½ I, and the product of them, last layer first."""
    product = torch.eye(weights[0].shape[-1], dtype=torch.float64).expand(weights[0].shape[0], -1, -1)
    for each in weights:
        product = (each.double().mean(1) / 2 + torch.eye(each.shape[-1], dtype=torch.float64) / 2) @ product
    return product


def test_trap26_rollout_is_the_dense_product_and_every_row_sums_to_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "_AT_ONCE", 100)
    maps = layers(3, 256)
    lazy, expected = rollout(maps), dense_product([attn.to_dense() for attn in maps])
    dense = lazy.to_dense()
    for got, want in (
        (dense, expected),
        (dense.sum(-1), torch.ones(2, 256, dtype=torch.float64)),
        (lazy[0, -1], expected[0, -1]),
        (lazy[..., 7], expected[..., 7]),
        (lazy.diagonal(-1), expected.diagonal(-1, 1, 2)),
        (lazy.pick(torch.arange(256)[:, None], torch.tensor([7, 3])), expected[..., [7, 3]]),
        (lazy.received(), expected.sum(-2)),
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    single = rollout(layers(3, 256, dtype=torch.float32))
    assert (single[:, 200:].to_dense().sum(-1) - 1).abs().max() <= 3 * 16 * torch.finfo(torch.float32).eps


def test_a_trace_is_a_row_of_the_product_of_the_layers_above_each_depth() -> None:
    maps = layers(3, 20)
    trace = rollout(maps).trace(-2)
    assert trace.shape == (2, 4, 20)
    for depth in range(3):
        expected = dense_product([attn.to_dense() for attn in maps[depth:]])[:, -2]
        torch.testing.assert_close(trace[:, depth], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(trace[:, 3], torch.eye(20, dtype=torch.float64)[18].expand(2, 20))
    with pytest.raises(IndexError, match="20"):
        rollout(maps).trace(20)


def test_rollout_of_uniform_heads_is_the_closed_form() -> None:
    """Off the diagonal (1 - 2^-L) / n, on it 2^-L more."""
    x = torch.zeros(1, 2, 4, 8, dtype=torch.float64)
    off = (1 - 2**-3) / 4
    expected = torch.full((4, 4), off, dtype=torch.float64) + 2**-3 * torch.eye(4, dtype=torch.float64)
    assert off == 0.21875
    torch.testing.assert_close(rollout([SoftmaxMap(x, x)] * 3).to_dense()[0], expected, rtol=0, atol=1e-15)


def test_rows_sum_to_1_where_queries_see_nothing_and_where_sinks_take_weight() -> None:
    q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    padding = masks.padding(keys=torch.tensor([[False, False, True, True, True, True]]))
    maps = [
        SoftmaxMap(q, q, mask=masks.causal() & padding),
        SoftmaxMap(q, q, mask=masks.causal(), sinks=torch.tensor([3.0, 5.0])),
    ]
    for order in (maps, maps[::-1]):
        torch.testing.assert_close(rollout(order).to_dense().sum(-1), torch.ones(1, 6))
    assert torch.equal(rollout(maps[:1])[0, :2].to_dense(), torch.eye(2, 6))


def test_rollout_takes_averages_and_single_sequences_and_knows_what_causal_layers_never_lead_to() -> None:
    maps = layers(3, 40)
    whole = rollout(maps)
    assert torch.equal(rollout(map(average_heads, maps)).to_dense(), whole.to_dense())
    torch.testing.assert_close(rollout([a[1] for a in maps]).to_dense(), whole.to_dense()[1], rtol=0, atol=1e-14)
    assert whole.block(slice(0, 10), slice(10, 40)).name == "EMPTY"
    assert whole.block(slice(0, 11), slice(10, 40)).name == "MIXED"
    two_sided = [*maps, DenseMap(torch.full((2, 4, 40, 40), 1 / 40))]
    assert rollout(two_sided).block(slice(0, 10), slice(10, 40)).name == "MIXED"
    even = dense_product([attn.uniform().to_dense() for attn in maps])
    torch.testing.assert_close(whole.uniform().to_dense(), even, rtol=0, atol=1e-12)


def test_rollout_after_a_tensor_was_overwritten_raises() -> None:
    q = torch.randn(1, 2, 6, 8)
    lazy = rollout([SoftmaxMap(q, torch.randn(1, 2, 6, 8))])
    lazy.tile(slice(0, 2), slice(0, 6))
    q.zero_()
    with pytest.raises(RecordingError, match="q was overwritten"):
        lazy.tile(slice(0, 2), slice(0, 6))


def test_rollout_of_what_has_no_rollout_says_why() -> None:
    with pytest.raises(ShapeError, match=r"rollout\(\[\]\): there is no map"):
        rollout([])
    square, cross = torch.rand(1, 2, 4, 4), torch.rand(1, 2, 4, 5)
    for maps in ([DenseMap(cross)], [DenseMap(square), DenseMap(cross)]):
        with pytest.raises(ShapeError, match=r"\(1, 2, 4, 5\): expected maps \(B, H, T, T\) of one text with itself"):
            rollout(maps)


def test_rollout_of_a_recorded_model_is_that_of_its_eager_weights(minilm: Any) -> None:
    model, tokenizer = minilm
    given = tokenizer("The dog chased the cat across the yard.", return_tensors="pt")
    with torch.no_grad(), record(model) as recording:
        model(**given)
    expected = dense_product([attn.to_dense() for attn in recording])
    torch.testing.assert_close(rollout(recording).to_dense().double(), expected, rtol=0, atol=1e-6)


@pytest.mark.full
def test_one_row_at_4096_tokens_takes_memory_that_grows_with_the_tokens() -> None:
    """Three layers of 2 · 4 heads, 1.6 GB dense: some tiles and vectors, whose number does not depend on T."""
    maps = layers(3, 4096, dtype=torch.float32)
    with Allocations() as allocations:
        row = rollout(maps)[0, -1]
    assert allocations.peak < 50_000_000
    assert abs(float(row.sum()) - 1) < 1e-5


# --- value-weighted ---------------------------------------------------------------------------------------------------


def test_value_weighted_weights_are_norms_of_what_is_added_up() -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, 7, 8, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    projection = torch.randn(32, 32, generator=g, dtype=torch.float64)
    attn = SoftmaxMap(q, k, v=v, mask=masks.causal())
    weighted = value_weighted(attn, projection)
    for h in range(4):
        brought = attn[:, h].to_dense()[..., None] * (v[:, h // 2] @ projection[:, 8 * h : 8 * h + 8].mT)[:, None]
        torch.testing.assert_close(weighted[:, h].to_dense(), brought.norm(dim=-1), rtol=1e-12, atol=1e-14)
    bare = SoftmaxMap(q, k, mask=masks.causal())
    assert torch.equal(value_weighted(bare, projection, v=v).to_dense(), weighted.to_dense())
    with pytest.raises(ShapeError, match="which holds no values; pass v="):
        value_weighted(bare, projection)
    with pytest.raises(ShapeError, match=r"W_O \(32, 30\) do not fit it; expected v .* W_O \(E, H · Dv = 32\)"):
        value_weighted(attn, projection[:, :30])


def test_the_sink_of_smollm2_brings_less_than_its_weight_in_every_head_of_a_layer(smollm2: Any) -> None:
    model, tokenizer = smollm2
    given = tokenizer("The dog chased the cat across the yard, and the cat climbed a tree.", return_tensors="pt")
    with torch.no_grad(), record(model, layers=[15]) as recording:
        model(**given)
    attn, projection = recording[0], model.model.layers[15].self_attn.o_proj.weight
    weighted = value_weighted(attn, projection)
    share = weighted[0, ..., 0].sum(-1) / weighted[0].to_dense().sum((1, 2))
    assert (share < attn[0, ..., 0].mean(-1)).all()
