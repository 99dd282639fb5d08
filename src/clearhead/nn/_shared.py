"""What the layers share: arguments checked in one place, and checkpoints with a mask in them that load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._checks import check_all_finite, check_count, describe, has_numbers
from clearhead.errors import DTypeError, ShapeError
from clearhead.scores import Bias


def check_sizes(layer: nn.Module, **sizes: object) -> None:
    """Raise unless every size is an integer of at least 1."""
    for name, value in sizes.items():
        check_count(type(layer).__name__, name, value, at_least=1)


def check_dropout(layer: nn.Module, dropout: object) -> None:
    """Raise unless `dropout` is a probability."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise ShapeError(
            f"{type(layer).__name__}(dropout={dropout!r}): expected a number from 0 to 1, the share of weights to drop."
        )


def check_heads(layer: nn.Module, width: int, num_heads: int, name: str = "d_out") -> None:
    """Raise unless the width divides into heads."""
    if width % num_heads:
        raise ShapeError(
            f"{type(layer).__name__}({name}={width}, num_heads={num_heads}): {num_heads} heads do not divide a width of"
            f" {width}; the nearest that they divide is {name}={max(1, round(width / num_heads)) * num_heads}."
        )


def check_input(
    layer: nn.Module,
    x: object,
    width: int | None = None,
    context_length: int | None = None,
    *,
    name: str = "x",
    finite: bool = True,
) -> None:
    """Raise unless `x` is a float tensor (T, width) or (B, T, width) on the layer's device, in its dtype, not too long.

    Any width will do if none is given. Under autocast PyTorch converts the dtype itself. That all numbers are `finite`
    is asked where there are numbers yet: not while torch.compile or torch.export trace.
    """
    arrived = f"{type(layer).__name__} got {name} = {describe(x)}"
    shape = "d" if width is None else str(width)
    if not isinstance(x, Tensor):
        raise DTypeError(f"{arrived}: expected a torch tensor (T, {shape}) or (B, T, {shape}); use torch.as_tensor(x).")
    if x.is_nested or x.layout != torch.strided:
        raise DTypeError(f"{arrived}, nested or sparse: expected an ordinary tensor; pad it, or use to_dense().")
    if not x.is_floating_point():
        hint = "embed token ids first (nn.Embedding)" if x.ndim < 3 else "convert with .float()"
        raise DTypeError(f"{arrived}: expected floating-point features; {hint}.")
    if x.ndim not in (2, 3):
        raise ShapeError(f"{arrived}: expected (T, {shape}) or (B, T, {shape}), tokens before features.")
    if width is not None and x.shape[-1] != width:
        raise ShapeError(f"{arrived}: the layer was made for a width of {width}, its last dimension must be that.")
    if context_length is not None and x.shape[-2] > context_length:
        raise ShapeError(
            f"{arrived}: {x.shape[-2]} tokens are more than context_length={context_length}. Pass at most that many,"
            f" {name}[..., -{context_length}:, :], or make the layer with a longer context."
        )
    _check_kind(arrived, x, next(layer.parameters(), x))
    if finite and has_numbers(x):
        check_all_finite(type(layer).__name__, **{name: x})


def _check_kind(arrived: str, x: Tensor, weight: Tensor) -> None:
    if x.device != weight.device:
        raise DTypeError(f"{arrived} on {x.device}, but its weights are on {weight.device}: use .to({weight.device}).")
    known = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # the meta device has no autocast
    autocast = known and torch.float64 not in (x.dtype, weight.dtype)
    if x.dtype != weight.dtype and weight.is_floating_point() and not autocast:
        raise DTypeError(f"{arrived}, but its weights are {weight.dtype}: convert with .to({weight.dtype}).")


class IgnoresMask(nn.Module):
    """A module that makes its mask when it is called, and loads checkpoints of designs that keep one as a buffer."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.pop(f"{prefix}mask", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ScoreBias(nn.Module):
    """A bias whose learned tensors (nn.Parameter) are the layer's: trained, saved and moved with it."""

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self._bias = bias
        for name, tensor in _learned(bias):
            self.register_parameter(name, tensor)

    def forward(self) -> Bias:
        """The bias, with the parameters as they are now."""
        return _replaced(self._bias, dict(self._parameters))

    def extra_repr(self) -> str:
        """The bias."""
        return repr(self._bias)


def _learned(bias: Bias, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    for name, value in vars(bias).items():
        if isinstance(value, nn.Parameter):
            yield prefix + name, value
        elif isinstance(value, Bias):
            yield from _learned(value, f"{prefix}{name}_")


def _replaced(bias: Bias, tensors: dict[str, Tensor | None], prefix: str = "") -> Bias:
    parts = {name: value for name, value in vars(bias).items() if isinstance(value, Bias)}
    changed: dict[str, Any] = {name: _replaced(part, tensors, f"{prefix}{name}_") for name, part in parts.items()}
    changed |= {name: tensors[prefix + name] for name in vars(bias) if prefix + name in tensors}
    return replace(bias, **changed) if changed else bias  # type: ignore[type-var]
