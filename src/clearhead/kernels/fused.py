"""PyTorch's fused attention, run under a mask rule without a T×S mask.

The kernel is called once per block of queries over the runs of keys that the block may see; only blocks that the
rule leaves partly visible get a small mask. A window of 1,024 keys at 16,384 tokens thus costs 1,024 keys a query and
no mask of 268 million entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.kernels import tiles
from clearhead.maps.softmax import SoftmaxMap
from clearhead.masks import Coverage, block_indices

ROWS = 512  # queries a call: enough to keep the kernel busy, few enough that a block's mask is small
MASK_ELEMENTS = 1 << 23  # and never a block mask of more than 8 MB


def attention(attn: SoftmaxMap, dropout_p: float = 0.0) -> Tensor:
    """softmax(...) V of a map made with v, (…, T, Dv): the fused kernel, block of queries by block of queries."""
    q, k, v = attn._q, attn._k, attn._v
    if v is None:
        raise ValueError("fused.attention needs a map made with v=.")
    height = max(1, min(ROWS, MASK_ELEMENTS // max(1, k.shape[2])))
    parts = [_rows(attn, v, rows, dropout_p) for rows in tiles.split(slice(0, q.shape[2]), height)]
    out = torch.cat(parts, 2) if parts else q.new_zeros(*q.shape[:3], v.shape[-1])
    return out.reshape(*attn.shape[:-1], v.shape[-1])


def _rows(attn: SoftmaxMap, v: Tensor, rows: slice, dropout_p: float) -> Tensor:
    """The output of some queries, (B, H, t, Dv); 0 where they may attend to nothing."""
    q, S = attn._q[:, :, rows], v.shape[2]
    runs = tiles.visible_runs(attn, rows, slice(0, S))
    if not runs:
        return (q.sum(-1, keepdim=True) * 0).nan_to_num().expand(*q.shape[:3], v.shape[-1]).to(v.dtype)
    k, v = (torch.cat([t[:, :, run] for run in runs], 2) if len(runs) > 1 else t[:, :, runs[0]] for t in (attn._k, v))
    mask = _mask(attn, rows, runs)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=attn.scale, enable_gqa=grouped)


def _mask(attn: SoftmaxMap, rows: slice, runs: list[slice]) -> Tensor | None:
    """The small mask of one block of queries over its visible runs, or None where they see all of it."""
    if attn.bias is None and all(attn.block(rows, run) is Coverage.FULL for run in runs):
        return None
    parts = [_block_mask(attn, rows, run) for run in runs]
    B, H = (max(p.shape[dim] for p in parts) for dim in (0, 1))
    return torch.cat([p.expand(B, H, -1, -1) for p in parts], -1)


def _block_mask(attn: SoftmaxMap, rows: slice, run: slice) -> Tensor:
    """Bool where there is a mask alone; with a bias its values, -inf where the mask hides, in q's dtype."""
    T, S = attn.shape[-2:]
    seen = None if attn.mask is None else attn.mask.bind(T, S).tile(rows, run, attn._b, attn._h)
    if attn.bias is None:
        assert seen is not None, "a block without mask and bias is FULL"
        return seen
    bias = attn.bias.values(*block_indices(rows, run, attn._b, attn._h), T, S).to(attn._q.dtype)
    bias = bias.expand(*bias.shape[:2], rows.stop - rows.start, run.stop - run.start)
    return bias if seen is None else torch.where(seen, bias, -torch.inf)
