"""Seam 3: programs that call PyTorch's attention function, with PyTorch's own meaning of every argument."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import clearhead
import clearhead.recording as recording
from clearhead import masks
from clearhead.errors import RecordingError, ShapeError


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def identity_output(q: Tensor, k: Tensor, **kwargs) -> Tensor:
    """PyTorch's own weights: attention with the identity matrix as values."""
    values = torch.eye(k.shape[-2]).expand(*k.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, values, **kwargs)


def recorded(attend: nn.Module, q: Tensor, k: Tensor, v: Tensor, **kwargs):
    plain = attend(q, k, v, **kwargs)
    with recording.record(attend) as rec:
        out = attend(q, k, v, **kwargs)
    assert torch.equal(out, plain)
    return rec[0]


def test_trap01_a_nanogpt_gives_every_layer(nano, ids):
    plain = nano(ids)
    with recording.record(nano) as rec:
        out = nano(ids)
    assert torch.equal(out, plain)
    assert rec.paths == ["h.0.attn", "h.1.attn", "h.2.attn"]
    x = nano.wte(ids)
    for block, attn in zip(nano.h, rec, strict=True):
        q, k, _ = (p.view(2, 11, 4, 8).transpose(1, 2) for p in block.attn.c_attn(block.ln_1(x)).split(32, dim=2))
        dense = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(11, 11).tril().bool(), -torch.inf).softmax(-1)
        assert (attn.to_dense() - dense).abs().max() <= 1e-6
        x = block(x)


def test_a_causal_call_holds_no_square_tensor(attend):
    q = randn(1, 2, 300, 8)
    attn = recorded(attend, q, q, q, is_causal=True)
    assert repr(attn.mask) == "causal()"
    with recording.record(attend) as rec:
        attend(q, q, q, is_causal=True)
    assert rec.nbytes == q.nbytes  # q, k and v are one tensor here


def test_trap06_is_causal_with_more_keys_is_upper_left_as_in_pytorch(attend):
    q, k = randn(2, 3, 4, 8), randn(2, 3, 7, 8)
    attn = recorded(attend, q, k, k, is_causal=True)
    assert repr(attn.mask) == "causal_upper_left()"
    assert (attn.to_dense() - identity_output(q, k, is_causal=True)).abs().max() <= 1e-6
    assert (attn.to_dense()[:, :, 0, 1:] == 0).all()


@pytest.mark.parametrize(
    ("make", "name"), [(causal_upper_left, "causal_upper_left()"), (causal_lower_right, "causal()")]
)
def test_trap06_a_causal_bias_object_is_read_as_the_rule_it_stands_for(attend, make, name):
    q, k = randn(2, 3, 4, 8), randn(2, 3, 7, 8)
    attn = recorded(attend, q, k, k, attn_mask=make(4, 7))
    assert repr(attn.mask) == name
    seen = torch.ones(4, 7).tril(0 if "upper" in name else 3).bool()
    assert (attn.to_dense() - identity_output(q, k, attn_mask=seen)).abs().max() <= 1e-6


def test_trap07_causal_together_with_a_mask_is_and(attend):
    q = randn(2, 3, 6, 8)
    mask = randn(2, 1, 6, 6, seed=3) > -0.5
    try:
        attn = recorded(attend, q, q, q, attn_mask=mask, is_causal=True)
    except RuntimeError as error:
        pytest.skip(f"this PyTorch refuses a mask with is_causal: {error}")
    dense = attn.to_dense()
    seen = mask & torch.ones(6, 6).tril().bool()
    assert (dense.masked_select(~seen.expand_as(dense)) == 0).all()


@pytest.mark.parametrize("shape", [(6, 9), (1, 9), (6, 1), (3, 6, 9), (1, 1, 6, 9), (2, 1, 6, 9), (2, 3, 6, 9)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_trap13_mask_shapes_mean_what_pytorch_broadcasts_them_to(attend, shape, kind):
    q, k = randn(2, 3, 6, 8), randn(2, 3, 9, 8)
    mask = randn(*shape, seed=5)
    if kind == "bool":
        mask = mask > -1
    attn = recorded(attend, q, k, k, attn_mask=mask)
    expected = identity_output(q, k, attn_mask=mask).nan_to_num(0.0)
    assert (attn.to_dense() - expected).abs().max() <= 1e-6


def test_trap13_a_mask_of_3d_queries_is_per_batch(attend):
    q, mask = randn(3, 6, 8), randn(3, 6, 6, seed=7) > -1
    attn = recorded(attend, q, q, q, attn_mask=mask)
    assert attn.shape == (3, 1, 6, 6)
    assert (attn.to_dense()[:, 0] - identity_output(q, q, attn_mask=mask).nan_to_num(0.0)).abs().max() <= 1e-6


def test_trap12_minus_infinity_and_the_lowest_number_both_hide(attend):
    q, mask = randn(1, 2, 5, 8), torch.zeros(5, 5)
    mask[:, 3], mask[:, 4] = -torch.inf, torch.finfo(torch.float32).min
    dense = recorded(attend, q, q, q, attn_mask=mask).to_dense()
    assert (dense[..., 3:] == 0).all()
    assert (dense.sum(-1) - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 4, 3, 5, 8)])
def test_trap24_every_rank_is_taken(attend, shape):
    q = randn(*shape)
    attn = recorded(attend, q, q + 1, q, is_causal=True)
    assert len(attn.shape) == 4
    expected = identity_output(q, q + 1, is_causal=True)
    assert (attn.to_dense().reshape(expected.shape) - expected).abs().max() <= 1e-6


def test_trap24_batches_and_heads_broadcast_as_in_pytorch(attend):
    for q, k in [
        (randn(1, 4, 5, 8), randn(3, 4, 5, 8)),
        (randn(3, 4, 5, 8), randn(1, 1, 5, 8)),
        (randn(3, 1, 5, 8), randn(3, 4, 6, 8)),
        (randn(1, 2, 4, 5, 8), randn(3, 1, 4, 5, 8)),
        (randn(2, 4, 5, 8), randn(4, 6, 8)),
        (randn(3, 5, 8), randn(6, 8)),
        (randn(5, 8), randn(2, 3, 6, 8)),
    ]:
        expected = identity_output(q, k)
        dense = recorded(attend, q, k, k).to_dense()
        assert (dense.reshape(expected.shape) - expected).abs().max() <= 1e-6


def test_trap15_grouped_heads_are_interleaved_and_never_expanded(attend):
    q, k, v = randn(2, 6, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 4)
    attn = recorded(attend, q, k, v, enable_gqa=True)
    assert attn.shape == (2, 6, 5, 7)
    assert attn.k.shape == (2, 2, 7, 8)
    assert attn.k.data_ptr() == k.data_ptr()
    expected = identity_output(q, k.repeat_interleave(3, 1))
    assert (attn.to_dense() - expected).abs().max() <= 1e-6


def test_trap15_grouped_heads_without_a_batch_are_heads(attend):
    q, k = randn(6, 5, 8), randn(2, 7, 8)
    for mask in (None, randn(5, 7), randn(6, 5, 7) > 0):
        attn = recorded(attend, q, k, k, enable_gqa=True, attn_mask=mask)
        assert attn.shape == (1, 6, 5, 7)
        expected = identity_output(q, k.repeat_interleave(3, 0), attn_mask=mask)
        assert (attn.to_dense()[0] - expected).abs().max() <= 1e-6


def test_trap11_the_scale_that_was_passed_is_used(attend):
    q = randn(1, 2, 5, 8)
    assert recorded(attend, q, q, q).scale == 8**-0.5
    attn = recorded(attend, q, q, q, scale=1.0)
    assert (attn.to_dense() - (q @ q.mT).softmax(-1)).abs().max() <= 1e-6


def test_trap08_weights_are_those_before_dropout_and_the_random_numbers_stay(make_nano, ids):
    torch.manual_seed(0)
    model = make_nano(dropout=0.5)
    torch.manual_seed(1)
    plain, state = model(ids), torch.get_rng_state()
    torch.manual_seed(1)
    with recording.record(model) as rec:
        out = model(ids)
    assert torch.equal(out, plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert (rec[0].to_dense().sum(-1) - 1).abs().max() <= 1e-6


def test_trap23_nan_in_hidden_keys_stays_out(attend):
    q, k = randn(1, 2, 4, 8), randn(1, 2, 4, 8, seed=9).clone()
    k[:, :, 3] = torch.nan
    mask = torch.tensor([True, True, True, False])
    with recording.record(attend) as rec:
        attend(q, k, q, attn_mask=mask.expand(4, 4))
    assert rec[0].to_dense().isfinite().all()


def test_trap22_no_queries_no_keys_no_batch(attend):
    for q, k in [((2, 3, 0, 8), (2, 3, 4, 8)), ((0, 3, 4, 8), (0, 3, 4, 8)), ((2, 3, 1, 8), (2, 3, 1, 8))]:
        attn = recorded(attend, randn(*q), randn(*k), randn(*k))
        assert attn.to_dense().shape == (*q[:3], k[2])


def test_trap22_queries_without_features_run_and_their_map_says_what_is_missing(attend):
    with recording.record(attend) as rec:
        attend(randn(2, 3, 4, 0), randn(2, 3, 4, 0), randn(2, 3, 4, 8))
    with pytest.raises(ShapeError, match="no features"):
        rec[0]


def test_trap19_half_precision_is_read_in_float32(attend):
    q = randn(1, 2, 5, 8).bfloat16()
    attn = recorded(attend, q, q, q)
    assert attn.to_dense().dtype == torch.float32
    assert (attn.to_dense() - (q.float() @ q.float().mT / 8**0.5).softmax(-1)).abs().max() <= 1e-6


def test_autocast_leaves_q_k_and_v_in_different_types(attend):
    q, k = randn(1, 2, 5, 8), randn(1, 2, 5, 8, seed=2).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), recording.record(attend) as rec:
        attend(q, k, k)
    assert rec[0].q.dtype == rec[0].k.dtype == torch.float32


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_is_refused_by_name(attend, layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([randn(2, 3, 8), randn(2, 5, 8)], layout=layout)
        nested = nested.transpose(1, 2) if layout is torch.jagged else nested
        with (
            pytest.raises(RecordingError, match="nested tensors cannot be recorded yet: q=a nested float32 tensor of"),
            recording.record(attend),
        ):
            attend(nested, nested, nested)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev, lambda f: torch.func.grad(f)])
def test_attention_inside_a_transform_is_an_error_that_says_so(attend, transform):
    q = randn(3, 5, 8)
    inside = transform(lambda x: attend(x, q, q) if transform is torch.func.vmap else attend(x, q, q).sum())
    with pytest.raises(RecordingError, match="inside vmap, grad or another transform"), recording.record(attend):
        inside(q)


def test_fake_tensors_are_an_error_and_not_a_map_that_cannot_be_read(attend):
    with FakeTensorMode():
        q = torch.empty(2, 3, 5, 8)
        with pytest.raises(RecordingError, match="fake tensors cannot be recorded"), recording.record(attend):
            attend(q, q, q)


def test_somebody_elses_function_mode_keeps_working(nano, ids):
    class Count(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Count.seen += func is F.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    with Count(), recording.record(nano) as outside:
        nano(ids)
    with recording.record(nano) as inside, Count():
        nano(ids)
    assert len(outside) == len(inside) == 3
    assert Count.seen == 6


class Flash(nn.Module):
    """A module that calls clearhead's own kernel over tiles."""

    def forward(self, x: Tensor) -> Tensor:
        return clearhead.functional.flash_attention(x, x, x, mask=masks.causal(), softcap=2.0, tile=(3, 2))[0]


def test_attention_over_tiles_is_one_call_with_its_rules() -> None:
    x = torch.randn(1, 2, 7, 4)
    model = Flash()
    with recording.record(model) as seen:
        out = model(x)
    assert torch.equal(out, model(x))
    expected = clearhead.SoftmaxMap(x, x, mask=masks.causal(), softcap=2.0).to_dense()
    assert torch.equal(seen[0].to_dense(), expected)
