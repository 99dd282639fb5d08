"""A softmax of scores, whatever the scores are: one log-sum-exp a row is all that has to be kept of it.

A[t, s] = exp(score(t, s) - lse[t]),    lse[t] = ln Σ_s exp(score(t, s))
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from clearhead._checks import has_numbers
from clearhead.kernels import gradients, tiles
from clearhead.kernels.gradients import Found
from clearhead.maps.query_key import QueryKeyMap
from clearhead.masks import Coverage, MaskRule

if TYPE_CHECKING:
    from typing_extensions import Self

PRECISE = 128.0  # an lse below it, in float32, moves weights by less than 4e-6
# Measured (9 heads, 2,048 tokens, causal, one thread): a quarter of the rows, scattered, takes 0.4 of the time of all,
# which the compiled pass finds; one row 0.05.
FEW = 4  # rows are few where there are so many times as many


class Scored(QueryKeyMap):
    """A softmax over the keys. Subclasses say `_scores`; the first pass over a row computes its lse, which is kept."""

    _held = QueryKeyMap._held | {"_lse": "BHT"}

    def __init__(self, q: Tensor, k: Tensor, mask: MaskRule | Tensor | None, **others: Iterable[Tensor]) -> None:
        super().__init__(q, k, mask, **others)
        # Views of it are shared with selections of the map, so that what one has computed no other computes again.
        self._lse = self.like.new_full(self._q.shape[:3], torch.nan)

    @abstractmethod
    def _scores(self, rows: slice, cols: slice | Tensor) -> Tensor:
        """Scores of a block, (B, H, t, s), masked pairs -inf. The keys are a range, or any."""

    @property
    def lse(self) -> Tensor:
        """ln Σ_s exp(score), natural log, (…, T); -inf for a query that may attend to nothing. Computed once.

        Differentiable.
        """
        lse = self._lse_of(slice(0, self.shape[-2]))
        return self._shown(lse).clone()  # the caller's own: the kept one is shared

    def _row_sums(self) -> Tensor:
        if self._unseen(slice(0, 0)):  # learned sinks take some
            return super()._row_sums()
        return (self.lse.detach() > -math.inf).to(self.dtype)

    def uniform(self) -> Self:
        even = super().uniform()
        even._lse = torch.full_like(self._lse, torch.nan)
        return even

    def columns(self, keys: Tensor) -> Tensor:
        rows = slice(0, self.shape[-2])
        return self._shown(weights_of(self._scores(rows, keys), self._lse_of(rows)))

    def _weights(self, rows: slice, cols: slice) -> Tensor:
        scores = self._scores(rows, cols)
        if scores.numel() and self._is_whole(rows, cols):
            return self._softmax(rows, scores)
        return weights_of(scores, self._lse_of(rows))

    def _whole_rows(self, rows: slice, keys: list[slice]) -> list[Tensor]:
        if not keys:
            return []
        weights = self._softmax(rows, self._all_scores(rows, keys))
        widths = [cols.stop - cols.start for cols in keys]
        if widths == [weights.shape[-1]]:
            return [self._shown(weights)]
        parts = torch.split(weights[..., : sum(widths)], widths, -1)
        return [self._shown(part) for part in parts]

    def _all_scores(self, rows: slice, keys: list[slice]) -> Tensor:
        """The scores of whole rows, (B, H, t, n): of these ranges of keys, side by side, and of what nobody sees."""
        scores = [self._scores(rows, cols) for cols in keys] + self._unseen(rows)
        return scores[0] if len(scores) == 1 else torch.cat(scores, -1)

    def _unseen(self, rows: slice) -> list[Tensor]:
        """Scores (B, H, t, n) that join the softmax of these rows, and whose weight nobody sees."""
        return []

    def _is_whole(self, rows: slice, cols: slice) -> bool:
        """Whether these columns hold every key that these rows may see."""
        outside = (slice(0, cols.start), slice(cols.stop, self.shape[-1]))
        return all(self.block(rows, part) is Coverage.EMPTY for part in outside)

    def _softmax(self, rows: slice, scores: Tensor) -> Tensor:
        """The weights of whole rows, and their lse on the way: the largest weight is exp(largest score - lse)."""
        top = scores.amax(-1)
        nothing = (top == -math.inf)[..., None]
        is_finite = self._has_numbers and bool(top.isfinite().all())
        weights = torch.softmax(scores if is_finite else scores.masked_fill(nothing, 0), -1)
        if not is_finite:
            weights = weights.masked_fill(scores == -math.inf, 0)  # in a row that is NaN, too
        if self._keeps_lse():
            self._kept_lse()[:, :, rows] = top - weights.amax(-1).log().masked_fill(nothing[..., 0], 0)
        return weights

    def _lse_of(self, rows: slice) -> Tensor:
        """lse of some rows, (B, H, t): kept ones as they are, else from one pass over their keys."""
        if not self._keeps_lse():
            return gradients.computed(LogSumExp(self, rows))[0]
        kept = self._kept_lse()[:, :, rows]
        if bool(kept.isnan().any()):
            kept.copy_(self._logsumexp(rows))
        return kept

    def _lse_at(self, t: Tensor) -> Tensor:
        """lse of queries (N,), (B, H, N): of few queries theirs alone is found."""
        keeps, every = self._keeps_lse(), slice(0, self._q.shape[2])
        if keeps and not bool((kept := self._kept_lse()[:, :, t]).isnan().any()):
            return kept
        if not self._has_numbers or FEW * (rows := torch.unique(t)).numel() > every.stop:
            return self._lse_of(every)[:, :, t]
        found: Tensor = self[..., rows, :]._lse_of(slice(0, rows.numel()))
        if keeps:
            self._kept_lse()[:, :, rows] = found.clone()  # of consecutive rows it is a part of the same
        return found[:, :, torch.searchsorted(rows, t.contiguous())]

    def _keeps_lse(self) -> bool:
        """Not where its gradient is asked for, nor where there are no numbers to look at."""
        return self._has_numbers and not self._needs_graph()

    def _kept_lse(self) -> Tensor:
        """Every row's lse, (B, H, T), NaN where it is not known yet."""
        if self._lse.is_inference() and not torch.is_inference_mode_enabled():
            self._lse = self._lse.clone()  # begun in inference mode, and not to be written to outside of it
        return self._lse

    def _logsumexp(self, rows: slice) -> Tensor:
        parts = [
            self._merge(chain((self._scores(part, cols) for cols in keys), self._unseen(part)), part)
            for part, keys in tiles.row_blocks(self, rows)
        ]
        return torch.cat(parts, -1) if parts else self._merge([], rows)

    def _merge(self, scores: Iterable[Tensor], rows: slice) -> Tensor:
        """The log-sum-exp of some rows' scores, (B, H, t); -inf where there is nothing to add up."""
        parts = [torch.logsumexp(some, -1) for some in scores]
        if not parts:
            return self.like.new_full((*self._q.shape[:2], rows.stop - rows.start), -math.inf)
        return parts[0] if len(parts) == 1 else torch.logsumexp(torch.stack(parts), 0)


@dataclass
class LogSumExp:
    """lse of some rows, (B, H, t), as a recipe of `kernels.gradients`."""

    attn: Scored
    rows: slice
    _leaves: ClassVar[tuple[str, ...]] = ("attn",)

    def compute(self) -> tuple[Tensor]:
        attn, rows = self.attn, self.rows
        return (attn._lse_of(rows).clone() if attn._keeps_lse() else attn._logsumexp(rows),)

    def fixed(self) -> list[bool]:
        return [False]

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        return tiles.whole_rows(self.attn, self.rows)

    def again(self, rows: slice, keys: list[slice], grads: Sequence[Tensor | None]) -> Iterator[Found]:
        at = ..., slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        if (keys or self.attn._unseen(rows)) and grads[0] is not None and bool(grads[0][at].any()):  # often one row
            scores = self.attn._all_scores(rows, keys)
            nothing = (scores == -math.inf).all(-1)
            lse = torch.logsumexp(scores.masked_fill(nothing[..., None], 0), -1)
            yield 0, at, lse.masked_fill(nothing, -math.inf)


def weights_of(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(score - lse): at most 1; exactly 0 of a score of -inf, whatever the others of its row are."""
    shift = lse.masked_fill(lse == -math.inf, 0)[..., None]
    if is_precise(lse):
        return torch.exp(scores - shift)
    weights = torch.exp((scores - shift.masked_fill(shift == math.inf, math.nan)).clamp(max=0))
    return weights.masked_fill(scores == -math.inf, 0)


def is_precise(lse: Tensor) -> bool:
    """Whether each row's lse is so near 0 that the weights that follow from it are as exact as a softmax's."""
    return has_numbers(lse) and bool((lse.abs() < PRECISE).logical_or_(lse == -math.inf).all())
