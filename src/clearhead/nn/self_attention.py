"""The second rung: what to look for, what to be found by, and what to tell are learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.maps import SoftmaxMap
from clearhead.nn._shared import check_input, check_sizes

__all__ = ["RawSelfAttention", "SelfAttention"]


class RawSelfAttention(nn.Module):
    """softmax(Q Kᵀ / √d) V with Q = X W_query, K = X W_key, V = X W_value: three bare matrices (d_in, d_out).

    The division by √d_out keeps the spread of the scores, and so the gradient of the softmax, the same for any width.

    Raises: ShapeError, DTypeError. Source: Vaswani et al. 2017, equation 1.

    >>> _ = torch.manual_seed(123)
    >>> layer = RawSelfAttention(d_in=3, d_out=2)
    >>> layer(torch.tensor([[0.43, 0.15, 0.89], [0.55, 0.87, 0.66]]))
    tensor([[0.3062, 0.9517],
            [0.3116, 0.9549]], grad_fn=<MmBackward0>)
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        check_sizes(self, d_in=d_in, d_out=d_out)
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors (…, T, d_out) of x (T, d_in) or (B, T, d_in)."""
        return self.attend(x)[0]

    def attend(self, x: Tensor) -> tuple[Tensor, SoftmaxMap]:
        """The context vectors, and the weights (…, T, T)."""
        check_input(self, x, len(self.W_query))
        q, k, v = x @ self.W_query, x @ self.W_key, x @ self.W_value  # (…, T, d_out)
        scores = q @ k.mT  # (…, T, T)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        return weights @ v, SoftmaxMap(q, k, v=v)


class SelfAttention(nn.Module):
    """The same with `nn.Linear`, which starts from smaller random numbers and may add a bias.

    A linear layer keeps its matrix transposed, (d_out, d_in): `raw.W_query.data = layer.W_query.weight.data.T` makes
    the two equal.

    Raises: ShapeError, DTypeError.

    >>> _ = torch.manual_seed(789)
    >>> layer = SelfAttention(d_in=3, d_out=2)
    >>> layer(torch.tensor([[0.43, 0.15, 0.89], [0.55, 0.87, 0.66]]))
    tensor([[-0.0994,  0.0507],
            [-0.0991,  0.0501]], grad_fn=<MmBackward0>)
    """

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        check_sizes(self, d_in=d_in, d_out=d_out)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors (…, T, d_out) of x (T, d_in) or (B, T, d_in)."""
        return self.attend(x)[0]

    def attend(self, x: Tensor) -> tuple[Tensor, SoftmaxMap]:
        """The context vectors, and the weights (…, T, T)."""
        check_input(self, x, self.W_query.in_features)
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)  # (…, T, d_out)
        scores = q @ k.mT  # (…, T, T)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        return weights @ v, SoftmaxMap(q, k, v=v)
