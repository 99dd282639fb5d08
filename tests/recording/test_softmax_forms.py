"""Seam 4: less usual ways to write attention by hand, and what is none though it is written alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import DenseMap, SoftmaxMap
from clearhead.errors import RecordingError
from clearhead.recording import record

from .test_softmax import LATER, SQRT, B, D, H, K, Q, Run, T, V, dense, recorded

A = dense(Q @ K.mT / SQRT)

# --- the keys are not the last dimension, or the weights are the right operand -------------------------------


def channels_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As SAGAN and the autoencoder of Stable Diffusion write it: v (B, D, S) @ weights (B, S, T)."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) / SQRT, dim=2)
    return torch.bmm(v.mT, weights.permute(0, 2, 1)).mT.view(B, H, T, D)


def by_property(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ (q @ k.mT / SQRT).softmax(-1).mT).mT


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT / SQRT).softmax(-2).transpose(-2, -1) @ v


def keys_first_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bhsd,bhtd->bhst", k, q) / SQRT).softmax(dim=2)
    return torch.einsum("bhst,bhsd->bhtd", weights, v)


def keys_first_right_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhsd,bhst->bhtd", v, (k @ q.mT / SQRT).softmax(dim=-2))


def turned_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / SQRT).softmax(-1).mT.contiguous().mT @ v


@pytest.mark.parametrize(
    "form", [channels_first, by_property, keys_first, keys_first_einsum, keys_first_right_einsum, turned_twice]
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_are_seen_whichever_way_they_are_turned(form, mode):
    with mode():
        (attn,) = recorded(form, Q, K, V)
    assert isinstance(attn, SoftmaxMap)
    assert (attn.to_dense().reshape(B, H, T, T) - A).abs().max() <= 1e-6
    assert torch.equal(attn.v.reshape(V.shape), V)


def test_turned_weights_that_were_written_to_are_those_that_were_used():
    def ablated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (k @ q.mT).softmax(-2)
        weights[:, 1] = 0
        return v.mT @ weights

    (attn,) = recorded(ablated, Q, K, V)
    expected = dense(Q @ K.mT)
    expected[:, 1] = 0
    assert (attn.to_dense() - expected).abs().max() <= 1e-6


def test_masked_scores_with_the_keys_first_give_the_weights_themselves():
    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (k @ q.mT).masked_fill(LATER.mT, -math.inf).softmax(-2).mT @ v

    (attn,) = recorded(masked, Q, K, V)
    assert (attn.to_dense() - dense((Q @ K.mT).masked_fill(LATER, -math.inf))).abs().max() <= 1e-6


@pytest.mark.parametrize("dim", [-2, 0, 1])
def test_a_softmax_over_another_dimension_than_the_keys_is_no_attention(dim):
    model = Run(lambda q, k, v: (q @ k.mT).softmax(dim) @ v)
    with pytest.raises(RecordingError, match="no attention call was seen"), record(model):
        model(Q, K, V)


# --- two dimensions ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("softmax", [nn.Softmax(dim=1), nn.Softmax()])
def test_one_head_without_a_batch_is_seen_however_its_matrices_are_multiplied(softmax):
    (attn,) = recorded(lambda q, k, v: torch.mm(softmax(torch.mm(q, k.t()) / SQRT), v), Q[0, 0], K[0, 0], V[0, 0])
    assert isinstance(attn, SoftmaxMap)
    assert (attn.to_dense() - A[:1, :1]).abs().max() <= 1e-6


# --- weights that are changed before their use ---------------------------------------------------------------

MIX = torch.randn(H, H, generator=torch.Generator().manual_seed(4))


def looking_back(weights: Tensor) -> Tensor:
    weights = weights.tril()
    return weights / weights.sum(-1, keepdim=True)


def looking_back_normalised(weights: Tensor) -> Tensor:
    return F.normalize(torch.tril(weights), p=1, dim=-1)


def talking(weights: Tensor) -> Tensor:
    return torch.einsum("bhts,hg->bgts", weights, MIX)


def talking_by_convolution(weights: Tensor) -> Tensor:
    return F.conv2d(weights, MIX[:, :, None, None])


@pytest.mark.parametrize(
    "change", [looking_back, looking_back_normalised, talking, talking_by_convolution, lambda w: w**2, torch.square]
)
def test_weights_that_were_changed_as_a_whole_are_those_that_were_used(change):
    (attn,) = recorded(lambda q, k, v: change((q @ k.mT / SQRT).softmax(-1)) @ v, Q, K, V)
    assert isinstance(attn, DenseMap)
    assert (attn.to_dense() - change(A)).abs().max() <= 1e-6


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_trap17_a_column_that_takes_weight_and_is_left_out_leaves_rows_below_one(rate):
    def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        weights = F.dropout(torch.cat([q @ k.mT, q.new_zeros(B, H, T, 1)], -1).softmax(-1), rate)
        return weights[..., :-1] @ v

    (attn,) = recorded(with_sink, Q, K, V)
    expected = torch.cat([Q @ K.mT, torch.zeros(B, H, T, 1)], -1).softmax(-1)[..., :-1]
    assert (attn.to_dense() - expected).abs().max() <= 1e-6


# --- linear attention ----------------------------------------------------------------------------------------


def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def efficient_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = torch.einsum("bhsd,bhse->bhde", k.softmax(dim=-2), v) / T
    return torch.einsum("bhtd,bhde->bhte", q.softmax(dim=-1), context)


@pytest.mark.parametrize("form", [efficient, efficient_einsum])
def test_a_softmax_of_features_is_no_attention(form):
    model = Run(form)
    with pytest.raises(RecordingError, match="no attention call was seen"), record(model):
        model(Q, K, V)


# --- tensors that end with the call --------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev])
def test_attention_inside_a_transform_is_an_error_that_says_so(transform):
    model = Run(lambda q, k, v: transform(lambda q: (q @ k[0].mT).softmax(-1) @ v[0])(q))
    with pytest.raises(RecordingError, match=r"inside vmap, grad or another transform of torch\.func"), record(model):
        model(Q, K, V)


def test_attention_on_the_meta_device_has_its_shape():
    model = Run(lambda q: (q @ q.mT).softmax(-1) @ q)
    with record(model) as recording:
        model(Q.to("meta"))
    (attn,) = recording
    assert attn.shape == (B, H, T, T)
