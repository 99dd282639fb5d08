"""What a model does to a query between its matrix and the comparison: a constant factor, or a turn by position.

A rotary embedding turns pairs of numbers, each by an angle of its own: (a + ib) ↦ (a + ib) r with |r| the same for
every pair, and r the same for every head. The pairs are neighbours (2i, 2i + 1), or lie half apart (i, i + D/2); some
models turn only the first numbers of a head. Which of these it is, the recorded queries tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Turn", "find_turn"]


@dataclass(frozen=True)
class Turn:
    """q[c] = cos · a[c] + sin · a[partner[c]], where the sign of sin is that of c's place in its pair.

    partner: (D,) the other number of the pair; c itself where a number is only multiplied. factor: what `a` is
    multiplied by there (1 where it stays as it is).
    """

    partner: Tensor
    factor: float = 1.0

    def coefficients(self, a: Tensor, q: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of a token's number c: what gives q (n, D) of a (n, D) at places c (n,)."""
        rows, other = torch.arange(len(a)), self.partner[c]
        x, y, u, v = a[rows, c].double(), a[rows, other].double(), q[rows, c].double(), q[rows, other].double()
        size = (x * x + y * y).clamp_min(1e-300)
        cos, sin = (u * x + v * y) / size, (u * y - v * x) / size
        alone = other == c
        return torch.where(alone, torch.full_like(cos, self.factor), cos), torch.where(alone, 0.0, sin)


def find_turn(a: Tensor, q: Tensor) -> Turn | None:
    """The turn that makes q (R, H, D) of another a (R, H, D); None if no turn does."""
    if a.shape != q.shape or not q.any():
        return None
    within = max(4 * torch.finfo(q.dtype).eps, 1e-4) * float(q.abs().max())
    a, q = a.double(), q.double()
    D = q.shape[-1]
    factor = float((a * q).sum() / (a * a).sum())
    if (a * factor - q).abs().max() <= within:
        return Turn(torch.arange(D), factor)
    for partner in _pairings(D, int((a - q).abs().amax((0, 1)).gt(within).nonzero().max()) + 1):
        if _is_turned(a, q, partner, within):
            return Turn(partner)
    return None


def _pairings(D: int, turned: int) -> Iterator[Tensor]:
    """Neighbours and halves of the first numbers of a head, of which `turned` are seen to change."""
    for width in range(turned + turned % 2, D + 1, 2):
        alone = torch.arange(width, D)
        yield torch.cat([torch.arange(width).view(2, -1).flip(0).flatten(), alone])
        yield torch.cat([torch.arange(width).view(-1, 2).flip(1).flatten(), alone])


def _is_turned(a: Tensor, q: Tensor, partner: Tensor, within: float) -> bool:
    """Whether one rotation a token and a pair, times one factor for all, takes a to q in every head."""
    first = (partner > torch.arange(len(partner))).nonzero()[:, 0]
    before, after = (torch.complex(x[..., first], x[..., partner[first]]) for x in (a, q))
    ratio = (before.conj() * after).sum(1) / (before.abs() ** 2).sum(1).clamp_min(1e-300)  # (R, pairs)
    size = float(after.abs().norm() / before.abs().norm())
    same_size = (after.abs() - size * before.abs()).abs().max() <= 2 * within
    return bool(same_size and ((before * ratio[:, None]) - after).abs().max() <= 2 * within)
