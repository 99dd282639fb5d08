"""Multi-head attention in O(n) time, with a memory of fixed size for generation."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.functional import LinearState, linear_attention
from clearhead.maps import LinearMap
from clearhead.nn._shared import check_heads, check_input, check_sizes

__all__ = ["LinearAttention", "LinearState"]


class LinearAttention(nn.Module):
    """Linear attention of `num_heads` heads, and an output projection: the parameters of `MultiHeadAttention`.

        out_t = φ(q_t)ᵀ Σ_s φ(k_s) v_sᵀ / φ(q_t)ᵀ Σ_s φ(k_s),    φ(x) = elu(x) + 1

    The weights load from and into `MultiHeadAttention`, but the function is another one: train it as it is. Text of any
    length costs O(T) time and no T×T tensor. To generate, under torch.no_grad(), pass one `LinearState` to every call:

        state = LinearState()
        out = layer(tokens, state=state)         # the prompt
        out = layer(token, state=state)          # and each token after it, (B, 1, d_in)

    Raises: ShapeError, DTypeError. Source: Katharopoulos et al. 2020.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> layer, x, state = LinearAttention(d_in=6, d_out=4, num_heads=2), torch.randn(9, 6), LinearState()
    >>> steps = [layer(token, state=state) for token in x.split(1)]
    >>> torch.allclose(torch.cat(steps), layer(x), atol=1e-6), state
    (True, LinearState(9 tokens in 48 B))
    """

    def __init__(
        self, d_in: int, d_out: int, num_heads: int, qkv_bias: bool = False, *, is_causal: bool = True
    ) -> None:
        super().__init__()
        check_sizes(self, d_in=d_in, d_out=d_out, num_heads=num_heads)
        check_heads(self, d_out, num_heads)
        self.num_heads, self.head_dim, self.is_causal = num_heads, d_out // num_heads, is_causal
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)

    def forward(
        self,
        x: Tensor,  # (B, T, d_in) or (T, d_in)
        *,
        padding: Tensor | None = None,  # (B, T), or (T,) for one text: True or 1 where a token is real
        state: LinearState | None = None,
    ) -> Tensor:  # (B, T, d_out)
        """The output; with a state, after all the tokens that it has seen."""
        return self.attend(x, padding=padding, state=state)[0]

    def attend(
        self, x: Tensor, *, padding: Tensor | None = None, state: LinearState | None = None
    ) -> tuple[Tensor, LinearMap]:
        """The output (…, T, d_out), and the weights (…, H, T, T); with a state, those of the tokens at hand."""
        check_input(self, x, self.W_query.in_features)
        if x.ndim == 2:  # one sequence is a batch of one
            out, attn = self.attend(x[None], padding=padding, state=state)
            return out[0], attn[0]
        projections = (self.W_query, self.W_key, self.W_value)
        q, k, v = (W(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for W in projections)
        context, attn = linear_attention(q, k, v, is_causal=self.is_causal, padding=padding, state=state)
        return self.out_proj(context.transpose(1, 2).flatten(2)), attn
