"""The rungs of the ladder by name, each with d_in ≠ d_out: a square matrix would hide a transposed one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clearhead.nn import (
    CausalAttention,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    RawSelfAttention,
    SelfAttention,
    SimpleSelfAttention,
)

B, T, D_IN, D_OUT, H = 2, 7, 5, 4, 2
RUNGS: dict[str, Callable[[float], nn.Module]] = {
    "simple": lambda dropout: SimpleSelfAttention(),
    "raw": lambda dropout: RawSelfAttention(D_IN, D_OUT),
    "linear": lambda dropout: SelfAttention(D_IN, D_OUT, qkv_bias=True),
    "causal": lambda dropout: CausalAttention(D_IN, D_OUT, T, dropout, qkv_bias=True),
    "wrapper": lambda dropout: MultiHeadAttentionWrapper(D_IN, D_OUT // H, T, dropout, H, qkv_bias=True),
    "multi-head": lambda dropout: MultiHeadAttention(D_IN, D_OUT, T, dropout, H, qkv_bias=True),
}


def _rung(name: str, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return RUNGS[name](dropout).to(dtype)


def _tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape or (B, T, D_IN), generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.fixture
def rung() -> Callable[..., nn.Module]:
    """``rung(name, dropout=0.0, dtype=torch.float64)``: 5 wide in, 4 wide out, 2 heads, 7 tokens at most."""
    return _rung


@pytest.fixture
def tokens() -> Callable[..., Tensor]:
    """``tokens(*shape, dtype=torch.float64)``: always the same random numbers, (2, 7, 5) by default."""
    return _tokens
