"""Seam 2, nn.MultiheadAttention, called in every combination: against the formula, and need_weights=True."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.recording import record

from .torch_built import (
    GRADS,
    MASKS,
    B,
    E,
    H,
    S,
    T,
    as_float,
    built,
    close,
    kernels,
    not_causal,
    padded,
    per_head,
    randn,
    real,
    recorded,
    textbook,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*enable_nested_tensor")


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_trap01_self_attention_has_the_weights_that_the_module_gives(grad, batch_first, training):
    mha = built(nn.MultiheadAttention, E, H, batch_first=batch_first).train(training)
    x = randn(B, T, E) if batch_first else randn(T, B, E)
    for mask, pads, need_weights in itertools.product(MASKS.values(), (True, False), (True, False)):
        added = mask is not None and mask.is_floating_point()
        padding = as_float(padded(T)) if added else padded(T)
        masks = {"attn_mask": mask, "key_padding_mask": padding if pads else None}
        with grad(), kernels() as ran:
            attn = recorded(mha, x, x, x, need_weights=need_weights, **masks)[0]
            own = mha(x, x, x, average_attn_weights=False, **masks)[1].nan_to_num(0.0)
        fast = batch_first and not training and grad is not torch.enable_grad and not added
        assert ran == ["_native_multi_head_attention"] * 3 * fast
        assert close(attn.to_dense(), own * real(T) if pads else own)


def test_trap03_true_means_hidden_in_these_modules():
    mha, x = built(nn.MultiheadAttention, E, H, batch_first=True), randn(B, T, E)
    hidden = not_causal() | padded(T)[:, None]
    attn = recorded(mha, x, x, x, attn_mask=not_causal(), key_padding_mask=padded(T))[0]
    assert close(attn.to_dense(), textbook(mha, x, x, hidden[:, None]) * real(T))
    assert (attn.to_dense().masked_select(hidden[:, None]) == 0).all()


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 7}, {"bias": False}, {"kdim": 10, "bias": False}])
def test_cross_attention_is_not_causal_and_has_its_own_lengths(grad, need_weights, options):
    mha = built(nn.MultiheadAttention, E, H, batch_first=True, **options)
    q, k, v = randn(B, T, E), randn(B, S, mha.kdim), randn(B, S, mha.vdim)
    with grad():
        attn = recorded(mha, q, k, v, key_padding_mask=padded(S), need_weights=need_weights)[0]
        own = mha(q, k, v, key_padding_mask=padded(S), average_attn_weights=False)[1]
    assert close(attn.to_dense(), own)
    assert close(attn.to_dense(), textbook(mha, q, k, padded(S)[:, None, None]))


@pytest.mark.parametrize("extra", [("add_bias_kv",), ("add_zero_attn",), ("add_bias_kv", "add_zero_attn")])
@pytest.mark.parametrize("mask", ["none", "bool", "causal", "added per head"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_learned_and_zero_keys_are_the_last_keys(extra, mask, need_weights):
    mha, x = built(nn.MultiheadAttention, E, H, batch_first=True, **dict.fromkeys(extra, True)), randn(B, T, E)
    padding = as_float(padded(T)) if mask == "added per head" else padded(T)
    masks = {"attn_mask": MASKS[mask], "key_padding_mask": padding, "is_causal": mask == "causal"}
    attn = recorded(mha, x, x, x, need_weights=need_weights, **masks)[0]
    assert attn.shape == (B, H, T, T + len(extra))
    own = mha(x, x, x, average_attn_weights=False, **masks)[1]
    assert close(attn.to_dense(), own * real(T))


@pytest.mark.parametrize("mask", ["none", "bool", "bool of heads", "added"])
@pytest.mark.parametrize("grad", GRADS)
def test_unbatched_input_is_a_batch_of_one(mask, grad):
    mha, x = built(nn.MultiheadAttention, E, H), randn(T, E)
    attn_mask = per_head(not_causal())[:H] if mask == "bool of heads" else MASKS[mask]
    padding = padded(T)[1] if mask != "added" else as_float(padded(T)[1])
    with grad():
        attn = recorded(mha, x, x, x, attn_mask=attn_mask, key_padding_mask=padding)[0]
        own = mha(x, x, x, attn_mask=attn_mask, key_padding_mask=padding, average_attn_weights=False)[1]
    assert close(attn.to_dense(), own[None] * ~padded(T)[1][:, None])


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize(("need_weights", "padding"), [(True, None), (False, None), (False, padded(T))])
def test_trap10_a_causal_hint_is_kept_as_a_rule_and_no_square_tensor(grad, need_weights, padding):
    mha, x = built(nn.MultiheadAttention, E, H, batch_first=True), randn(B, T, E)
    masks = {"attn_mask": MASKS["causal"], "key_padding_mask": padding, "is_causal": True}
    with grad():
        attn = recorded(mha, x, x, x, need_weights=need_weights, **masks)[0]
        own = mha(x, x, x, average_attn_weights=False, **masks)[1]
    assert repr(attn.mask).count("causal()") == 1
    assert "dense" not in repr(attn.mask)
    assert close(attn.to_dense(), own if padding is None else own * real(T))


def test_trap07_a_wrong_causal_hint_is_read_as_pytorch_reads_it():
    mha, x, mask = built(nn.MultiheadAttention, E, H, batch_first=True), randn(B, T, E), not_causal()
    taken = recorded(mha, x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    assert close(taken.to_dense(), textbook(mha, x, x, MASKS["causal"]))
    for options in [{"need_weights": True}, {"need_weights": False, "key_padding_mask": padded(T)}]:
        ignored = recorded(mha, x, x, x, attn_mask=mask, is_causal=True, **options)[0].to_dense()
        assert close(ignored[0], textbook(mha, x[:1], x[:1], mask)[0])  # the first text has no padding
    with torch.no_grad():  # the fast path ignores it
        assert close(recorded(mha, x, x, x, attn_mask=mask, is_causal=True)[0].to_dense(), textbook(mha, x, x, mask))


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("mask", ["none", "bool", "added"])
@pytest.mark.parametrize("grad", GRADS)
def test_a_padding_mask_of_numbers_is_added(mask, grad):
    mha, x, numbers = built(nn.MultiheadAttention, E, H, batch_first=True), randn(B, T, E), randn(B, T, seed=9)
    with grad():
        attn = recorded(mha, x, x, x, attn_mask=MASKS[mask], key_padding_mask=numbers)[0]
        own = mha(x, x, x, attn_mask=MASKS[mask], key_padding_mask=numbers, average_attn_weights=False)[1]
    assert close(attn.to_dense(), own)


def test_trap06_a_causal_hint_with_more_keys_is_upper_left():
    mha = built(nn.MultiheadAttention, E, H, batch_first=True)
    q, k, mask = randn(B, T, E), randn(B, S, E), torch.ones(T, S).triu(1).bool()
    for need_weights in (True, False):
        attn = recorded(mha, q, k, k, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]
        assert repr(attn.mask) == "causal_upper_left()"
        assert close(attn.to_dense(), textbook(mha, q, k, mask))


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_trap04_rows_with_nothing_to_attend_to_are_empty(grad, batch_first):
    mha, x = built(nn.MultiheadAttention, E, H, batch_first=batch_first), randn(T, T, E)
    mask = not_causal()
    mask[2] = True
    with grad():
        attn = recorded(mha, x, x, x, attn_mask=mask, need_weights=False)[0]
    assert (attn.to_dense()[:, :, 2] == 0).all()
    assert (attn.lse[:, :, 2] == -torch.inf).all()
    assert (attn.entropy()[:, :, 2] == 0).all()


def test_trap08_weights_are_those_before_dropout():
    mha, x = built(nn.MultiheadAttention, E, H, dropout=0.5, batch_first=True).train(), randn(B, T, E)
    for need_weights in (True, False):
        attn = recorded(mha, x, x, x, need_weights=need_weights)[0]
        assert mha.training
        assert close(attn.to_dense(), textbook(mha, x, x))


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_trap19_half_precision_is_read_as_exactly_as_the_module_computes(how, grad):
    mha, x = built(nn.MultiheadAttention, E, H, batch_first=True), randn(B, T, E)
    if how == "bfloat16":
        mha, x = mha.bfloat16(), x.bfloat16()
    with grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        attn = recorded(mha, x, x, x)[0]
        own = mha(x, x, x, average_attn_weights=False)[1]
    assert (attn.q.dtype, attn.to_dense().dtype) == (torch.bfloat16, torch.float32)
    exact = textbook(mha, x, x)
    assert (attn.to_dense() - exact).abs().max() <= (own - exact).abs().max()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch hides it, where warnings are no errors
def test_a_compiled_function_around_a_multihead_attention_is_seen():
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = built(nn.MultiheadAttention, E, H, batch_first=True)
            self.twice = torch.compile(lambda x: self.inner(x, x, x, need_weights=False)[0] * 2, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(x)

    model, x = Compiled(), randn(B, T, E)
    assert recorded(model, x).paths == ["inner"]
    with torch.no_grad(), record(model) as recording:
        out = model(x)
    assert close(out, 2 * model.inner(x, x, x)[0])  # on the fast path, which PyTorch's compiler does not take
    assert close(recording[0].to_dense(), textbook(model.inner, x, x))


def test_ready_made_keys_and_values():
    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = built(nn.MultiheadAttention, E, H)

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            m = self.inner
            weights = m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight, m.out_proj.bias
            static = {"static_k": k, "static_v": k}
            return F.multi_head_attention_forward(q, q, q, E, H, *weights, training=False, **static)[0]

    model, q, k = Static(), randn(T, B, E), randn(B * H, S, E // H)
    recording = recorded(model, q, k)
    assert recording.paths == [""]
    projected = (q @ model.inner.in_proj_weight[:E].mT + model.inner.in_proj_bias[:E]).view(T, B, H, E // H)
    expected = (projected.permute(1, 2, 0, 3) @ k.view(B, H, S, E // H).mT / 2).softmax(-1)
    assert close(recording[0].to_dense(), expected)
