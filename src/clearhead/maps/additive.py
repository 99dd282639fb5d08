"""AdditiveMap: the weights of additive attention, where a small network compares query and key.

A[t, s] = exp(e(t, s) - lse[t]),    e(t, s) = score · tanh(q_t + k_s),    lse[t] = ln Σ_s exp(e(t, s))
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from clearhead._checks import check_floats, check_qkv, describe
from clearhead.errors import DTypeError, ShapeError
from clearhead.kernels import additive
from clearhead.maps.scored import Scored
from clearhead.masks import MaskRule

__all__ = ["AdditiveMap"]


class AdditiveMap(Scored):
    """The weights of additive attention as a lazy operator; no T×S tensor, and never all T·S·A values of tanh.

    Args:
        q: (B, H, T, A), (B, T, A) or (T, A), projected: W s in the paper. k: (B, G, S, A), projected: U h.
        score: (A,), v in the paper: what a match of each feature counts.
        mask: a rule of `clearhead.masks`, or a bool tensor (T, S) or (B, H, T, S), True = may attend.

    Cost of a full pass: O(T·S·A) time, a tanh for each; O(T + S) memory. Source: Bahdanau et al. 2015, section 3.1.

    >>> import torch
    >>> AdditiveMap(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, 9.0]]), torch.tensor([1.0, 0.0]))[0]
    tensor([0.3183, 0.6817])
    """

    _leaves: ClassVar[tuple[str, ...]] = (*Scored._leaves, "_score")

    def __init__(
        self,
        q: Tensor,  # (B, H, T, A)
        k: Tensor,  # (B, G, S, A)
        score: Tensor,  # (A,)
        *,
        mask: MaskRule | Tensor | None = None,
    ) -> None:
        check_qkv("AdditiveMap", q, k)
        check_score("AdditiveMap", q, score)
        super().__init__(q, k, mask, score=[score])
        self._score = score

    def uniform(self) -> AdditiveMap:
        even = super().uniform()
        even._score = torch.zeros_like(self._score[:1])
        return even

    def _scores(self, rows: slice, cols: slice | Tensor) -> Tensor:
        self._check_unchanged()
        q, k = self._q[:, :, rows].to(self.dtype), self._k[:, :, cols].to(self.dtype)
        return self._hide(additive.scores(q, k, self._score[:].to(self.dtype)), rows, cols, -math.inf)


def check_score(call: str, q: Tensor, score: Tensor) -> None:
    """Raise unless `score` is a vector (A,) for the features of q."""
    check_floats(call, q.device, score=score)
    arrived = f"{call}(q={describe(q)}, score={describe(score)})"
    if score.shape != q.shape[-1:]:
        raise ShapeError(f"{arrived}: expected score ({q.shape[-1]},).")
    if score.dtype != q.dtype:
        raise DTypeError(f"{arrived}: expected one dtype.")
