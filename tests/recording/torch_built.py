"""PyTorch's own attention modules built small, called observed and not, and their weights by the formula."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.recording import Recording, record

__all__ = [
    "GRADS",
    "MASKS",
    "B",
    "E",
    "H",
    "Mixed",
    "Own",
    "S",
    "T",
    "as_float",
    "built",
    "close",
    "encoder",
    "flat",
    "inputs_of",
    "kernels",
    "not_causal",
    "padded",
    "per_head",
    "randn",
    "real",
    "recorded",
    "textbook",
]

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
