"""Seam 2, the nn.Transformer family: encoders with their fast path on, nested tensors, decoders and both together."""

from __future__ import annotations

import itertools
from typing import Any

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
    encoder,
    inputs_of,
    kernels,
    not_causal,
    padded,
    randn,
    real,
    recorded,
    textbook,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*enable_nested_tensor")


OPTIONS = [
    {},
    {"norm_first": True},
    {"activation": "gelu"},
    {"activation": F.silu},
    {"batch_first": False},
    {"bias": False},
]


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "plain")
def test_trap09_an_encoder_gives_every_layer_with_its_fast_path_on(grad, options):
    model, first = encoder(**options), options.get("batch_first", True)
    x = randn(B, T, E) if first else randn(T, B, E)
    fast = grad is not torch.enable_grad and options in OPTIONS[:3]
    for name, pads in itertools.product(["none", "bool", "causal", "bool per head", "-inf"], [True, False]):
        mask, padding = MASKS[name], padded(T) if name != "-inf" else as_float(padded(T))
        masks = {"mask": mask, "src_key_padding_mask": padding if pads else None}
        with grad(), kernels() as ran:
            recording = recorded(model, x, **masks)
        assert ran.count("_transformer_encoder_layer_fwd") == 4 * fast
        assert recording.paths == ["layers.0.self_attn", "layers.1.self_attn"]
        hidden = torch.zeros(1, 1, 1, 1) if mask is None else (mask != 0).view(-1, H if mask.ndim == 3 else 1, T, T)
        hidden = (hidden != 0) | (padded(T)[:, None, None] & pads)
        inputs = inputs_of(model, nn.MultiheadAttention, x, **masks)
        for attn, layer, (x_in, *_) in zip(recording, model.layers, inputs, strict=True):
            x_in = x_in if first else x_in.transpose(0, 1)
            expected = textbook(layer.self_attn, x_in, x_in, hidden)
            assert close(attn.to_dense(), expected * real(T) if pads else expected)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("longest", [T, T - 1])
def test_trap09_nested_tensors_are_given_the_layout_of_the_batch_they_were_made_of(grad, longest):
    model, x = encoder(layers=3, nested=True, norm=True), randn(B, T, E)
    padding = padded(T) | (torch.arange(T) >= longest)  # with longest < T no text is as long as the batch
    plain = encoder(layers=3, norm=True)
    with grad(), kernels() as ran:
        recording = recorded(model, x, src_key_padding_mask=padding)
        unnested = recorded(plain, x, src_key_padding_mask=padding)
    with_grad = recorded(model, x, src_key_padding_mask=padding)  # off the fast path
    assert len(ran) == 12
    for attn, *others in zip(recording, unnested, with_grad, strict=True):
        assert attn.shape == (B, H, T, T)
        dense = attn.to_dense()
        assert (dense.transpose(1, 3)[padding] == 0).all()
        assert (dense.transpose(1, 2)[padding] == 0).all()
        assert (attn.lse.transpose(1, 2)[padding] == -torch.inf).all()
        assert all(close(dense, other.to_dense()) for other in others)


def test_trap05_padded_queries_are_left_out_unless_all_tokens_are_taken_for_real():
    model, x = built(nn.MultiheadAttention, E, H, batch_first=True), randn(B, T, E)
    maps = {}
    for padding in (None, False, torch.ones(B, T).bool(), ~padded(T)):
        with record(model, padding=padding) as recording:
            model(x, x, x, key_padding_mask=padded(T))
        maps[str(padding)] = recording[0].to_dense()
    left_out, *kept, stated = maps.values()
    own = model(x, x, x, key_padding_mask=padded(T), average_attn_weights=False)[1]
    assert close(left_out, own * real(T))
    assert close(stated, own * real(T))
    assert all(close(one, own) for one in kept)


def test_a_nested_tensor_that_the_user_made():
    model, x = built(nn.MultiheadAttention, E, H, batch_first=True), randn(B, T, E)
    texts = [text[~hidden] for text, hidden in zip(x, padded(T), strict=True)]
    layer = encoder(layers=1, norm_first=True).layers[0]
    with torch.no_grad():
        nested = torch.nested.nested_tensor(texts)
        attn = recorded(model, nested, nested, nested, need_weights=False)[0]
        of_layer = recorded(layer, nested)[0]
        assert close(of_layer.to_dense(), recorded(layer, x, src_key_padding_mask=padded(T))[0].to_dense())
    assert close(attn.to_dense(), textbook(model, x, x, padded(T)[:, None, None]) * real(T))


def test_the_fast_path_takes_every_number_of_a_float_mask_for_hidden_and_so_does_the_map():
    layer, x, mask, padding = encoder(layers=1).layers[0], randn(B, T, E), torch.zeros(T, T), torch.zeros(B, T)
    mask[2, 3], mask[4, 1], padding[1, 5] = 0.5, -3.0, 0.25
    masks = {"src_mask": mask, "src_key_padding_mask": padding}
    added = recorded(layer, x, **masks)[0]
    assert close(added.to_dense(), textbook(layer.self_attn, x, x, bias=mask + padding[:, None, None]))
    with torch.no_grad():
        hidden = recorded(layer, x, **masks)[0]
        as_hidden = {name: numbers != 0 for name, numbers in masks.items()}
        assert torch.equal(layer(x, **masks), layer(x, **as_hidden))  # PyTorch's own reading
    assert close(hidden.to_dense(), textbook(layer.self_attn, x, x, (mask != 0) | (padding != 0)[:, None, None]))


def test_fast_and_slow_layers_of_one_encoder_each_read_the_mask_in_their_way():
    model, x, mask = encoder(layers=2), randn(B, T, E), torch.zeros(T, T)
    mask[2, 3] = 0.5
    model.layers[1].register_forward_hook(lambda *_: None)  # switches the fast path of this layer off
    with torch.no_grad(), kernels() as ran:
        recording = recorded(model, x, mask=mask)
        inputs = [x, model.layers[0](x, src_mask=mask)]
    assert len(ran) == 3
    for attn, layer, x_in, between in zip(recording, model.layers, inputs, [(mask != 0, 0), (None, mask)], strict=True):
        assert close(attn.to_dense(), textbook(layer.self_attn, x_in, x_in, *between))


def test_a_decoder_layer_without_cross_attention():
    class DecoderOnly(nn.TransformerDecoderLayer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            del self.multihead_attn

        def _mha_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return torch.zeros_like(x)

    model, x = built(DecoderOnly, E, H, 24, 0.0, batch_first=True), randn(B, T, E)
    for grad in GRADS:
        with grad():
            recording = recorded(model, x, None, tgt_mask=MASKS["causal"], tgt_key_padding_mask=padded(T))
        assert recording.paths == ["self_attn"]
        hidden = MASKS["causal"] | padded(T)[:, None, None]
        assert close(recording[0].to_dense(), textbook(model.self_attn, x, x, hidden) * real(T))


def test_trap10_layers_share_what_is_made_of_their_mask():
    model, x = encoder(layers=4), randn(B, T, E)
    for mask, rule in [(MASKS["causal"], "causal()"), (not_causal(), f"dense((1, 1, {T}, {T}))")]:
        with torch.no_grad():
            recording = recorded(model, x, mask=mask)
        assert {repr(attn.mask) for attn in recording} == {rule}
        assert recording.nbytes == 4 * (3 * x.nbytes) + (0 if rule == "causal()" else mask.nbytes)


# --- decoders, and both together ----------------------------------------------------------------------------


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_trap18_a_translator_gives_self_and_cross_attention_in_the_order_of_the_calls(grad, batch_first, norm_first):
    options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}
    model = built(nn.Transformer, E, H, 2, 2, 24, **options)
    src, tgt = (randn(B, n, E) if batch_first else randn(n, B, E) for n in (S, T))
    masks = {
        "tgt_mask": MASKS["causal"],
        "src_key_padding_mask": padded(S),
        "memory_key_padding_mask": padded(S),
        "tgt_key_padding_mask": padded(T),
    }
    with grad():
        recording = recorded(model, src, tgt, **masks)
    assert recording.paths == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    ]
    inputs = inputs_of(model, nn.MultiheadAttention, src, tgt, **masks)
    for path, attn, (q, k, _) in zip(recording.paths, recording, inputs, strict=True):
        q, k = (x if batch_first else x.transpose(0, 1) for x in (q, k))
        hidden = padded(k.shape[1])[:, None, None]
        if "decoder" in path and "self" in path:
            hidden = hidden | MASKS["causal"]
            assert "causal()" in repr(attn.mask)
        # The padded queries of cross-attention are known from the decoder layer.
        assert close(attn.to_dense(), textbook(model.get_submodule(path), q, k, hidden) * real(q.shape[1]))


@pytest.mark.parametrize("grad", GRADS)
def test_a_decoder_with_a_memory_mask_and_padding_of_its_own_side_only(grad):
    layer = nn.TransformerDecoderLayer(E, H, 24, 0.0, batch_first=True)
    model, tgt, memory = built(nn.TransformerDecoder, layer, 2), randn(B, T, E), randn(B, S, E)
    masks = {"memory_mask": randn(T, S, seed=4) > 0.5, "tgt_key_padding_mask": padded(T)}
    with grad():
        recording = recorded(model, tgt, memory, **masks)
    inputs = inputs_of(model, nn.MultiheadAttention, tgt, memory, **masks)
    for path, attn, (q, k, _) in zip(recording.paths, recording, inputs, strict=True):
        hidden = masks["memory_mask"] if "multihead" in path else padded(T)[:, None, None]
        assert close(attn.to_dense(), textbook(model.get_submodule(path), q, k, hidden) * real(T))
