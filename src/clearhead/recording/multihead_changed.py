"""PyTorch's own attention modules with some heads changed: computed as they are, but for those heads.

Their functions return what the output projection made of all heads. So the columns of its matrix that read a changed
head are set to 0 for the call, and what the head brings instead, times these columns, is added to the result. The
kernel of a whole encoder layer leaves no place for that: there the kernel of its attention is called, and what
follows it in the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.recording.calls import AnyCall, Call
from clearhead.recording.changing import Change, weights_written
from clearhead.recording.wrapping import Function

__all__ = ["Changed", "changed_layer", "changed_native", "changed_python"]

Read: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Call]  # the call that these arguments make
Changed: TypeAlias = Callable[[Change, Function, Read, tuple[Any, ...], dict[str, Any]], tuple[Any, AnyCall]]


def changed_python(
    change: Change, function: Function, read: Read, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor | None], AnyCall]:
    """`F.multi_head_attention_forward(*args, **kwargs)`: (T, B, E) or (T, E), and its weights if asked for."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    averaged, given["average_attn_weights"] = given["average_attn_weights"], False
    projection, heads = given["out_proj_weight"], given["num_heads"]
    given["out_proj_weight"] = _without(projection, change, heads)
    output, weights = function(*bound.args, **bound.kwargs)
    call, brought = change.of(read(bound.args, bound.kwargs))
    added = _added(brought, projection, heads).transpose(0, 1)  # (T, B, E)
    output = output + (added[:, 0] if output.ndim == 2 else added)
    if weights is None:
        return (output, None), call
    given_out = weights_written(weights.reshape(-1, *weights.shape[-3:]), call, change).reshape(weights.shape)
    return (output, given_out.mean(-3) if averaged else given_out), call


def changed_native(
    change: Change, function: Function, read: Read, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor | None], AnyCall]:
    """`torch._native_multi_head_attention`, a fast path: (B, T, E), perhaps nested, and its weights if asked for."""
    heads, _, _, projection, bias, mask, asked, averaged, kind = args[4:]
    call, brought = change.of(read(args, kwargs))
    rest = (_without(projection, change, heads), bias, mask, asked, False, kind)
    output, weights = function(*args[:7], *rest, **kwargs)
    output = output + _like(_added(brought, projection, heads), output)
    if weights is None or not asked:
        return (output, weights), call
    given_out = weights_written(weights, call, change)
    return (output, given_out.mean(1) if averaged else given_out), call


def changed_layer(
    change: Change, function: Function, read: Read, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, AnyCall]:
    """`torch._transformer_encoder_layer_fwd`, a fast path: (B, T, E), perhaps nested. Its steps one by one."""
    src, width, heads, qkv, qkv_bias, projection, bias, gelu, norm_first, eps, *rest = args
    norm, norm_bias, norm2, norm2_bias, up, up_bias, down, down_bias, mask, kind = rest
    call, brought = change.of(read(args, kwargs))

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, norm.shape, norm, norm_bias, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, norm2.shape, norm2, norm2_bias, eps)

    x = norm_1(src) if norm_first else src
    weights = (qkv, qkv_bias, _without(projection, change, heads), bias)
    attended, _ = torch._native_multi_head_attention(x, x, x, width, heads, *weights, mask, False, False, kind)
    x = src + (attended + _like(_added(brought, projection, heads), attended))
    x = x if norm_first else norm_1(x)
    inner = F.linear(norm_2(x) if norm_first else x, up, up_bias)
    x = x + F.linear(F.gelu(inner) if gelu else F.relu(inner), down, down_bias)
    return x if norm_first else norm_2(x), call


def _without(projection: Tensor, change: Change, heads: int) -> Tensor:
    """W_O (E, H · Dv), its columns of the changed heads set to 0."""
    kept = torch.ones(heads, dtype=torch.bool, device=projection.device)
    kept[[head for head in change.heads if head < heads]] = False
    return projection.where(kept.repeat_interleave(projection.shape[1] // heads), 0)


def _added(brought: Mapping[int, Tensor], projection: Tensor, heads: int) -> Tensor:
    """What the changed heads add to the output, (B, T, E)."""
    columns = projection.view(len(projection), heads, -1)  # (E, H, Dv)
    parts = [F.linear(x.to(projection.dtype), columns[:, head]) for head, x in brought.items()]
    return torch.stack(parts).sum(0)


def _like(added: Tensor, output: Tensor) -> Tensor:
    """(B, T, E) as a nested tensor of the sequences' lengths, where the output is one."""
    if not output.is_nested:
        return added
    rows = zip(added, output.unbind(), strict=True)
    return torch.nested.as_nested_tensor([x[: len(own)] for x, own in rows])
