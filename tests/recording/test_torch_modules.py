"""Seam 2: PyTorch's own modules, against the formula written with their weights, and against need_weights=True."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.recording import Recording, record

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*enable_nested_tensor")

B, T, S, E, H = 3, 6, 9, 16, 4
GRADS = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def padded(length: int) -> Tensor:
    """True where a token is padding: the second text is 2 tokens shorter, the third 4."""
    return torch.arange(length) >= length - 2 * torch.arange(B)[:, None]


def real(length: int) -> Tensor:
    """Rows of real queries, (B, 1, tokens, 1)."""
    return ~padded(length)[:, None, :, None]


def not_causal() -> Tensor:
    """A mask (T, T), True = hidden, that leaves each query the first key, and is no causal one."""
    return (randn(T, T, seed=3) > 0.5) & (torch.arange(T) > 0)


def per_head(mask: Tensor) -> Tensor:
    """(T, T) → (B·H, T, T), of which every head but the first hides one pair more."""
    masks = mask.expand(B, H, *mask.shape).clone()
    masks[:, 1:, 3, 2] = True
    return masks.flatten(0, 1)


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


def built(kind: type[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """A module whose biases and norms are not the 0 and 1 they start with."""
    torch.manual_seed(0)
    module = kind(*args, **kwargs).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.3)
    return module


def recorded(model: nn.Module, *args: Any, **kwargs: Any) -> Recording:
    """The recording of a call whose output is that of the unobserved model, bit for bit."""
    torch.manual_seed(1)
    plain, random = model(*args, **kwargs), torch.get_rng_state()
    torch.manual_seed(1)
    with record(model) as recording:
        out = model(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), random)
    for ours, theirs in zip(flat(out), flat(plain), strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert ours.requires_grad == theirs.requires_grad
    return recording


def flat(out: Any) -> list[Tensor]:
    parts = out if isinstance(out, tuple) else (out,)
    return [t for part in parts if part is not None for t in (part.unbind() if part.is_nested else [part])]


def textbook(mha: nn.MultiheadAttention, q: Tensor, k: Tensor, hidden: Tensor | None = None, bias: Any = 0) -> Tensor:
    """softmax(Q Kᵀ/√D) in float64 from the module's own weights, of (B, T, E) and (B, S, E); (B, H, T, S)."""
    packed = mha.in_proj_weight
    weights = (mha.q_proj_weight, mha.k_proj_weight) if packed is None else packed.chunk(3)[:2]
    biases = (0, 0) if mha.in_proj_bias is None else mha.in_proj_bias.double().chunk(3)[:2]
    q, k = (
        (x.double() @ w.double().mT + b).unflatten(-1, (mha.num_heads, -1)).transpose(1, 2)
        for x, w, b in zip((q, k), weights, biases, strict=True)
    )
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0).detach()


def close(ours: Tensor, expected: Tensor) -> bool:
    """Within float rounding of the weights that the module itself gives."""
    assert ours.shape == expected.shape
    return bool((ours - expected).abs().max() <= 2e-6)


# --- nn.MultiheadAttention: every combination of how it is called ------------------------------------------


@contextlib.contextmanager
def kernels() -> Iterator[list[str]]:
    """The names of the fast paths that run."""
    ran: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
            original = getattr(torch, name)
            patch.setattr(torch, name, lambda *a, _name=name, _f=original, **k: ran.append(_name) or _f(*a, **k))
        yield ran


MASKS = {
    "none": None,
    "bool": not_causal(),
    "bool per head": per_head(not_causal()),
    "-inf": as_float(not_causal()),
    "added": randn(T, T, seed=5),
    "added per head": randn(B * H, T, T, seed=6),
    "causal": torch.ones(T, T).triu(1).bool(),
}


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


# --- encoders: the fast path of a whole layer, with nested tensors or not ------------------------------------


def encoder(layers: int = 2, nested: bool = False, norm: bool = False, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 24, **{"dropout": 0.0, "batch_first": True, **options})
    norm_last = nn.LayerNorm(E) if norm else None
    return built(nn.TransformerEncoder, layer, layers, norm_last, enable_nested_tensor=nested)


def inputs_of(model: nn.Module, kind: type[nn.Module], *args: Any, **kwargs: Any) -> list[tuple[Tensor, ...]]:
    """What each module of a kind is called with in an unobserved call of the model, off the fast path."""
    inputs: list[tuple[Tensor, ...]] = []
    hooks = [m.register_forward_pre_hook(lambda _, a: inputs.append(a)) for m in model.modules() if type(m) is kind]
    model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return inputs


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


# --- beside the other seams ---------------------------------------------------------------------------------


class Own(nn.Module):
    """Attention of somebody's own, by PyTorch's function."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(*x.shape[:2], H, E // H).transpose(1, 2)
        return x + F.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).reshape(x.shape)


class Mixed(nn.Module):
    """The function, PyTorch's encoder, the function again, and a MultiheadAttention: from one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.encoder = Own(), encoder(nested=True)
        self.last = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.encoder(self.first(x), src_key_padding_mask=padding)
        x = Own.forward(self, x)
        return x + self.last(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("padding", [None, padded(T)])
def test_trap09_every_call_of_a_mixed_model_is_seen_once_and_in_order(grad, padding):
    model = built(Mixed)
    with grad(), kernels() as ran:
        recording = recorded(model, randn(B, T, E), padding)
    assert recording.paths == ["first", "encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "", "last"]
    assert len(ran) == 6 * (grad is not torch.enable_grad)
    assert recording.layers == [0, 1, 2, 3, 4]
    with record(model, layers=[2]) as one, grad():
        model(randn(B, T, E), padding)
    assert one.paths == ["encoder.layers.1.self_attn"]
    assert torch.equal(one[0].to_dense(), recording[2].to_dense())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_hugging_face_model_and_a_multihead_attention_in_one_model(implementation):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=E, n_head=H, vocab_size=20, n_positions=T)
    config._attn_implementation = implementation

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.pool = transformers.GPT2Model(config), nn.MultiheadAttention(E, H, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.gpt(ids).last_hidden_state
            return self.pool(x[:, -1:], x, x)[0]

    with torch.no_grad():
        recording = recorded(Both().eval(), torch.arange(T)[None])
    assert recording.paths == ["gpt.h.0.attn", "gpt.h.1.attn", "pool"]
    assert recording[2].shape == (1, H, 1, T)


class Pool(nn.Module):
    """Attention pooling as OpenAI's CLIP writes it: separate weights, and the function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.c = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        weights = None, bias, None, None, False, 0.0, self.c.weight, self.c.bias
        separate = {f"{name}_proj_weight": getattr(self, name).weight for name in "qkv"}
        x, mask = x.transpose(0, 1), torch.arange(T) > 3
        return F.multi_head_attention_forward(
            x[:1], x, x, E, H, *weights, use_separate_proj_weight=True, attn_mask=mask[None], **separate
        )


def test_a_function_that_is_called_without_its_module_is_seen_too():
    model, x = built(Pool), randn(B, T, E)
    recording = recorded(nn.Sequential(model), x)
    assert recording.paths == ["0"]
    q, k = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (model.q, model.k))
    scores = (q[:, :, :1] @ k.mT / 2).masked_fill(torch.arange(T) > 3, -torch.inf)
    assert close(recording[0].to_dense(), scores.softmax(-1))


def test_a_module_of_somebody_elses_in_a_layer_of_pytorchs_has_its_own_path_and_masks():
    layer = built(nn.TransformerDecoderLayer, E, H, 24, 0.0)
    layer.self_attn, x = built(Pool), randn(T, T, E)
    recording = recorded(layer, x, x, tgt_mask=not_causal())
    assert recording.paths == ["self_attn", "multihead_attn"]
    assert (recording[0].to_dense()[..., 4:] == 0).all()
    assert recording[0].shape == (T, H, 1, T)


class OwnBlock(nn.TransformerEncoderLayer):
    """A subclass with an attention of its own: only off the fast path."""

    def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return Own.forward(self, x)


@pytest.mark.parametrize("grad", GRADS)
def test_an_encoder_layer_with_an_attention_of_its_own(grad):
    model = built(nn.TransformerEncoder, OwnBlock(E, H, 24, 0.0, batch_first=True), 2, enable_nested_tensor=False)
    before = vars(OwnBlock)["_sa_block"]
    with grad():
        recording = recorded(model, randn(B, T, E))
    fast = grad is not torch.enable_grad
    assert recording.paths == [f"layers.{i}" + ".self_attn" * fast for i in range(2)]
    assert vars(OwnBlock)["_sa_block"] is before
    assert recording[0].to_dense()[..., 0, 1:].any() == fast  # its own is causal


def test_a_forward_that_is_called_directly_has_its_modules_path():
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = encoder(layers=1).layers[0]
            self.attn = self.layer.self_attn

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer.forward(x)
            return self.attn.forward(x, x, x)[0]

    model, x = Direct().eval(), randn(B, T, E)
    for grad in GRADS:
        with grad():
            assert recorded(model, x).paths == ["layer.self_attn"] * 2


def test_a_kernel_that_somebody_else_calls_is_an_error_and_not_a_guess():
    class Private(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = built(nn.MultiheadAttention, E, H)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.m.in_proj_weight, self.m.in_proj_bias, self.m.out_proj.weight, self.m.out_proj.bias
            return torch._native_multi_head_attention(x, x, x, E, H, *weights)[0]

    model = Private()
    with (
        torch.no_grad(),
        pytest.raises(RecordingError, match=r"not called by nn\.MultiheadAttention\.forward"),
        record(model),
    ):
        model(randn(B, T, E))


def test_somebody_elses_function_mode_switches_the_fast_path_off_as_without_us():
    class Nothing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, x = built(Mixed), randn(B, T, E)
    with torch.no_grad(), Nothing(), kernels() as ran:
        recording = recorded(model, x, padded(T))
    assert not ran
    assert recording.paths == ["first", "encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "", "last"]


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


# --- nothing is changed, and nothing left behind ------------------------------------------------------------


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("where", ["nowhere", "in the kernel", "while reading", "between layers"])
def test_trap02_everything_is_as_before_after_a_block_and_after_an_exception(touched, monkeypatch, grad, where):
    model = built(Mixed)
    before, modules = touched(), {name: dict(vars(module)) for name, module in model.named_modules()}
    x = randn(B, T, E if where != "in the kernel" else E + 1)
    if where == "while reading":
        monkeypatch.setattr("clearhead.recording.multihead._call", lambda *_: 1 / 0)
    if where == "between layers":
        monkeypatch.setattr(model.encoder.layers[1], "forward", lambda *_, **__: 1 / 0)
        modules = {name: dict(vars(module)) for name, module in model.named_modules()}
    model.first = nn.Identity()
    modules = {name: dict(vars(module)) for name, module in model.named_modules()}
    with grad(), contextlib.ExitStack() as block:
        if where != "nowhere":
            block.enter_context(pytest.raises((ZeroDivisionError, RuntimeError, AssertionError)))
        block.enter_context(record(model))
        model(x, padded(T))
    from clearhead.recording import torch_modules

    assert torch_modules._running.get() is torch_modules._projected.get() is None
    assert touched() == before
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == modules


def test_trap02_nothing_is_alive_after_the_block_but_what_the_recording_holds():
    model, x = encoder(layers=2, nested=True), randn(B, T, E)
    for grad in GRADS:
        with grad(), record(model) as recording:
            model(x, src_key_padding_mask=padded(T))
        assert not any(t.requires_grad for attn in recording for t in (attn.q, attn.k, attn.v))
        assert recording.nbytes == 2 * (3 * x.nbytes + B * T)  # q, k, v and the real tokens of two layers
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("training", [True, False])
def test_detach_false_keeps_the_graph_and_trains(training):
    model, x = encoder(layers=2).train(training), randn(B, T, E)
    with record(model, detach=False) as recording:
        model(x, src_key_padding_mask=padded(T))
    recording[1].entropy().mean().backward()
    for layer in model.layers:
        assert layer.self_attn.in_proj_weight.grad.abs().sum() > 0


def test_trap19_half_precision_and_autocast():
    mha, x = built(nn.MultiheadAttention, E, H, batch_first=True), randn(B, T, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attn = recorded(mha, x, x, x)[0]
    assert attn.q.dtype == torch.bfloat16
    assert (attn.to_dense() - textbook(mha, x, x)).abs().max() <= 0.05
    half = mha.bfloat16()
    for grad in GRADS:
        with grad():
            attn = recorded(half, *[x.bfloat16()] * 3)[0]
        assert attn.to_dense().dtype == torch.float32
        assert (attn.to_dense() - textbook(half, *[x.bfloat16()] * 2)).abs().max() <= 0.05


@pytest.mark.parametrize("shape", [(0, T, E), (1, 1, E), (2, 65, E)])
@pytest.mark.parametrize("grad", GRADS)
def test_trap22_no_batch_one_token_and_odd_lengths(shape, grad):
    model, x = encoder(), randn(*shape)
    with grad():
        recording = recorded(model, x)
    assert [attn.to_dense().shape for attn in recording] == [(shape[0], H, shape[1], shape[1])] * 2
