"""The fourth rung: several heads, side by side."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.maps import SoftmaxMap
from clearhead.nn._shared import check_sizes
from clearhead.nn.causal import CausalAttention

__all__ = ["MultiHeadAttentionWrapper"]


class MultiHeadAttentionWrapper(nn.Module):
    """`num_heads` causal heads of width `d_out`, each with matrices of its own; their outputs side by side.

    The output is num_heads · d_out wide. A head finds one kind of relation; several find several. The next rung does
    the same with one matrix for all heads. Arguments as for `CausalAttention`; `d_out` is the width of one head.

    Raises: ShapeError, DTypeError.

    >>> _ = torch.manual_seed(123)
    >>> layer = MultiHeadAttentionWrapper(d_in=3, d_out=2, context_length=6, dropout=0.0, num_heads=2)
    >>> layer(torch.tensor([[0.43, 0.15, 0.89], [0.55, 0.87, 0.66]]))
    tensor([[-0.4519,  0.2216,  0.4772,  0.1063],
            [-0.5874,  0.0058,  0.5891,  0.3257]], grad_fn=<CatBackward0>)
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        check_sizes(self, num_heads=num_heads)
        heads = [CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)]
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        """The context vectors (…, T, num_heads · d_out) of x (T, d_in) or (B, T, d_in)."""
        return torch.cat([head(x) for head in self.heads], dim=-1)

    def attend(self, x: Tensor) -> tuple[Tensor, SoftmaxMap]:
        """The context vectors, and the weights of all heads (…, H, T, T), before dropout."""
        outs, maps = zip(*(head.attend(x) for head in self.heads), strict=True)  # type: ignore[operator]
        q, k, v = (torch.stack([getattr(attn, name) for attn in maps], dim=-3) for name in "qkv")  # (…, H, T, d_out)
        if x.ndim == 2:
            q, k, v = q[None], k[None], v[None]
        attn = SoftmaxMap(q, k, v=v, mask=masks.causal())
        return torch.cat(outs, dim=-1), attn if x.ndim == 3 else attn[0]
