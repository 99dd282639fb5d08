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
    """A mask (T, T), True = hidden, that leaves each query itself, and is no causal one."""
    return (randn(T, T, seed=3) > 0.5) & ~torch.eye(T, dtype=torch.bool)


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
@pytest.mark.parametrize("mask", ["none", "bool", "added per head"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_learned_and_zero_keys_are_the_last_keys(extra, mask, need_weights):
    mha, x = built(nn.MultiheadAttention, E, H, batch_first=True, **dict.fromkeys(extra, True)), randn(B, T, E)
    padding = as_float(padded(T)) if mask == "added per head" else padded(T)
    masks = {"attn_mask": MASKS[mask], "key_padding_mask": padding}
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
    """What each module of a kind is called with in an unobserved call of the model on the slow path."""
    inputs: list[tuple[Tensor, ...]] = []
    hooks = [m.register_forward_pre_hook(lambda _, a: inputs.append(a)) for m in model.modules() if type(m) is kind]
    model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return inputs


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("mask", ["none", "bool", "causal", "bool per head", "-inf"])
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_first": True}, {"batch_first": False}, {"bias": False}, {"activation": "gelu"}, {"activation": F.silu}],
    ids=str,
)
def test_trap09_an_encoder_gives_every_layer_with_its_fast_path_on(grad, mask, pads, options):
    model, mask = encoder(**options), MASKS[mask]
    x, first = randn(B, T, E), options.get("batch_first", True)
    masks = {"mask": mask, "src_key_padding_mask": padded(T) if pads else None}
    if mask is not None and mask.is_floating_point() and pads:
        masks["src_key_padding_mask"] = as_float(padded(T))
    x = x if first else x.transpose(0, 1)
    with grad(), kernels() as ran:
        recording = recorded(model, x, **masks)
    fast = grad is not torch.enable_grad and not {"batch_first", "bias"} & set(options) and options != {"activation": F.silu}
    assert ran.count("_transformer_encoder_layer_fwd") == 4 * fast
    assert recording.paths == ["layers.0.self_attn", "layers.1.self_attn"]
    for attn, layer, inputs in zip(
        recording, model.layers, inputs_of(model, nn.MultiheadAttention, x, **masks), strict=True
    ):
        inputs = inputs[0] if first else inputs[0].transpose(0, 1)
        hidden = torch.zeros(1, 1, T, T, dtype=torch.bool)
        if mask is not None:
            hidden = hidden | (mask != 0).view(-1, H if mask.ndim == 3 else 1, T, T)
        if pads:
            hidden = hidden | padded(T)[:, None, None]
        seen = real(T) if pads else torch.ones(1)
        assert close((attn.to_dense() * seen)[:1], textbook(layer.self_attn, inputs, inputs, hidden)[:1] * seen[:1])
