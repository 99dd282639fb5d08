"""PyTorch's fused attention, run under a mask rule without a T×S mask.

The kernel is called once per block of queries over the runs of keys that the block may see; only blocks that the
rule leaves partly visible get a small mask. A window of 1,024 keys at 16,384 tokens thus costs 1,024 keys a query and
no mask of 268 million entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.kernels import tiles
from clearhead.masks import BoundMask, Coverage, block_indices
from clearhead.scores import Bias

ROWS = 512  # queries a call: enough to keep the kernel busy, few enough that a block's mask is small
MASK_ELEMENTS = 1 << 23  # and never a block mask of more: 32 MB, since PyTorch makes floats of bools


def attention(
    q: Tensor,  # (B, H, T, D)
    k: Tensor,  # (B, G, S, D)
    v: Tensor,  # (B, G, S, Dv)
    mask: BoundMask,
    *,
    bias: Bias | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:  # (B, H, T, Dv)
    """softmax(scale · Q Kᵀ + bias, masked) V, block of queries by block of queries; 0 where nothing may be seen."""
    hidden = _Hidden(mask, bias, q)
    height = max(1, min(ROWS, MASK_ELEMENTS // max(1, k.shape[2] * hidden.copies)))
    parts = []
    for rows in tiles.split(slice(0, q.shape[2]), height):
        runs = tiles.visible_runs(mask, rows, slice(0, k.shape[2]))
        if not runs:
            parts.append(_nothing(q[:, :, rows], k, v))
            continue
        some_k, some_v, within = side_by_side(k, runs), side_by_side(v, runs), hidden.block(rows, runs)
        parts.append(
            F.scaled_dot_product_attention(
                q[:, :, rows], some_k, some_v, within, dropout_p, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(parts, 2) if parts else q.new_zeros(*q.shape[:3], v.shape[-1])


def side_by_side(tensor: Tensor, runs: list[slice]) -> Tensor:
    """The keys of some runs, (B, G, s, D); of one run a view."""
    parts = [tensor[:, :, run] for run in runs]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of queries that may attend to nothing: 0, and on the graph: all gradients are 0, not None."""
    zero = (q.sum(-1, keepdim=True) * 0).nan_to_num() + (k.sum() * 0 + v.sum() * 0).nan_to_num()
    return zero.expand(*q.shape[:3], v.shape[-1])


@dataclass(frozen=True)
class _Hidden:
    """What hides or moves the scores of a block, as the small tensor that PyTorch's function takes."""

    mask: BoundMask
    bias: Bias | None
    q: Tensor

    @property
    def copies(self) -> int:
        """How many (batch entry, head) pairs may have a mask of their own: a tensor in it may differ between texts."""
        rules = [self.mask.rule] + ([] if self.bias is None else [self.bias])
        texts = self.q.shape[0] if any(next(rule.tensors(), None) is not None for rule in rules) else 1
        return texts * (self.q.shape[1] if any(rule.per_head for rule in rules) else 1)

    def block(self, rows: slice, runs: list[slice]) -> Tensor | None:
        """The runs side by side, (B or 1, H or 1, t, s); None where the queries see all of them, unmoved."""
        if self.bias is None and all(self.mask.block(rows, run) is Coverage.FULL for run in runs):
            return None
        parts = [self._run(rows, run) for run in runs]
        B, H = (max(part.shape[dim] for part in parts) for dim in (0, 1))
        return torch.cat([part.expand(B, H, -1, -1) for part in parts], -1)

    @property
    def _bias_dtype(self) -> torch.dtype:
        """float32 or wider where the kernel takes it beside half-precision queries: 70,000 is infinite in float16."""
        return torch.promote_types(self.q.dtype, torch.float32) if self.q.device.type == "cpu" else self.q.dtype

    def _run(self, rows: slice, run: slice) -> Tensor:
        """Bool where there is a mask alone; with a bias its values, -inf where the mask hides."""
        batches, heads = (torch.arange(n, device=self.q.device) for n in self.q.shape[:2])
        seen = self.mask.tile(rows, run, batches, heads)
        if self.bias is None:
            return seen
        at = block_indices(rows, run, batches, heads)
        bias = self.bias.values(*at, self.mask.T, self.mask.S).to(self._bias_dtype)
        return torch.where(seen, bias, -torch.inf)
