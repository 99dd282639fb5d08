"""Seam 4: attention written by hand, as softmax(q @ k.mT) @ v, and what only looks like it."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import DenseMap, SoftmaxMap
from clearhead.errors import RecordingError
from clearhead.recording import record

from .by_hand import LATER, PADDED, B, D, H, K, Q, Run, T, V, dense, randn, recorded

SQRT = D**0.5


def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v


def scaled_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(torch.matmul(q * D**-0.5, k.mT), dim=-1).matmul(v)


def scale_as_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.matmul(k.transpose(2, 3)) / torch.sqrt(torch.tensor(float(D)))
    return nn.Softmax(dim=3)(scores) @ v


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.mT * D**-0.5).float(), dim=-1, dtype=torch.float32).to(q.dtype) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    out = torch.einsum("nhql,nlhd->nqhd", [torch.softmax(energy / SQRT, dim=3), v])
    return out.transpose(1, 2)


def by_einsum_with_dots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...sd, ...ts -> ...td", v, torch.einsum("...sd,...td->...ts", k, q).div(SQRT).softmax(-1))


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).mul_(1 / SQRT).softmax(dim=2)
    return torch.bmm(weights, v).view(B, H, T, D)


def folded_and_unfolded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(B * H, T, D).clone() for x in (q, k, v))
    scores = torch.baddbmm(torch.empty(B * H, T, T), q, k.mT, beta=0.0, alpha=1 / SQRT)
    weights = scores.view(B, H, T, T).softmax(-1).view(B * H, T, T)
    return torch.baddbmm(torch.zeros(1), weights, v).view(B, H, T, D)


def without_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / SQRT
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


FORMS = [
    plainly,
    scaled_query,
    scale_as_tensor,
    in_float32,
    by_einsum,
    by_einsum_with_dots,
    folded,
    folded_and_unfolded,
    without_the_largest,
]


@pytest.mark.parametrize("form", FORMS)
def test_every_way_of_writing_it_is_read_back_as_q_and_k(form):
    (attn,) = recorded(form, Q, K, V)
    assert isinstance(attn, SoftmaxMap)
    assert attn.shape == (B, H, T, T)
    assert (attn.to_dense() - dense(Q @ K.mT / SQRT)).abs().max() <= 1e-6
    assert torch.equal(attn.v, V)


def mask_before(scores: Tensor) -> Tensor:
    return scores.masked_fill(LATER, -math.inf) / SQRT


def mask_after(scores: Tensor) -> Tensor:
    return (scores / SQRT).masked_fill(torch.tril(torch.ones(1, 1, T, T)) == 0, float("-1e20"))


def mask_in_place(scores: Tensor) -> Tensor:
    scores /= SQRT
    scores.masked_fill_(LATER, torch.finfo(scores.dtype).min)
    return scores


def mask_added(scores: Tensor) -> Tensor:
    return scores / SQRT + torch.full((T, T), -math.inf).triu(1)


def mask_added_in_place(scores: Tensor) -> Tensor:
    scores *= 1 / SQRT
    scores += torch.full((1, 1, T, T), -1e9).triu(1)
    return scores


def mask_by_where(scores: Tensor) -> Tensor:
    return torch.where(~LATER, scores / SQRT, torch.tensor(torch.finfo(scores.dtype).min))


def mask_by_a_full_tensor(scores: Tensor) -> Tensor:
    return torch.where(LATER, torch.full_like(scores, -math.inf), scores / SQRT)


def mask_by_index(scores: Tensor) -> Tensor:
    scores = scores / SQRT
    scores[LATER.expand_as(scores)] = -math.inf
    return scores


def mask_kept_finite(scores: Tensor) -> Tensor:
    scores = scores / SQRT + torch.full((T, T), -math.inf).triu(1)
    return torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))


CAUSAL = [
    mask_before,
    mask_after,
    mask_in_place,
    mask_added,
    mask_added_in_place,
    mask_by_where,
    mask_by_a_full_tensor,
    mask_by_index,
    mask_kept_finite,
]


@pytest.mark.parametrize("hide", CAUSAL)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_trap12_every_way_of_looking_back_only_is_the_causal_rule(hide, grad):
    with grad():
        (attn,) = recorded(lambda q, k, v: hide(q @ k.mT).softmax(-1) @ v, Q, K, V)
    assert repr(attn.mask) == "causal()"
    assert attn.bias is None
    weights = attn.to_dense()
    assert (weights - dense((Q @ K.mT / SQRT).masked_fill(LATER, -math.inf))).abs().max() <= 1e-6
    assert (weights[..., LATER] == 0).all()


def test_trap10_nothing_of_the_size_of_all_pairs_is_held():
    q = randn(1, 4, 512, 8)
    later = torch.ones(512, 512, dtype=torch.bool).triu(1)
    recording = recorded(lambda q: (q @ q.mT).masked_fill(later, -math.inf).softmax(-1) @ q, q)
    assert recording.nbytes == q.nbytes


def test_trap13_a_mask_per_batch_entry_hides_keys_of_that_entry():
    hidden = PADDED[:, None, None, :]
    (attn,) = recorded(lambda q, k, v: (q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v, Q, K, V)
    assert attn.scale == 1
    assert (attn.to_dense() - dense((Q @ K.mT).masked_fill(hidden, -math.inf))).abs().max() <= 1e-6


@pytest.mark.parametrize("shape", [(T,), (T, 1), (T, T), (1, H, T, T), (H, 1, T), (B, 1, 1, T), (B, H, T, 1)])
def test_trap17_a_bias_is_held_as_it_came(shape):
    bias = randn(*shape)
    (attn,) = recorded(lambda q, k, v: (q @ k.mT + 2 * bias).softmax(-1) @ v, Q, K, V)
    assert isinstance(attn, SoftmaxMap)
    assert (attn.to_dense() - dense(Q @ K.mT + 2 * bias)).abs().max() <= 1e-6


def test_trap11_what_is_scaled_after_a_bias_scales_the_bias():
    bias = randn(1, H, T, T)
    (attn,) = recorded(lambda q, k, v: ((q @ k.mT - bias) * 0.5).softmax(-1) @ v, Q, K, V)
    assert attn.scale == 0.5
    assert (attn.to_dense() - dense((Q @ K.mT - bias) / 2)).abs().max() <= 1e-6


def test_trap17_a_soft_cap_before_the_mask():
    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT / SQRT / 2.0) * 2.0
        return scores.masked_fill(LATER, -math.inf).softmax(-1) @ v

    (attn,) = recorded(capped, Q, K, V)
    assert attn.softcap == 2
    expected = dense((2 * (Q @ K.mT / SQRT / 2).tanh()).masked_fill(LATER, -math.inf))
    assert (attn.to_dense() - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("einsum", [False, True])
def test_trap15_keys_that_heads_share_stay_shared(einsum):
    q, k, v = randn(B, 2, 3, T, D), randn(B, 2, T, D), randn(B, 2, T, D, seed=1)

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if einsum:
            scores = torch.einsum("bgrtd,bgsd->bgrts", q, k)
            return torch.einsum("bgrts,bgsd->bgrtd", scores.softmax(-1), v)
        scores = (q @ k.unsqueeze(2).mT).masked_fill(PADDED[:, None, None, None], -math.inf)
        return scores.softmax(-1) @ v.unsqueeze(2)

    (attn,) = recorded(grouped, q, k, v)
    assert attn.shape == (B, 6, T, T)
    assert attn.k.shape == (B, 2, T, D)
    scores = q.flatten(1, 2) @ k.repeat_interleave(3, 1).mT
    expected = dense(scores if einsum else scores.masked_fill(PADDED[:, None, None], -math.inf))
    assert (attn.to_dense() - expected).abs().max() <= 1e-6


def test_trap18_cross_attention_with_more_keys_and_other_values():
    k, v = randn(B, H, 9, D), randn(B, H, 9, 5)
    (attn,) = recorded(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, Q, k, v)
    assert attn.shape == (B, H, T, 9)
    assert attn.v.shape == (B, H, 9, 5)


def test_trap06_with_a_cache_causal_is_lower_right():
    later = torch.ones(3, T, dtype=torch.bool).triu(1 + T - 3)
    (attn,) = recorded(lambda q, k, v: (q @ k.mT).masked_fill(later, -math.inf).softmax(-1) @ v, Q[:, :, :3], K, V)
    assert repr(attn.mask) == "causal()"


@pytest.mark.parametrize(
    "fill",
    [
        lambda w, m: w.masked_fill(m, 0.0),
        lambda w, m: w.masked_fill_(m, 0),
        lambda w, m: torch.where(m, torch.zeros_like(w), w),
    ],
)
@pytest.mark.parametrize("hides", [-math.inf, torch.finfo(torch.float32).min])
def test_trap04_rows_with_nothing_to_attend_to_are_zero(fill, hides):
    hidden = LATER | PADDED[:, None, None, :].flip(-1)  # left padding
    scores = (Q @ K.mT).masked_fill(hidden, -math.inf)

    def emptied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).masked_fill(hidden, hides).softmax(-1).nan_to_num(0.0)
        return fill(weights, hidden) @ v

    (attn,) = recorded(emptied, Q, K, V)
    assert isinstance(attn, SoftmaxMap)
    assert (attn.to_dense() - dense(scores)).abs().max() <= 1e-6
    assert attn.entropy().isfinite().all()


@pytest.mark.parametrize("drop", [F.dropout, torch.nn.Dropout(0.5), lambda w, **_: torch.dropout(w, 0.5, True)])
def test_trap08_weights_are_those_before_dropout(drop):
    bias = randn(B, H, T, T)  # as large as the weights: these are held
    for biased in (False, True):

        def with_drop(q: Tensor, k: Tensor, v: Tensor, biased: bool = biased) -> Tensor:
            torch.manual_seed(3)
            scores = q @ k.mT + bias if biased else q @ k.mT
            return drop(scores.softmax(-1)) @ v

        (attn,) = recorded(with_drop, Q, K, V)
        assert isinstance(attn, DenseMap if biased else SoftmaxMap)
        assert (attn.to_dense() - dense(Q @ K.mT + bias if biased else Q @ K.mT)).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trap19_half_precision_is_read_in_float32(dtype):
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    (attn,) = recorded(plainly, q, k, v)
    assert isinstance(attn, SoftmaxMap)
    assert attn.to_dense().dtype == torch.float32
    assert (attn.to_dense() - dense(q.float() @ k.float().mT / SQRT)).abs().max() <= 1e-6


def test_autocast_rounds_the_scores_and_not_what_is_read():
    model = Run(plainly)
    with torch.autocast("cpu", dtype=torch.bfloat16), record(model) as recording:
        model(Q, K, V)
    assert (recording[0].to_dense() - dense(Q @ K.mT / SQRT)).abs().max() <= 1e-6


# --- what only looks like attention ---------------------------------------------------------------


class Experts(nn.Module):
    """Routers, in the ways in which they are written."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate, self.experts = nn.Linear(D, 5), nn.Parameter(randn(5, D, D))
        self.table, self.w = nn.Parameter(randn(5, D)), nn.Parameter(randn(D, T))

    def forward(self, x: Tensor) -> Tensor:
        gates = F.softmax(self.gate(x), dim=-1)
        if self.how == "top-k":
            values, chosen = gates.flatten(0, 1).topk(2)
            return (self.experts[chosen] @ x.flatten(0, 1)[:, None, :, None] * values[..., None, None]).sum(1)
        if self.how == "mixture":
            outputs = torch.einsum("btd,edf->btef", x, self.experts)
            return (gates.unsqueeze(-2) @ outputs).squeeze(-2)
        if self.how == "einsum":
            return torch.einsum("bte,bted->btd", gates, torch.einsum("btd,edf->btef", x, self.experts))
        if self.how == "merged":
            return torch.einsum("bte,edf->btdf", gates, self.experts)
        if self.how == "table":
            return gates @ self.table
        if self.how == "two-dimensional":
            return F.softmax(x[0] @ self.w, dim=-1) @ x[0]  # T experts for T tokens
        if self.how == "two-dimensional einsum":
            return torch.einsum("te,ed->td", torch.einsum("td,de->te", x[0], self.w).softmax(-1), x[0])
        return torch.multinomial(gates.flatten(0, 1), 1) + (gates * 2).sum()


@pytest.mark.parametrize(
    "how",
    ["top-k", "mixture", "einsum", "merged", "table", "two-dimensional", "two-dimensional einsum", "sampling"],
)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_routers_and_sampling_are_not_taken_for_attention(how, grad):
    torch.manual_seed(0)
    model, x = Experts(how), randn(B, T, D)
    with grad(), pytest.raises(RecordingError, match="no attention call was seen"), record(model):
        model(x)


def test_a_softmax_is_a_layer_once():
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        return weights @ v + weights.clone() @ q

    assert len(recorded(twice, Q, K, V)) == 1


def test_of_a_softmax_of_a_softmax_the_one_that_is_used_is_the_layer():
    (attn,) = recorded(lambda q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v, Q, K, V)
    assert torch.equal(attn.to_dense(), dense(Q @ K.mT).softmax(-1))


def test_calls_that_an_earlier_seam_has_taken_are_not_seen_again():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theirs = layer

        def forward(self, x: Tensor) -> Tensor:
            x = F.scaled_dot_product_attention(x, x, x)
            x = self.theirs(x, x, x, need_weights=True)[0]
            return (x @ x.mT).softmax(-1) @ x

    model = Both()
    with record(model) as recording:
        model(randn(B, T, 8))
    assert recording.paths == ["", "theirs", ""]


# --- layers of a student's own: two dimensions ----------------------------------------------------


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(123)
        self.W_query, self.W_key, self.W_value = (nn.Parameter(torch.rand(3, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        keys, queries, values = x @ self.W_key, x @ self.W_query, x @ self.W_value
        scores = queries @ (keys.T if x.ndim == 2 else keys.mT)
        return torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1) @ values


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_layer_of_ones_own_is_seen_with_a_batch_and_without(grad):
    x, model = randn(6, 3), Mine()
    with grad():
        for given in (x, x[None]):
            with record(model) as recording:
                out = model(given)
            (attn,) = recording
            assert isinstance(attn, SoftmaxMap)
            assert attn.shape == (1, 1, 6, 6)
            assert torch.equal(out, model(given))
            assert (attn.to_dense()[0, 0] @ (x @ model.W_value) - out.view(6, 2)).abs().max() <= 1e-6


# --- nothing is changed, nothing is left behind ---------------------------------------------------


def test_trap02_everything_is_as_before_after_a_block(touched):
    before = touched()
    recorded(plainly, Q, K, V)
    assert touched() == before


def test_a_model_without_it_has_nothing_noted(nano, ids, monkeypatch):
    noted: list[Any] = []
    monkeypatch.setattr("clearhead.recording.trail.Trail._note", lambda *note: noted.append(note))
    with record(nano):
        nano(ids)
    assert not noted


def test_trap02_nothing_is_alive_after_the_block_but_what_the_recording_holds():
    made: list[weakref.ref[Tensor]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(LATER, -math.inf)
        weights = F.dropout(scores.softmax(-1), 0.1)
        made.extend(weakref.ref(x) for x in (scores, weights))
        return weights @ v

    model = Run(watched)
    with record(model) as recording:
        out = model(Q, K, V)
        assert all(ref() is None for ref in made)  # and not within the block either
    assert recording[0].shape == (*out.shape[:2], T, T)


def test_trap02_an_exception_between_the_steps_leaves_nothing():
    made: list[weakref.ref[Tensor]] = []

    def fails(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        made.append(weakref.ref(weights))
        return weights @ v[:, :, 1:]

    model = Run(fails)
    with pytest.raises(RuntimeError), record(model):
        model(Q, K, V)
    gc.collect()
    assert made[0]() is None


def test_detach_false_keeps_the_graph_and_trains():
    for bias, kind in ((torch.zeros(()), SoftmaxMap), (randn(B, H, T, T), DenseMap)):
        q = Q.clone().requires_grad_()
        model = Run(lambda q, k, v, bias=bias: (q @ k.mT + bias).softmax(-1) @ v)
        with record(model, detach=False) as recording:
            model(q, K, V)
        assert isinstance(recording[0], kind)
        recording[0].entropy().mean().backward()
        assert q.grad.abs().sum() > 0


def test_a_compiled_function_is_left_to_the_compiler():
    model = Run(torch.compile(plainly, backend="aot_eager", fullgraph=True))
    plain = model(Q, K, V)
    with pytest.raises(RecordingError, match="no attention call was seen"), record(model):
        out = model(Q, K, V)
    assert torch.equal(out, plain)
