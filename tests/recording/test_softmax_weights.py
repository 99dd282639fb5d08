"""Seam 4, where more than a softmax of scores is computed by hand: the weights as they were made and used."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import DenseMap
from clearhead.errors import RecordingError
from clearhead.recording import record

from .by_hand import LATER, PADDED, B, D, H, K, Q, T, V, dense, recorded


def normalised(scores: Tensor) -> Tensor:
    return scores / scores.norm(dim=-1, keepdim=True)


def part_of_it_changed(scores: Tensor) -> Tensor:
    scores[:, :, :, 0] = 3.0
    return scores


def changed_through_a_view(scores: Tensor) -> Tensor:
    scores.view(-1, T, T)[:, 2].fill_(1.0)
    return scores


def clamped(scores: Tensor) -> Tensor:
    return scores.clamp(-0.5, 0.5)


def hidden_a_little(scores: Tensor) -> Tensor:
    return scores.masked_fill(LATER, -1.0)


@pytest.mark.parametrize("change", [normalised, part_of_it_changed, changed_through_a_view, clamped, hidden_a_little])
def test_what_is_not_understood_gives_the_weights_themselves(change):
    (attn,) = recorded(lambda q, k, v: change(q @ k.mT).softmax(-1) @ v, Q, K, V)
    assert isinstance(attn, DenseMap)
    assert torch.equal(attn.to_dense(), dense(change(Q @ K.mT)))


def test_operands_that_were_overwritten_are_not_read_back():
    def overwritten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        q.zero_()
        return scores.softmax(-1) @ v

    (attn,) = recorded(overwritten, Q, K, V)
    assert torch.equal(attn.to_dense(), dense(Q @ K.mT))


def head_taken_out(weights: Tensor) -> Tensor:
    weights[:, 1] = 0
    return weights


@pytest.mark.parametrize("copied", [torch.clone, torch.Tensor.double, lambda weights: weights.view(B * H, T, T)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_are_written_to_before_they_are_used_are_those_that_were_used(copied, mode):
    def ablated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = head_taken_out(copied((q @ k.mT).softmax(-1)).view(B, H, T, T))
        return weights @ v.to(weights.dtype)

    with mode():
        (attn,) = recorded(ablated, Q, K, V)
    assert (attn.to_dense() - head_taken_out(dense(Q @ K.mT))).abs().max() <= 1e-6


GATE = torch.tensor([1.0, 0.0, 0.5]).view(H, 1, 1)


def hidden_after_the_softmax(weights: Tensor) -> Tensor:
    """As a first lesson does it: zeros above the diagonal, then rows that sum to 1 again."""
    weights = weights * ~LATER
    return weights / weights.sum(-1, keepdim=True)


def gated(weights: Tensor) -> Tensor:
    weights *= GATE
    return weights


@pytest.mark.parametrize("change", [hidden_after_the_softmax, gated, lambda w: w - w.mean(), lambda w: 0.25 + w])
def test_weights_that_were_changed_before_they_are_used_are_those_that_were_used(change):
    (attn,) = recorded(lambda q, k, v: change((q @ k.mT).softmax(-1)) @ v, Q, K, V)
    assert isinstance(attn, DenseMap)
    assert torch.equal(attn.to_dense(), change(dense(Q @ K.mT)))


def test_trap08_weights_that_are_changed_after_dropout_are_those_before_it():
    def with_drop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return (F.dropout((q @ k.mT).softmax(-1)) * GATE) @ v

    (attn,) = recorded(with_drop, Q, K, V)
    assert (attn.to_dense() - dense(Q @ K.mT)).abs().max() <= 1e-6


def test_additive_attention_is_seen_by_its_weights():
    def bahdanau(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q[:, :, None] + k[:, None]).tanh().sum(-1)
        return torch.bmm(scores.softmax(-1), v)

    q, k, v = Q[:, 0], K[:, 0], V[:, 0]
    (attn,) = recorded(bahdanau, q, k, v)
    assert attn.shape == (B, 1, T, T)
    assert torch.equal(attn.to_dense()[:, 0], (q[:, :, None] + k[:, None]).tanh().sum(-1).softmax(-1))


def test_heads_folded_into_the_batch_are_found_by_the_values():
    def fold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(B * H, T, D) for x in (q, k, v))
        return torch.bmm(normalised(torch.bmm(q, k.mT)).softmax(-1), v)

    (attn,) = recorded(fold, Q, K, V)
    assert attn.shape == (B, H, T, T)
    assert (attn.to_dense() - dense(normalised(Q @ K.mT))).abs().max() <= 1e-6


def test_weights_that_are_overwritten_later_raise_on_reading():
    kept = []

    def keeping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append(normalised(q @ k.mT).softmax(-1))
        return kept[-1] @ v

    recording = recorded(keeping, Q, K, V)
    assert torch.equal(pickle.loads(pickle.dumps(recording))[0].to_dense(), kept[-1])
    assert recording.nbytes == kept[-1].nbytes == recording.dense_nbytes
    kept[-1].zero_()
    with pytest.raises(RecordingError, match="weights, mask or bias was overwritten"):
        recording[0]


def test_trap05_padding_is_joined_to_weights_that_left_it_out():
    class Padded(nn.Module):
        def forward(self, q: Tensor, attention_mask: Tensor, hide: bool = True) -> Tensor:
            scores = normalised(q @ q.mT)
            hidden = attention_mask[:, None, None, :] == 0
            return (scores.masked_fill(hidden, -1e9) if hide else scores).softmax(-1) @ q

    model, real = Padded(), (~PADDED).long()
    with record(model) as recording:
        model(Q, real)
    weights = recording[0].to_dense()
    assert (weights[1, :, 4:] == 0).all()  # padded queries
    assert (weights[1, :, :, 4:] == 0).all()
    assert (weights[1, :, :4].sum(-1) - 1).abs().max() <= 1e-6
    with record(model) as recording:  # padding that the model did not hide is not this call's
        model(Q, real, hide=False)
    assert (recording[0].to_dense()[1, :, :, 4:] > 0).all()
