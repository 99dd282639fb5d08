"""Weights carried between layers of different make: `nn.MultiheadAttention`, the two layouts of rotary embedding."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clearhead._checks import describe
from clearhead.errors import DTypeError, ShapeError
from clearhead.scores import Rotary, rotary_order

if TYPE_CHECKING:
    from clearhead.nn.attention import Attention

__all__ = ["arguments", "convert_rotary", "to_torch", "weights"]


def arguments(module: nn.MultiheadAttention, *, cross: bool) -> dict[str, Any]:
    """The constructor arguments of the `Attention` that computes what `module` does."""
    if not isinstance(module, nn.MultiheadAttention):
        raise DTypeError(f"Attention.from_torch(module): expected an nn.MultiheadAttention, got {describe(module)}.")
    if module.bias_k is not None or module.add_zero_attn:
        raise ShapeError("Attention.from_torch: add_bias_kv and add_zero_attn append a key that is no token: not done.")
    if module.kdim != module.vdim:
        raise ShapeError(
            f"Attention.from_torch: keys and values come from one context, so kdim={module.kdim} and"
            f" vdim={module.vdim} must be equal."
        )
    biased = "in_proj_bias" in module.state_dict()
    return {
        "d_in": module.embed_dim,
        "d_out": module.embed_dim,
        "dropout": module.dropout,
        "num_heads": module.num_heads,
        "qkv_bias": biased,
        "out_bias": biased,
        "d_context": module.kdim if cross or module.kdim != module.embed_dim else None,
        "is_causal": False,
    }


def weights(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """The state dict for that `Attention`."""
    state, names = module.state_dict(), ("W_query", "W_key", "W_value")
    packed = "in_proj_weight" in state  # or, where keys have a width of their own, three matrices
    three = state.pop("in_proj_weight").chunk(3) if packed else [state.pop(f"{n}_proj_weight") for n in "qkv"]
    state |= {f"{name}.weight": weight for name, weight in zip(names, three, strict=True)}
    if "in_proj_bias" in state:
        three = state.pop("in_proj_bias").chunk(3)
        state |= {f"{name}.bias": bias for name, bias in zip(names, three, strict=True)}
    return state


def to_torch(layer: Attention) -> nn.MultiheadAttention:
    """An `nn.MultiheadAttention` (batch first) with the layer's weights."""
    _check_plain(layer)
    biased = _has_bias(layer.W_query) or _has_bias(layer.out_proj)
    module = nn.MultiheadAttention(
        layer.d_out,
        layer.num_heads,
        dropout=layer.dropout,
        bias=biased,
        kdim=layer.d_context,
        vdim=layer.d_context,
        batch_first=True,
    )
    projections = (layer.W_query, layer.W_key, layer.W_value)
    state = {"out_proj.weight": layer.out_proj.weight}
    if "in_proj_weight" in module.state_dict():
        state["in_proj_weight"] = torch.cat([p.weight for p in projections])
    else:
        state |= {f"{n}_proj_weight": p.weight for n, p in zip("qkv", projections, strict=True)}
    if biased:  # one flag there for all four: a bias that the layer does without is 0
        state["in_proj_bias"] = torch.cat([_bias(p) for p in projections])
        state["out_proj.bias"] = _bias(layer.out_proj)
    module.load_state_dict(state)
    return module.to(layer.out_proj.weight).train(layer.training)


def _has_bias(linear: nn.Linear) -> bool:
    return linear.bias is not None


def _bias(linear: nn.Linear) -> Tensor:
    return linear.bias if _has_bias(linear) else linear.weight.new_zeros(linear.out_features)


def _check_plain(layer: Attention) -> None:
    beyond = {
        f"d_in={layer.d_in} other than d_out={layer.d_out}": layer.d_in != layer.d_out,
        f"num_kv_heads={layer.num_kv_heads}": layer.num_kv_heads != layer.num_heads,
        "a window": layer.window is not None,
        "rotary embedding": layer.rotary is not None,
        "a bias on the scores": layer.bias is not None,
        "soft-capping": layer.softcap is not None,
        "a scale of its own": layer.scale is not None,
        "normalised queries and keys": layer.q_norm is not None,
    }
    found = [what for what, there in beyond.items() if there]
    if found:
        raise ShapeError(f"Attention.to_torch(): nn.MultiheadAttention has no {', no '.join(found)}.")


def convert_rotary(layer: Attention, *, interleaved: bool) -> Attention:
    """A copy of the layer in the other layout of rotary embedding, with the same output.

    Rows of W_query and W_key (and of their norms) are put in the order that the layout pairs them; a layer that has
    that layout already is just copied. Needed where weights trained in one layout go into code for the other.
    """
    if not isinstance(getattr(layer, "rotary", None), Rotary) or layer.rotary is None:
        raise ShapeError("convert_rotary(layer): expected an Attention with rotary embedding.")
    converted = copy.deepcopy(layer)
    if layer.rotary.interleaved == interleaved:
        return converted
    converted.rotary = replace(layer.rotary, interleaved=interleaved)
    dim, width = layer.rotary.dim, layer.head_dim
    order = torch.cat([rotary_order(dim, interleaved=interleaved), torch.arange(dim, width)])
    with torch.no_grad():
        for linear in (converted.W_query, converted.W_key):
            for tensor in (linear.weight, linear.bias):
                if tensor is not None:
                    tensor.copy_(tensor.view(-1, width, *tensor.shape[1:])[:, order].flatten(0, 1))
        for norm in (converted.q_norm, converted.k_norm):
            if norm is not None:
                norm.weight.copy_(norm.weight[order])
    return converted
