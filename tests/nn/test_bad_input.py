"""Bad input: an error that names what arrived, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clearhead import DTypeError, ShapeError
from clearhead.nn import (
    CausalAttention,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    RawSelfAttention,
    SelfAttention,
    SimpleSelfAttention,
)

Rung, Tokens = Callable[..., nn.Module], Callable[..., Tensor]
EVERY = ("simple", "raw", "linear", "causal", "wrapper", "multi-head")
CONSTRUCTORS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "raw": (RawSelfAttention, {"d_in": 3, "d_out": 2}),
    "linear": (SelfAttention, {"d_in": 3, "d_out": 2}),
    "causal": (CausalAttention, {"d_in": 3, "d_out": 2, "context_length": 6, "dropout": 0.0}),
    "wrapper": (
        MultiHeadAttentionWrapper,
        {"d_in": 3, "d_out": 2, "context_length": 6, "dropout": 0.0, "num_heads": 2},
    ),
    "multi-head": (MultiHeadAttention, {"d_in": 3, "d_out": 2, "context_length": 6, "dropout": 0.0, "num_heads": 2}),
}
BAD_SIZES = [(name, size) for name, (_, arguments) in CONSTRUCTORS.items() for size in arguments if size != "dropout"]


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "8"])
@pytest.mark.parametrize(("name", "size"), BAD_SIZES)
def test_sizes_are_positive_integers(name: str, size: str, value: object) -> None:
    make, arguments = CONSTRUCTORS[name]
    with pytest.raises(ShapeError, match=rf"Attention\w*\({size}={value!r}\): expected an integer >= 1"):
        make(**arguments | {size: value})


@pytest.mark.parametrize("value", [-0.1, 1.5, 50, float("nan"), True, None, "0.1"])
@pytest.mark.parametrize("name", ["causal", "wrapper", "multi-head"])
def test_dropout_is_a_share(name: str, value: object) -> None:
    make, arguments = CONSTRUCTORS[name]
    with pytest.raises(ShapeError, match=rf"\(dropout={value!r}\): expected a number from 0 to 1"):
        make(**arguments | {"dropout": value})


@pytest.mark.parametrize(("d_out", "heads", "near"), [(10, 3, 9), (11, 4, 12), (2, 4, 4)])
def test_requirement_25_indivisible_sizes_name_the_nearest_that_fits(d_out: int, heads: int, near: int) -> None:
    with pytest.raises(ShapeError, match=rf"\(d_out={d_out}, num_heads={heads}\).*nearest.*is d_out={near}"):
        MultiHeadAttention(3, d_out, 6, 0.0, heads)


@pytest.mark.parametrize("name", EVERY)
def test_rank(rung: Rung, name: str) -> None:
    for shape in ((5,), (1, 2, 7, 5), ()):
        with pytest.raises(ShapeError, match=r"got x = a float64 tensor of shape .*expected \(T, .\) or \(B, T, .\)"):
            rung(name)(torch.ones(shape).double())


@pytest.mark.parametrize("name", EVERY[1:])
def test_width(rung: Rung, name: str) -> None:
    with pytest.raises(ShapeError, match=r"of shape \(2, 7, 4\): the layer was made for a width of 5"):
        rung(name)(torch.ones(2, 7, 4).double())
    with pytest.raises(ShapeError, match="width of 5"):
        rung(name).attend(torch.ones(2, 5, 7).double())  # features and tokens changed places


@pytest.mark.parametrize("name", ["causal", "wrapper", "multi-head"])
def test_the_context_length_is_enforced(rung: Rung, name: str) -> None:
    with pytest.raises(ShapeError, match=r"8 tokens are more than context_length=7.*x\[..., -7:, :\]"):
        rung(name)(torch.ones(2, 8, 5).double())
    with pytest.raises(ShapeError, match="8 tokens are more"):
        rung(name).attend(torch.ones(8, 5).double())


@pytest.mark.parametrize("name", EVERY)
def test_what_is_no_float_tensor(rung: Rung, name: str) -> None:
    layer = rung(name)
    for x, remedy in (
        (np.ones((7, 5)), r"x = ndarray of shape \(7, 5\).*use torch.as_tensor"),
        ([[1.0] * 5] * 7, r"x = list: expected a torch tensor"),
        (None, r"x = NoneType"),
        (torch.ones(7, 5).long(), r"x = a int64 tensor of shape \(7, 5\).*nn.Embedding"),
        (torch.ones(2, 7, 5).bool(), r"expected floating-point features; convert with .float\(\)"),
        (torch.ones(7, 5).cfloat(), r"x = a complex64 tensor"),
    ):
        with pytest.raises(DTypeError, match=remedy):
            layer(x)


@pytest.mark.parametrize("name", EVERY[1:])
def test_another_dtype_or_device(rung: Rung, name: str) -> None:
    with pytest.raises(DTypeError, match=r"float32 tensor.*weights are torch.float64: convert with .to"):
        rung(name)(torch.ones(7, 5))
    with pytest.raises(DTypeError, match=r"on meta, but its weights are on cpu: use .to\(cpu\)"):
        rung(name)(torch.ones(7, 5, device="meta").double())


def test_no_features() -> None:
    with pytest.raises(ShapeError, match="no features"):
        SimpleSelfAttention()(torch.ones(3, 0))


@pytest.mark.parametrize("name", EVERY)
def test_nan_is_named_with_its_place(rung: Rung, tokens: Tokens, name: str) -> None:
    x = tokens()
    x[1, 3, 2] = float("nan")
    with pytest.raises(DTypeError, match=r"holds 1 numbers that are NaN or infinite, the first at \[1, 3, 2\]"):
        rung(name)(x)
