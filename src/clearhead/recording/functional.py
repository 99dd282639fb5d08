"""The torch function mode, which sees seam 3: calls of `F.scaled_dot_product_attention`, of FlexAttention's operator,
and of clearhead's own kernels.

What is not such a call, but may be a step of attention by hand, it passes to seam 4 (`handwritten.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from clearhead import masks
from clearhead.kernels.output import output
from clearhead.recording.calls import AnyCall, Call, as_heads, as_heads_mask, usual_scale
from clearhead.recording.changing import written
from clearhead.recording.flex import OPERATOR, read_flex
from clearhead.recording.handwritten import STEPS
from clearhead.recording.trail import How, Trail
from clearhead.scores import Bias

__all__ = ["FunctionSeam", "causal_rule", "read"]


class FunctionSeam(TorchFunctionMode):
    """Passes every function of PyTorch through; reports each attention call that succeeded.

    What `see` returns takes the place of what some heads brought.

    Calls of functions that attention may be written by hand with go through seam 4's `Trail`.
    """

    def __init__(self, see: Callable[[AnyCall], dict[int, Tensor]]) -> None:
        super().__init__()
        self._see = see
        self._trail = Trail(see)

    def __exit__(self, *error: Any) -> None:
        self._trail.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        how = _FOLLOWED.get(func)
        if how is None:
            return func(*args, **kwargs)
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling and (isinstance(how, How) or how is read_flex):
            return func(*args, **kwargs)
        if isinstance(how, How):
            return self._trail.follow(func, how, args, kwargs)
        result = func(*args, **kwargs)
        if compiling:
            torch._dynamo.graph_break()  # a compiled function is split here: this call then runs in Python
        call = how(*args, **kwargs)
        brought = self._see(call)
        return _changed(result, call, brought) if brought else result


def _changed(result: Any, call: AnyCall, brought: dict[int, Tensor]) -> Any:
    """The result of an attention function, of FlexAttention's operator a tuple, with some heads changed."""
    if isinstance(result, tuple):
        return _changed(result[0], call, brought), *result[1:]
    width = next(iter(brought.values())).shape[-1]
    return written(result.reshape(*call.shape[:3], width), brought).reshape(result.shape)


def read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """What PyTorch computes for these arguments, as a `Call`; the weights are those before dropout.

    `is_causal` is upper-left, as in PyTorch; a bool mask hides where it is False, a float mask is added.
    """
    if enable_gqa and query.ndim == 3:  # heads come first, and there is no batch
        query, key, value = query[None], key[None], value[None]
    q, k, v = as_heads(query, key, value)
    hiding: list[masks.MaskRule | Tensor] = []
    biases: list[Tensor] = []
    if is_causal:
        hiding.append(causal_rule(q.shape[2], k.shape[2]))
    if attn_mask is not None:
        rule = _causal_bias(attn_mask)
        if rule is not None:
            hiding.append(rule)
        else:
            (biases if attn_mask.is_floating_point() else hiding).append(as_heads_mask(attn_mask, query, key))
    return Call(
        q,
        k,
        v,
        float(usual_scale(q) if scale is None else scale),
        masks=tuple(hiding),
        biases=tuple(biases),
    )


def read_own(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: masks.MaskRule | None,
    bias: Bias | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    tile: tuple[int, int] | None,
) -> Call:
    """What clearhead itself computes for these arguments, with the rules it was given."""
    return Call(
        q,
        k,
        v,
        float(usual_scale(q) if scale is None else scale),
        masks=() if mask is None else (mask,),
        biases=() if bias is None else (bias,),
        softcap=softcap,
    )


# Every function of PyTorch is looked up here once: most are in neither list.
_FOLLOWED: dict[Callable[..., Any], How | Callable[..., AnyCall]] = {
    **STEPS,
    F.scaled_dot_product_attention: read,
    output: read_own,
    OPERATOR: read_flex,
}


def causal_rule(T: int, S: int) -> masks.MaskRule:
    """PyTorch's `is_causal`: upper-left, which for T = S is what everybody calls causal."""
    return masks.causal() if T == S else masks.causal_upper_left()


def _causal_bias(mask: Tensor) -> masks.MaskRule | None:
    """The rule that a `torch.nn.attention.bias.CausalBias` stands for: a tensor subclass without contents."""
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(mask, bias.CausalBias):
        return None
    upper = mask.variant == bias.CausalVariant.UPPER_LEFT
    return masks.causal_upper_left() if upper else masks.causal()
