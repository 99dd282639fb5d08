"""The first rung: attention without anything to learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.maps import SoftmaxMap
from clearhead.nn._shared import check_input

__all__ = ["SimpleSelfAttention"]


class SimpleSelfAttention(nn.Module):
    """Every token becomes an average of all tokens, weighted by how alike they are: softmax(X Xᵀ) X.

    The score of two tokens is their dot product: multiply entry by entry, and add up. One matrix product gives the
    scores of all pairs at once. The softmax over a row makes its scores positive and add up to 1.

    Cost: O(T² d) time, O(T²) memory; so do all rungs but the last.

    >>> x = torch.eye(2)  # two tokens that have nothing in common: each keeps e / (e + 1) for itself
    >>> SimpleSelfAttention()(x)
    tensor([[0.7311, 0.2689],
            [0.2689, 0.7311]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors of x (T, d) or (B, T, d), of the same shape."""
        return self.attend(x)[0]

    def attend(self, x: Tensor) -> tuple[Tensor, SoftmaxMap]:
        """The context vectors, and the weights (…, T, T)."""
        check_input(self, x)
        scores = x @ x.mT  # (…, T, T)
        weights = torch.softmax(scores, dim=-1)  # each row adds up to 1
        return weights @ x, SoftmaxMap(x, x, v=x, scale=1.0)
