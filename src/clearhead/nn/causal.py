"""The third rung: no looking ahead, and dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.maps import SoftmaxMap
from clearhead.nn._shared import IgnoresMask, check_dropout, check_input, check_sizes

__all__ = ["CausalAttention"]


class CausalAttention(IgnoresMask):
    """Self-attention in which a token sees itself and what came before: scores of later tokens are −∞, weights 0.

    The mask comes before the softmax: so every row still adds up to 1, and nothing of the future is in that sum.
    In training, dropout sets a share `dropout` of the weights to 0 and multiplies the others by 1 / (1 - dropout); the
    weights that `attend` reports are those before it.

    Args:
        d_in, d_out: width of the input and of the output
        context_length: the most tokens that x may have; the mask is made for as many as it has, so it costs nothing
        dropout: from 0 to 1
        qkv_bias: whether the three projections add a bias

    Raises: ShapeError, DTypeError.

    >>> _ = torch.manual_seed(123)
    >>> layer = CausalAttention(d_in=3, d_out=2, context_length=6, dropout=0.0)
    >>> out, attn = layer.attend(torch.tensor([[0.43, 0.15, 0.89], [0.55, 0.87, 0.66]]))
    >>> out
    tensor([[-0.4519,  0.2216],
            [-0.5874,  0.0058]], grad_fn=<MmBackward0>)
    >>> attn[0].tolist()  # the first token has only itself
    [1.0, 0.0]
    """

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__()
        check_sizes(self, d_in=d_in, d_out=d_out, context_length=context_length)
        check_dropout(self, dropout)
        self.context_length, self.dropout = context_length, dropout
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors (…, T, d_out) of x (T, d_in) or (B, T, d_in)."""
        return self.attend(x)[0]

    def attend(self, x: Tensor) -> tuple[Tensor, SoftmaxMap]:
        """The context vectors, and the weights (…, T, T), before dropout."""
        check_input(self, x, self.W_query.in_features, self.context_length)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)  # (…, T, d_out)
        scores = q @ k.mT  # (…, T, T)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)  # key after query
        scores = scores.masked_fill(later, -math.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return weights @ v, SoftmaxMap(q, k, v=v, mask=masks.causal())
