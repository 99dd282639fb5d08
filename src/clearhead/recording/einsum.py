"""An einsum of two operands as the product of matrices that it is: which operand has the queries, which the keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Contraction"]

_DIGITS = "0123456789"  # labels of the dimensions that "..." stands for, counted from the right


@dataclass(frozen=True)
class Contraction:
    """`einsum("a,b->out", …)`: the labels of both operands and of the result, one a dimension."""

    a: str
    b: str
    out: str

    @classmethod
    def of(cls, equation: object, a: Tensor, b: Tensor) -> Contraction | None:
        """The equation with "..." written out; None for one without "->" or with a diagonal."""
        inputs, arrow, out = str(equation).replace(" ", "").partition("->")
        first, comma, second = inputs.partition(",")
        if not arrow or not comma or "," in second:
            return None
        dots = _dots(first, a.ndim), _dots(second, b.ndim)
        one, two = first.replace("...", dots[0]), second.replace("...", dots[1])
        plain = all(len(set(labels)) == len(labels) for labels in (one, two))
        return cls(one, two, out.replace("...", max(dots, key=len))) if plain else None

    def swapped(self) -> Contraction:
        """The same with the operands exchanged."""
        return Contraction(self.b, self.a, self.out)

    def turned(self) -> Contraction:
        """The same with the last two dimensions of the first operand exchanged."""
        return Contraction(self.a[:-2] + self.a[-1] + self.a[-2], self.b, self.out)

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        """(…, T, D) and (…, S, D) if the result is (…, T, S) with T of q and S of k."""
        if len(self.out) < 2:
            return None
        lead, t, s = self.out[:-2], self.out[-2], self.out[-1]
        inner = "".join(label for label in self.a if label in self.b and label not in self.out)
        if set(self.a) - set(lead) != {t, *inner} or set(self.b) - set(lead) != {s, *inner} or not inner:
            return None
        return _arranged(q, self.a, lead, t, inner), _arranged(k, self.b, lead, s, inner)

    def values(self, v: Tensor) -> Tensor | None:
        """(…, S, Dv) if the first operand is weights (…, T, S), S is summed over, and v knows the batch, but not T."""
        lead, t, s = self.a[:-2], self.a[-2], self.a[-1]
        width = "".join(label for label in self.b if label not in self.a)
        if s not in self.b or s in self.out or t in self.b or t not in self.out:
            return None
        if lead and not set(lead) & set(self.b):
            return None
        return _arranged(v, self.b, lead, s, width)

    def order(self) -> tuple[int, ...] | None:
        """The dimensions of the result as (…, T, Dv), if the first operand is weights; None where it has others."""
        width = "".join(label for label in self.b if label not in self.a)
        wanted = self.a[:-1] + width
        return tuple(map(self.out.index, wanted)) if sorted(wanted) == sorted(self.out) else None


def _dots(labels: str, ndim: int) -> str:
    return _DIGITS[len(_DIGITS) - (ndim - len(labels) + 3) :] if "..." in labels else ""


def _arranged(x: Tensor, labels: str, lead: str, row: str, inner: str) -> Tensor:
    """x as (*lead, row, inner), dimensions that it does not have as 1, the inner ones as a single one; a view."""
    x = x.permute([labels.index(label) for label in lead + row + inner if label in labels])
    x = x.flatten(x.ndim - len(inner)) if inner else x.unsqueeze(-1)
    for at, label in enumerate(lead):
        x = x if label in labels else x.unsqueeze(at)
    return x
