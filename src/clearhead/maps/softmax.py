"""SoftmaxMap: A from q, k, the mask and one log-sum-exp per row.

A[t, s] = exp(score(t, s) - lse[t]),    lse[t] = ln Σ_s exp(score(t, s)),    score as in clearhead.scores
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead._checks import check_floats, check_qkv, finite_number, four
from clearhead.errors import ShapeError
from clearhead.kernels import cpu, tiles
from clearhead.kernels.grouped import grouped_matmul
from clearhead.kernels.path import Path, fastest
from clearhead.maps import compiled, fused
from clearhead.maps.base import PASSES
from clearhead.maps.scored import Scored, weights_of
from clearhead.masks import MaskRule
from clearhead.scores import Bias, as_bias, softcap

__all__ = ["SoftmaxMap"]


class SoftmaxMap(Scored):
    """The weights of scaled dot-product attention as a lazy operator; no T×S tensor, keys never repeated per head.

    Args:
        q: (B, H, T, D), or (B, T, D), or (T, D); kept by reference.
        k: (B, G, S, D), G dividing H: query head h reads key head h // (H/G).
        v: (B, G, S, Dv), kept only for those who show or multiply them; the weights do not depend on it.
        mask: a rule of `clearhead.masks`, or a bool tensor (T, S) or (B, H, T, S), True = may attend. None: all seen.
        scale: what q·k is multiplied by; 1/√D by default.
        bias: added to the scores: a rule of `clearhead.scores` or a float tensor (T, S) or (B, H, T, S).
        softcap: c in c·tanh(score/c), before bias and mask.
        sinks: (H,) learned logits that join the softmax and take weight nobody sees: rows then sum to less than 1.

    Weights and statistics are float32, or float64 for float64 inputs. The first pass over a row computes its lse, which
    is kept. Cost of a full pass: O(T·S·D) time over the mask's non-empty blocks, O(T + S) memory.

    Differentiable in q, k, and the tensors of bias and sinks. A backward pass takes three products of a full pass, and
    memory for a block of rows, at least 16 · H · S weights; the gradient of a dense bias is as large as the bias.

    >>> q = k = torch.eye(3)
    >>> SoftmaxMap(q, k, scale=1.0)[0]
    tensor([0.5761, 0.2119, 0.2119])
    """

    _held = Scored._held | {"_v": "BG"}
    _leaves: ClassVar[tuple[str, ...]] = (*Scored._leaves, "bias", "sinks")

    def __init__(
        self,
        q: Tensor,  # (B, H, T, D)
        k: Tensor,  # (B, G, S, D)
        *,
        v: Tensor | None = None,  # (B, G, S, Dv)
        mask: MaskRule | Tensor | None = None,
        scale: float | None = None,
        bias: Bias | Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # (H,)
    ) -> None:
        check_qkv("SoftmaxMap", q, k, v)
        if sinks is not None:
            check_floats("SoftmaxMap", q.device, sinks=sinks)
        self.bias = None if bias is None else as_bias(bias)
        self.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else finite_number("SoftmaxMap", "scale", scale)
        self.softcap = None if softcap is None else finite_number("SoftmaxMap", "softcap", softcap)
        self.sinks, self._v = sinks, None if v is None else four(v)
        if self.softcap is not None and self.softcap <= 0:
            raise ShapeError(f"SoftmaxMap(softcap={softcap!r}): expected a number above 0, or None for no cap.")
        biased = () if self.bias is None else self.bias.tensors()
        super().__init__(q, k, mask, bias=biased, sinks=() if sinks is None else (sinks,))
        B, H = self._q.shape[:2]
        if self.bias is not None:
            self.bias.check(B, H, *self._bound)
        if sinks is not None and sinks.shape != (H,):
            raise ShapeError(f"SoftmaxMap(sinks={tuple(sinks.shape)}): expected one logit per head, ({H},).")

    @property
    def v(self) -> Tensor | None:
        """(B, G, S, Dv) if it was given, without the dimensions that an index has dropped."""
        return None if self._v is None else self._shown(self._v)

    @property
    def heads_alike(self) -> bool:
        hidden = None if self.bias is None else self.bias.hidden()
        return super().heads_alike and (hidden is None or not hidden.per_head)

    def _notes(self) -> list[str]:
        notes = super()._notes() + ([] if self.bias is None else [repr(self.bias)])
        return notes + (["learned sinks: rows sum to less than 1"] if self.sinks is not None else [])

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        t, s = self._pairs(t, s)
        B, H, _, D = self._q.shape
        lse, at_once = self._lse_at(t.reshape(-1)), max(1, tiles.TILE_ELEMENTS // max(1, B * H * D))
        pairs = zip(*(torch.split(x, at_once, -1) for x in (t.reshape(-1), s.reshape(-1), lse)), strict=True)
        return torch.cat([self._pick(*some) for some in pairs], -1).reshape((*self.shape[:-2], *t.shape))

    def _pick(self, t: Tensor, s: Tensor, lse: Tensor) -> Tensor:
        """The weights at pairs (N,) of rows of which lse (B, H, N) is known, (B, H, N): one dot product each."""
        (B, H, _, D), G = self._q.shape, max(1, self._k.shape[1])
        q = (self._q[:, :, t].to(self.dtype) * self.scale).reshape(B, min(G, H), H // G, t.numel(), D)
        dots = (q * self._k[:, :, s].to(self.dtype)[:, :, None]).sum(-1)
        dots = dots.reshape(B, H, t.numel(), 1)  # each pair is a block of its own
        at = self._t[t][None, None, :, None], s[None, None, :, None]
        scores = self._hide_pairs(self._biased(dots, *at), *at, -math.inf)
        return weights_of(scores, lse)[..., 0]

    def uniform(self) -> SoftmaxMap:
        even = super().uniform()
        even.bias = None if self.bias is None else self.bias.hidden()
        even._made_from["bias"] = self._made_from["bias"]
        even.scale, even.softcap, even.sinks, even._v = 1.0, None, None, None
        return even

    def _bias_of(self, rows: slice, cols: slice) -> Tensor | None:
        """What is added to the scores of a block, (B, H, t, s) or with 1 for B, H; None where nothing is."""
        return None if self.bias is None else self.bias.values(*self._indices(*self._grid(rows, cols)))

    # --- faster ways than tiles -----------------------------------------------------------------------------------

    def _stream(self, *reducers: Any) -> None:
        left = compiled.stream(self, reducers)
        if left and not fused.stream(self, left):
            super()._stream(*left)

    def _path(self, question: str) -> Path:
        if question == "pick":
            return Path("dots", "one dot product a pair, once lse is known")
        if question in PASSES:
            return fastest(cpu=compiled.against(self), fused=fused.against(self, question))
        return fastest(fused=fused.against(self, question)) if question in fused.QUESTIONS else super()._path(question)

    def _logsumexp(self, rows: slice) -> Tensor:
        found = None
        if rows == slice(0, self.shape[-2]):
            looked = compiled.look(self, cpu.Wanted())
            found = fused.logsumexp(self) if looked is None else looked.lse
        return super()._logsumexp(rows) if found is None else found

    # --- scores ---------------------------------------------------------------------------------------------------

    def _scores(self, rows: slice, cols: slice | Tensor) -> Tensor:
        q, k = self._q[:, :, rows].to(self.dtype) * self.scale, self._k[:, :, cols].to(self.dtype)
        scores = self._biased(grouped_matmul(q, k.mT), *self._grid(rows, cols))
        return self._hide(scores, rows, cols, -math.inf)

    def _biased(self, scaled: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Soft-cap and bias: what stands between scale·q·k and the mask."""
        self._check_unchanged()
        scores = softcap(scaled, self.softcap)
        if self.bias is None:
            return scores
        bias = self.bias.values(*self._indices(t, s)).to(scores.dtype)
        return (scores + bias).masked_fill(bias == -math.inf, -math.inf)

    # --- learned sinks: keys that nobody sees ---------------------------------------------------------------------

    def _is_whole(self, rows: slice, cols: slice) -> bool:
        return self.sinks is None and super()._is_whole(rows, cols)

    def _unseen(self, rows: slice) -> list[Tensor]:
        if self.sinks is None:
            return []
        sinks = self.sinks[self._h].to(self.dtype)[None, :, None, None]
        return [sinks.expand(self._q.shape[0], -1, rows.stop - rows.start, 1)]
