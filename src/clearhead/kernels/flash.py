"""FlashAttention written out: attention tile by tile, forward and backward, without ever holding all scores.

Forward, for a block of queries and one block of keys after another (O is not yet divided by l):

    S  = softcap(scale · Q Kᵀ) + bias, masked pairs -∞
    m' = max(m, rowmax S)
    l' = e^(m - m') l + rowsum e^(S - m')
    O' = e^(m - m') O + e^(S - m') V

and at the end O / l and L = m + ln l. Only those two are kept. Backward computes each tile again from q, k and L:

    P  = e^(S - L)          dV += Pᵀ dO
    dP = dO Vᵀ              dS  = P (dP - rowsum(dO · O))
    dQ += scale · dS K      dK += scale · dSᵀ Q        with dS (1 - (S/c)²) in place of dS under a soft-cap c

Blocks that the mask leaves empty are skipped, and where it leaves a block full no mask is read. This saves memory, not
operations: it computes as many scores as the dense formula, and those of the backward pass twice.

Gradients are those of reverse mode, once: `backward`, `torch.func.grad`, `vjp` and `jacrev`, also under `vmap`, which
lays one tile beside the other. Forward mode (`jvp`, `jacfwd`) and gradients of gradients raise an error.
Source: Dao et al. 2022, algorithms 1 and 4; Dao 2023, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import DTypeError
from clearhead.kernels.grouped import fold, grouped_matmul, no_autocast
from clearhead.kernels.tiles import split
from clearhead.masks import BoundMask, Coverage, MaskRule, block_indices
from clearhead.scores import Bias, softcap

TILE = (128, 128)  # measured: 512 is twice as slow, the tile leaves the cache


def attention(
    q: Tensor,  # (B, H, T, D)
    k: Tensor,  # (B, G, S, D)
    v: Tensor,  # (B, G, S, Dv)
    *,
    mask: MaskRule | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    tile: tuple[int, int] = TILE,
) -> tuple[Tensor, Tensor]:  # (B, H, T, Dv) in q's dtype, and log-sum-exp (B, H, T), which has no gradient
    """softmax(softcap(scale · Q Kᵀ) + bias, masked) V; every head holds one tile of scores at a time."""
    _check(mask, bias)
    T, S = q.shape[-2], k.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scoring = Scoring(T, S, scale, None if mask is None else BoundMask(mask, T, S), bias, softcap, tile)
    with no_autocast(q.device):
        out, lse = _apply(Flash, q, k, v, scoring)
    return out.to(q.dtype), lse


def _check(mask: MaskRule | None, bias: Bias | None) -> None:
    """Raise for a bias that wants a gradient, and for tensors of mask or bias that vmap runs over."""
    if bias is not None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in bias.tensors()):
        raise DTypeError(
            f"attention over tiles with bias={bias!r}, which requires a gradient: that would be as large as all scores,"
            " and is not computed here. Detach the bias, or leave out the soft-cap and the tiles."
        )
    if torch.compiler.is_compiling():
        return
    for rule in (mask, bias):
        if rule is not None and any(torch._C._functorch.is_batchedtensor(tensor) for tensor in rule.tensors()):
            raise DTypeError(
                f"attention over tiles with {rule!r}, over whose tensors vmap runs: q, k and v only may have its"
                " dimension. Give mask and bias a batch dimension, (B, 1, T, S), and call it without vmap."
            )


@dataclass(frozen=True)
class Scoring:
    """What stands between q·k and the softmax, and the size of the tiles in which it is computed."""

    T: int
    S: int
    scale: float
    mask: BoundMask | None
    bias: Bias | None
    softcap: float | None
    tile: tuple[int, int]

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Every block of queries, with the blocks of keys of which it may see any."""
        for rows in split(slice(0, self.T), self.tile[0]):
            keys = split(slice(0, self.S), self.tile[1])
            yield rows, [cols for cols in keys if self._coverage(rows, cols) is not Coverage.EMPTY]

    def _coverage(self, rows: slice, cols: slice) -> Coverage:
        return Coverage.FULL if self.mask is None else self.mask.block(rows, cols)

    def capped(self, q: Tensor, k: Tensor) -> Tensor:
        """softcap(scale · Q Kᵀ) of a tile, (B, H, t, s)."""
        return softcap(grouped_matmul(q * self.scale, k.mT), self.softcap)

    def hidden(self, scores: Tensor, rows: slice, cols: slice) -> Tensor:
        """The tile with its bias, masked pairs -∞."""
        mask = None if self._coverage(rows, cols) is Coverage.FULL else self.mask
        if mask is None and self.bias is None:
            return scores
        at = block_indices(rows, cols, *(torch.arange(n, device=scores.device) for n in scores.shape[-4:-2]))
        if self.bias is not None:
            bias = self.bias.values(*at, self.T, self.S).to(scores.dtype)
            scores = (scores + bias).masked_fill(bias == -math.inf, -math.inf)
        return scores if mask is None else scores.masked_fill(~mask(*at), -math.inf)

    def slope(self, capped: Tensor) -> Tensor | float:
        """The derivative of the soft-cap, 1 - tanh² of what it was given."""
        return 1.0 if self.softcap is None else 1 - (capped / self.softcap).square()


class Flash(torch.autograd.Function):
    """Output (…, H, T, Dv) and log-sum-exp (…, H, T) of q (…, H, T, D), k (…, G, S, D), v (…, G, S, Dv).

    Both are in float32 or wider. A query that may see nothing has output 0, log-sum-exp -∞ and gradient 0.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """One pass over the tiles."""
        out, lse = (q.new_empty(size, dtype=_wide(q)) for size in ((*q.shape[:-1], v.shape[-1]), q.shape[:-1]))
        for rows, keys in scoring.blocks():
            out[..., rows, :], lse[..., rows] = _rows(q, k, v, rows, keys, scoring)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep output and lse, and no tile."""
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.scoring = inputs[3]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        """The same tiles again."""
        with no_autocast(d_out.device):
            return (*_apply(Gradients, *ctx.saved_tensors, d_out, ctx.scoring), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        """One more dimension in front."""
        return _apply(Flash, *_leading(info, in_dims, arguments)), (0, 0)


class Gradients(torch.autograd.Function):
    """The gradients of q, k and v from what `Flash` kept: a function of its own, so that vmap can widen it too."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Added up tile by tile."""
        sums = _Sums(q, k, v, scoring)
        for rows, keys in scoring.blocks():
            sums.add(d_out[..., rows, :], out[..., rows, :], lse[..., rows], rows, keys)
        return sums.q.to(q.dtype), sums.k.to(k.dtype), sums.v.to(v.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> None:
        """Gradients of gradients would need all tiles a third time."""
        raise RuntimeError("attention over tiles: gradients of gradients are not computed.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        """One more dimension in front."""
        return _apply(Gradients, *_leading(info, in_dims, arguments)), (0, 0, 0)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> tuple[Tensor, ...]:
    """The function's results; for forward mode, an error that tells what to do (a `jvp` would not compile)."""
    try:
        return function.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    except NotImplementedError as error:
        if "forward mode AD" not in str(error):
            raise
        raise RuntimeError(
            "attention over tiles: forward-mode derivatives (jvp, jacfwd, hessian) are not computed; use jacrev."
        ) from error


def _leading(info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> list[Any]:
    """Every tensor with vmap's dimension first; what has none is repeated, without a copy. The scoring as it is."""
    return [
        x if not isinstance(x, Tensor) else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(arguments, in_dims, strict=True)
    ]


def _rows(q: Tensor, k: Tensor, v: Tensor, rows: slice, keys: list[slice], scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a block of queries."""
    wide = _wide(q)
    q = q[..., rows, :].to(wide)
    m = q.new_full((*q.shape[:-1], 1), -math.inf)  # the largest score so far
    ell = q.new_zeros(m.shape)  # the sum of e^(score - m) so far
    o = q.new_zeros(*q.shape[:-1], v.shape[-1])  # the same sum, each term times its value
    for cols in keys:
        scores = scoring.hidden(scoring.capped(q, k[..., cols, :].to(wide)), rows, cols)
        larger = torch.maximum(m, scores.amax(-1, keepdim=True))
        shift = larger.masked_fill(larger == -math.inf, 0)  # a row that has seen nothing yet: e^(-∞ - 0) = 0
        p, shrink = scores.sub_(shift).exp_(), torch.exp(m - shift)
        ell = shrink * ell + p.sum(-1, keepdim=True)
        o = shrink * o + grouped_matmul(p, v[..., cols, :].to(wide))
        m = larger
    return o / ell.masked_fill(ell == 0, 1), (m + ell.log())[..., 0]


class _Sums:
    """The gradients of q, k and v, added up tile by tile."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> None:
        self._inputs, self._scoring = (q, k, v), scoring
        self.q, self.k, self.v = (torch.zeros_like(x, dtype=_wide(x)) for x in (q, k, v))

    def add(self, d_out: Tensor, out: Tensor, lse: Tensor, rows: slice, keys: list[slice]) -> None:
        """What a block of queries adds."""
        (q, k, v), groups, wide = self._inputs, self.k.shape[-3], _wide(lse)
        q = q[..., rows, :].to(wide)
        lse = lse.masked_fill(lse == -math.inf, 0)[..., None]
        through_sum = (d_out * out).sum(-1, keepdim=True)
        for cols in keys:
            some_k, some_v = k[..., cols, :].to(wide), v[..., cols, :].to(wide)
            capped = self._scoring.capped(q, some_k)
            slope = self._scoring.slope(capped)
            p = self._scoring.hidden(capped, rows, cols).sub_(lse).exp_()
            self.v[..., cols, :] += fold(p, groups).mT @ fold(d_out, groups)
            d_scores = grouped_matmul(d_out, some_v.mT).sub_(through_sum).mul_(p).mul_(slope)
            self.q[..., rows, :] += grouped_matmul(d_scores, some_k) * self._scoring.scale
            self.k[..., cols, :] += fold(d_scores, groups).mT @ fold(q, groups) * self._scoring.scale


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
