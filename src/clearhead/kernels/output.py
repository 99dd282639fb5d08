"""Which kernel computes the output of attention: PyTorch's fused one wherever it can, tiles for soft-capped scores.

Every call that clearhead itself makes of an attention with rules comes through here, so a recorder sees it once, with
the rules it was made with, and not as the many small calls of PyTorch's function behind it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from clearhead.kernels import flash, fused
from clearhead.masks import BoundMask, MaskRule, causal, first_tokens
from clearhead.scores import Bias


def output(
    q: Tensor,  # (B, H, T, D)
    k: Tensor,  # (B, G, S, D)
    v: Tensor,  # (B, G, S, Dv)
    *,
    mask: MaskRule | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    tile: tuple[int, int] | None = None,
) -> Tensor:  # (B, H, T, Dv)
    """softmax(softcap(scale · Q Kᵀ) + bias, masked) V, over tiles if `tile` says so; a row that sees nothing is 0."""
    if has_torch_function((q, k, v)):
        how: dict[str, Any] = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap}
        return handle_torch_function(output, (q, k, v), q, k, v, **how, dropout_p=dropout_p, tile=tile)
    T, S = q.shape[2], k.shape[2]
    if softcap is not None or tile is not None:
        tile = flash.TILE if tile is None else tile
        return flash.attention(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, tile=tile)[0]
    if mask == causal() and T == 1:
        mask = None  # the newest token sees all
    if bias is None and (mask is None or (mask == causal() and T == S)):
        grouped, is_causal = bool(q.shape[1] != k.shape[1]), mask is not None  # bool: torch.jit.trace counts in tensors
        return F.scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    bound = BoundMask(first_tokens(S) if mask is None else mask, T, S)  # with a bias alone, every key is visible
    return fused.attention(q, k, v, bound, bias=bias, scale=scale, dropout_p=dropout_p)
