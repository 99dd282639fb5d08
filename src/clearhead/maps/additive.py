"""AdditiveMap: the weights of additive attention, where a small network compares query and key.

A[t, s] = exp(e(t, s) - lse[t]),    e(t, s) = score · tanh(q_t + k_s),    lse[t] = ln Σ_s exp(e(t, s))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import DTypeError, ShapeError
from clearhead.kernels import additive, tiles
from clearhead.kernels.grouped import take
from clearhead.maps.paired import Paired
from clearhead.masks import Coverage, MaskRule, as_rule

__all__ = ["AdditiveMap"]


class AdditiveMap(Paired):
    """The weights of additive attention as a lazy operator; no T×S tensor, and never all T·S·A values of tanh.

    Args:
        q: (B, H, T, A), (B, T, A) or (T, A), projected: W s in the paper. k: (B, G, S, A), projected: U h.
        score: (A,), v in the paper: what a match of each feature counts.
        mask: a rule of `clearhead.masks`, or a bool tensor (T, S) or (B, H, T, S), True = may attend.

    Cost of a full pass: O(T·S·A) time, a tanh for each; O(T + S) memory. Source: Bahdanau et al. 2015, section 3.1.

    >>> AdditiveMap(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, 9.0]]), torch.tensor([1.0, 0.0]))[0]
    tensor([0.3183, 0.6817])
    """

    def __init__(
        self,
        q: Tensor,  # (B, H, T, A)
        k: Tensor,  # (B, G, S, A)
        score: Tensor,  # (A,)
        *,
        mask: MaskRule | Tensor | None = None,
    ) -> None:
        super().__init__(q, k, None if mask is None else as_rule(mask), score)
        if score.shape != q.shape[-1:]:
            raise ShapeError(f"AdditiveMap(q={describe(q)}, score={describe(score)}): expected score ({q.shape[-1]},).")
        if score.dtype != q.dtype:
            raise DTypeError(f"AdditiveMap(q={describe(q)}, score={describe(score)}): expected one dtype.")
        self._score = score
        self._lse: Tensor | None = None

    def _weights(self, rows: slice, cols: slice) -> Tensor:
        scores = self._scores(rows, cols)
        whole = scores.numel() and self._is_whole(rows, cols)
        lse = torch.logsumexp(scores, -1) if whole else self._lse_of(rows)
        return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])

    def _keep_batches(self, at: int | Tensor) -> None:
        super()._keep_batches(at)
        self._lse = None if self._lse is None else take(self._lse, 0, at)

    def _keep_heads(self, at: int | Tensor) -> None:
        super()._keep_heads(at)
        self._lse = None if self._lse is None else take(self._lse, 1, at)

    def _scores(self, rows: slice, cols: slice) -> Tensor:
        q, k = self._q[:, :, rows].to(self.dtype), self._k[:, :, cols].to(self.dtype)
        return self._hide(additive.scores(q, k, self._score.to(self.dtype)), rows, cols, -math.inf)

    def _is_whole(self, rows: slice, cols: slice) -> bool:
        """Whether these columns hold every key that these rows may see."""
        outside = (slice(0, cols.start), slice(cols.stop, self.shape[-1]))
        return all(self.block(rows, part) is Coverage.EMPTY for part in outside)

    def _lse_of(self, rows: slice) -> Tensor:
        """lse of some rows, (B, H, t); of all of them once, where no gradient is asked of it."""
        if self._needs_graph():
            return self._logsumexp(rows)
        if self._lse is None:
            self._lse = self._logsumexp(slice(0, self.shape[-2]))
        return self._lse[:, :, rows]

    def _logsumexp(self, rows: slice) -> Tensor:
        nothing = self.like.new_full((*self._q.shape[:2], 0), -math.inf)
        parts = [nothing]
        for part, keys in tiles.row_blocks(self, rows):
            found = [torch.logsumexp(self._scores(part, cols), -1) for cols in keys]
            empty = nothing.new_full((*nothing.shape[:2], part.stop - part.start), -math.inf)
            parts.append(torch.logsumexp(torch.stack([empty, *found]), 0))
        return torch.cat(parts, -1)
