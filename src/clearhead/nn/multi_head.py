"""The last rung: one projection for all heads, split; one fused call; and an output projection."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.functional import scaled_dot_product_attention
from clearhead.maps import SoftmaxMap
from clearhead.nn._shared import IgnoresMask, check_dropout, check_heads, check_input, check_sizes

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(IgnoresMask):
    """Causal attention of `num_heads` heads, each d_out / num_heads wide: Concat(head₁ … head_H) W_O.

    One large matrix computes every head's queries at once: head h has its columns h·D to (h+1)·D. Splitting is a view
    and a transpose, (B, T, H·D) → (B, T, H, D) → (B, H, T, D), and no arithmetic. `out_proj` then mixes what the heads
    found. Arguments as for `CausalAttention`; `d_out` is the width of all heads together.

    Raises: ShapeError (sizes that do not divide, an x of another width or too long), DTypeError.
    Cost: four products, one fused attention; O(T) memory, T×T a head under dropout. Source: Vaswani et al. 2017, § 3.

    >>> import torch
    >>> _ = torch.manual_seed(123)
    >>> layer = MultiHeadAttention(d_in=3, d_out=2, context_length=6, dropout=0.0, num_heads=2)
    >>> layer(torch.tensor([[0.43, 0.15, 0.89], [0.55, 0.87, 0.66]]))
    tensor([[0.3190, 0.4858],
            [0.2943, 0.3897]], grad_fn=<...>)
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        check_sizes(self, d_in=d_in, d_out=d_out, context_length=context_length, num_heads=num_heads)
        check_heads(self, d_out, num_heads)
        check_dropout(self, dropout)
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.context_length, self.dropout = context_length, dropout
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors (…, T, d_out) of x (T, d_in) or (B, T, d_in)."""
        return self.attend(x)[0]

    def attend(self, x: Tensor) -> tuple[Tensor, SoftmaxMap]:
        """The context vectors, and the weights of all heads (…, H, T, T), before dropout."""
        check_input(self, x, self.W_query.in_features, self.context_length)
        if x.ndim == 2:  # one sequence is a batch of one
            out, attn = self.attend(x[None])
            return out[0], attn[0]
        projections = (self.W_query, self.W_key, self.W_value)
        q, k, v = (W(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for W in projections)
        dropout = self.dropout if self.training else 0.0
        context, attn = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, H, T, D)
        return self.out_proj(context.transpose(1, 2).flatten(2)), attn
