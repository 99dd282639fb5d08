"""SoftmaxMap: A from q, k, the mask and one log-sum-exp per row.

A[t, s] = exp(score(t, s) - lse[t]),    lse[t] = ln Σ_s exp(score(t, s)),    score as in clearhead.scores
"""

from __future__ import annotations

import copy
import math
from itertools import chain

import torch
from torch import Tensor

from clearhead._checks import check_qkv, finite_number, four, span
from clearhead._watch import Watched
from clearhead.errors import RecordingError, ShapeError
from clearhead.kernels import tiles
from clearhead.kernels.grouped import grouped_matmul, groups_of, take
from clearhead.maps.base import AttentionMap
from clearhead.masks import Coverage, MaskRule, as_rule
from clearhead.scores import Bias, as_bias, softcap

__all__ = ["SoftmaxMap"]


class SoftmaxMap(AttentionMap):
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

    >>> q = k = torch.eye(3)
    >>> SoftmaxMap(q, k, scale=1.0)[0]
    tensor([0.5761, 0.2119, 0.2119])
    """

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
        self.mask = None if mask is None else as_rule(mask)
        self.bias = None if bias is None else as_bias(bias)
        self.scale = 1 / math.sqrt(q.shape[-1]) if scale is None else finite_number("SoftmaxMap", "scale", scale)
        self.softcap = None if softcap is None else finite_number("SoftmaxMap", "softcap", softcap)
        self.sinks = sinks
        if self.softcap is not None and self.softcap <= 0:
            raise ShapeError(f"SoftmaxMap(softcap={softcap!r}): expected a number above 0, or None for no cap.")
        self._q, self._k, self._v = four(q), four(k), None if v is None else four(v)
        self._axes = (0, 1)[: q.ndim - 2]  # which of (B, H) the map shows; an integer index drops one
        B, H, T, _ = self._q.shape
        # Which batches, heads and queries of the mask's own numbering these are: selections keep the numbering.
        self._b, self._h = torch.arange(B, device=q.device), torch.arange(H, device=q.device)
        self._t, self._all_queries = torch.arange(T, device=q.device), True
        self._bound = (T, self._k.shape[2])
        # Views of it are shared with selections of the map, so that what one has computed no other computes again.
        self._lse = q.new_full((B, H, T), torch.nan, dtype=self.dtype)
        rules = [rule.tensors() for rule in (self.mask, self.bias) if rule is not None]
        self._made_from = Watched([q, k, *chain(*rules), *([] if sinks is None else [sinks])])
        self._check_rules(B, H)

    def _check_rules(self, B: int, H: int) -> None:
        for rule in (self.mask, self.bias):
            if rule is not None:
                rule.check(B, H, *self._bound)
        if self.sinks is not None and self.sinks.shape != (H,):
            raise ShapeError(f"SoftmaxMap(sinks={tuple(self.sinks.shape)}): expected one logit per head, ({H},).")

    # --- what it is -----------------------------------------------------------------------------------------------

    @property
    def q(self) -> Tensor:
        """(B, H, T, D), without the dimensions that an index has dropped."""
        return self._shown(self._q)

    @property
    def k(self) -> Tensor:
        """(B, G, S, D), without the dimensions that an index has dropped."""
        return self._shown(self._k)

    @property
    def v(self) -> Tensor | None:
        """(B, G, S, Dv) if it was given, without the dimensions that an index has dropped."""
        return None if self._v is None else self._shown(self._v)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._lead, self._q.shape[2], self._k.shape[2])

    @property
    def _lead(self) -> tuple[int, ...]:
        return tuple(self._q.shape[axis] for axis in self._axes)

    def _shown(self, tensor: Tensor) -> Tensor:
        for axis in (1, 0):
            tensor = tensor if axis in self._axes else tensor.squeeze(axis)
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self._q.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self._q.device

    @property
    def nbytes(self) -> int:
        held = [self._q, self._k, self._lse] + ([] if self._v is None else [self._v])
        return sum(t.numel() * t.element_size() for t in held)

    @property
    def positions(self) -> Tensor:
        T, S = self._bound
        return self._t + S - T

    def _lead_names(self) -> tuple[str, ...]:
        return tuple("BH"[axis] for axis in self._axes)

    def _notes(self) -> list[str]:
        notes = [repr(self.mask).removesuffix("()")] if self.mask is not None else []
        notes += [repr(self.bias)] if self.bias is not None else []
        return notes + (["learned sinks: rows sum to less than 1"] if self.sinks is not None else [])

    @property
    def heads_alike(self) -> bool:
        hidden = None if self.bias is None else self.bias.hidden()
        return not ((self.mask is not None and self.mask.per_head) or (hidden is not None and hidden.per_head))

    def block(self, rows: slice, cols: slice) -> Coverage:
        """What the mask leaves of a block, by its rule and without looking at q or k."""
        if rows.stop <= rows.start or cols.stop <= cols.start:
            return Coverage.EMPTY
        if self.mask is None:
            return Coverage.FULL
        if not self._all_queries:  # of scattered queries, the hull: its EMPTY and FULL hold for them
            t = self._t[rows]
            rows = slice(int(t.min()), int(t.max()) + 1)
        return self.mask.bind(*self._bound).block(rows, cols)

    def _select(self, lead: tuple[int | Tensor, ...], rows: Tensor | None) -> SoftmaxMap:
        chosen = copy.copy(self)
        chosen._axes = tuple(axis for axis, at in zip(self._axes, lead, strict=True) if isinstance(at, Tensor))
        for axis, at in zip(self._axes, lead, strict=True):
            chosen._keep_batches(at) if axis == 0 else chosen._keep_heads(at)
        if rows is not None:
            chosen._q, chosen._t, chosen._all_queries = take(chosen._q, 2, rows), self._t[rows], False
            chosen._lse = take(chosen._lse, 2, rows)
        return chosen

    def _keep_batches(self, at: int | Tensor) -> None:
        self._q, self._k, self._b = take(self._q, 0, at), take(self._k, 0, at), take(self._b, 0, at)
        self._v = None if self._v is None else take(self._v, 0, at)
        self._lse = take(self._lse, 0, at)

    def _keep_heads(self, at: int | Tensor) -> None:
        groups = groups_of(at, self._q.shape[1] // max(1, self._k.shape[1]))
        self._q, self._k, self._h = take(self._q, 1, at), take(self._k, 1, groups), take(self._h, 0, at)
        self._v = None if self._v is None else take(self._v, 1, groups)
        self._lse = take(self._lse, 1, at)

    # --- primitives -----------------------------------------------------------------------------------------------

    def tile(self, rows: slice, cols: slice) -> Tensor:
        rows, cols = span("tile: rows", rows, self._q.shape[2]), span("tile: cols", cols, self._k.shape[2])
        scores = self._scores(rows, cols)
        if scores.numel() and self.sinks is None and self._is_whole(rows, cols):
            weights = self._softmax(rows, scores)
        else:
            weights = _exp(scores, self._lse_of(rows))
        return weights.reshape(*self._lead, *weights.shape[-2:])

    @property
    def lse(self) -> Tensor:
        """ln Σ_s exp(score), natural log, (…, T); -inf for a query that may attend to nothing. Computed once."""
        T = self._q.shape[2]
        return self._lse_of(slice(0, T)).reshape(*self._lead, T).clone()  # the caller's own: the kept one is shared

    def pick(self, t: Tensor | int, s: Tensor | int) -> Tensor:
        self._check_unchanged()
        t, s = self._pairs(t, s)
        B, H, T, D = self._q.shape
        lse, at_once = self._lse_of(slice(0, T)), max(1, tiles.TILE_ELEMENTS // max(1, B * H * D))
        pairs = zip(torch.split(t.reshape(-1), at_once), torch.split(s.reshape(-1), at_once), strict=True)
        return torch.cat([self._pick(*some, lse) for some in pairs], -1).reshape((*self._lead, *t.shape))

    def _pick(self, t: Tensor, s: Tensor, lse: Tensor) -> Tensor:
        """The weights at pairs (N,), (B, H, N): one dot product each."""
        (B, H, _, D), G = self._q.shape, max(1, self._k.shape[1])
        q = (self._q[:, :, t].to(self.dtype) * self.scale).reshape(B, min(G, H), H // G, t.numel(), D)
        dots = (q * self._k[:, :, s].to(self.dtype)[:, :, None]).sum(-1)
        dots = dots.reshape(B, H, t.numel(), 1)  # each pair is a block of its own
        at_t, at_s = self._t[t][None, None, :, None], s[None, None, :, None]
        scores = self._hidden(self._biased(dots, at_t, at_s), at_t, at_s)
        return _exp(scores, lse[:, :, t])[..., 0]

    def columns(self, keys: Tensor) -> Tensor:
        weights = _exp(self._scores(slice(0, self._q.shape[2]), keys), self._lse_of(slice(0, self._q.shape[2])))
        return weights.reshape(*self._lead, *weights.shape[-2:])

    def uniform(self) -> SoftmaxMap:
        """The head that spreads evenly over the keys it may see: the baseline of every score of a head."""
        q, k = self._q[..., :1] * 0, self._k[:, :, :, :1] * 0
        even = SoftmaxMap(q.nan_to_num(), k.nan_to_num(), mask=None, bias=None)
        even.mask, even.bias = self.mask, None if self.bias is None else self.bias.hidden()
        even._b, even._h, even._t, even._bound = self._b, self._h, self._t, self._bound
        even._all_queries, even._axes = self._all_queries, self._axes
        return even

    # --- scores ---------------------------------------------------------------------------------------------------

    def _scores(self, rows: slice, cols: slice | Tensor) -> Tensor:
        """Scores of a block, (B, H, t, s), masked pairs -inf. The keys are a range, or any."""
        q, k = self._q[:, :, rows].to(self.dtype) * self.scale, self._k[:, :, cols].to(self.dtype)
        t = self._t[rows][None, None, :, None]
        s = torch.arange(cols.start, cols.stop, device=q.device) if isinstance(cols, slice) else cols
        scores = self._biased(grouped_matmul(q, k.mT), t, s[None, None, None, :])
        if isinstance(cols, Tensor):
            return self._hidden(scores, t, s[None, None, None, :])
        for part in tiles.partial_runs(self, rows, cols):
            here = slice(part.start - cols.start, part.stop - cols.start)
            scores[..., here] = self._hidden(scores[..., here], t, s[None, None, None, here])
        return scores

    def _biased(self, scaled: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Soft-cap and bias: what stands between scale·q·k and the mask."""
        self._check_unchanged()
        scores = softcap(scaled, self.softcap)
        if self.bias is None:
            return scores
        b, h = self._b[:, None, None, None], self._h[None, :, None, None]
        bias = self.bias.values(b, h, t, s, *self._bound).to(scores.dtype)
        return (scores + bias).masked_fill(bias == -math.inf, -math.inf)

    def _hidden(self, scores: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """-inf where the mask says so, whatever the score was."""
        if self.mask is None:
            return scores
        b, h = self._b[:, None, None, None], self._h[None, :, None, None]
        return scores.masked_fill(~self.mask.allows(b, h, t, s, *self._bound), -math.inf)

    # --- log-sum-exp --------------------------------------------------------------------------------------------------

    def _softmax(self, rows: slice, scores: Tensor) -> Tensor:
        """The weights of whole rows, and their lse on the way: the largest weight is exp(largest score - lse)."""
        top = scores.amax(-1)
        nothing = (top == -math.inf)[..., None]
        some_nothing = bool(nothing.any())
        weights = torch.softmax(scores.masked_fill(nothing, 0) if some_nothing else scores, -1)
        if some_nothing:
            weights = weights.masked_fill(nothing, 0)
        if not self._needs_graph():
            self._kept_lse()[:, :, rows] = top - weights.amax(-1).log().masked_fill(nothing[..., 0], 0)
        return weights

    def _lse_of(self, rows: slice) -> Tensor:
        """lse of some rows, (B, H, t): kept ones as they are, else from one pass over their keys."""
        if self._needs_graph():
            return self._logsumexp(rows)
        kept = self._kept_lse()[:, :, rows]
        if bool(kept.isnan().any()):
            kept.copy_(self._logsumexp(rows))
        return kept

    def _kept_lse(self) -> Tensor:
        """Every row's lse, (B, H, T), NaN where it is not known yet."""
        if self._lse.is_inference() and not torch.is_inference_mode_enabled():
            self._lse = self._lse.clone()  # begun in inference mode, and not to be written to outside of it
        return self._lse

    def _logsumexp(self, rows: slice) -> Tensor:
        parts = [
            self._merge([torch.logsumexp(self._scores(part, cols), -1) for cols in keys], part)
            for part, keys in tiles.row_blocks(self, rows)
        ]
        return torch.cat(parts, -1) if parts else self._nothing(rows)

    def _merge(self, parts: list[Tensor], rows: slice) -> Tensor:
        """The log-sum-exp of log-sum-exps, learned sinks included; -inf where there is nothing to add up."""
        if self.sinks is not None:
            parts.append(self.sinks[self._h].to(self.dtype)[None, :, None].expand(self._nothing(rows).shape))
        if not parts:
            return self._nothing(rows)
        return parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), 0)

    def _nothing(self, rows: slice) -> Tensor:
        return self.like.new_full((*self._q.shape[:2], rows.stop - rows.start), -math.inf)

    def _is_whole(self, rows: slice, cols: slice) -> bool:
        """Whether these columns hold every key that these rows may see."""
        before, after = slice(0, cols.start), slice(cols.stop, self._k.shape[2])
        return self.block(rows, before) is Coverage.EMPTY and self.block(rows, after) is Coverage.EMPTY

    def _needs_graph(self) -> bool:
        return torch.is_grad_enabled() and self._made_from.differentiable

    def _check_unchanged(self) -> None:
        if self._made_from.changed:
            raise RecordingError(
                f"{self!r}: its q, k, mask or bias was overwritten in place after the map was made, so its weights are"
                " lost. Read the map before that, or clone q and k and what hides or moves their scores."
            )


def _exp(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse), 0 in a row that may attend to nothing."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
