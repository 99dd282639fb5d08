"""How well heads follow a relation: their attention on its pairs, beside what needs no head to get it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import DTypeError, ModelError, ShapeError
from clearhead.heads.pairs import Pairs
from clearhead.maps.base import AttentionMap

__all__ = ["RelationScore", "ratio_error", "relation_score"]

_AT_ONCE = 1 << 21  # weights that are read together


@dataclass(frozen=True, eq=False)
class RelationScore:
    """What heads get for a relation, each tensor (L, H), or (H,) for the maps of one layer.

    mass: the attention on the pairs; accuracy: how often the most attended key is one of them; both of the queries that
    may see any. uniform and chance: the mass of a head that spreads evenly over the keys it may see, and the accuracy
    of drawing one of these. offset and by_offset: the fixed distance that most queries have such a key at, and the
    mass and accuracy of a head that always looks there. queries: how many there were. mass_error, accuracy_error:
    standard errors over sequences, NaN of a single one.
    """

    relation: str
    mass: Tensor
    accuracy: Tensor
    uniform: Tensor
    chance: Tensor
    offset: int | None
    by_offset: float
    queries: Tensor
    mass_error: Tensor
    accuracy_error: Tensor

    def __repr__(self) -> str:
        at = torch.unravel_index(self.mass.nan_to_num().argmax(), self.mass.shape)
        head = "".join(f"{letter}{int(n)}" for letter, n in zip("LH"[-len(at) :], at, strict=True))
        return (
            f"RelationScore({self.relation!r}: most mass in {head}, {self.mass[at]:.3f},"
            f" uniform {self.uniform[at]:.3f}, offset {self.offset} {self.by_offset:.3f})"
        )


Maps: TypeAlias = AttentionMap | Sequence[AttentionMap]


@torch.no_grad()
def relation_score(sequences: Iterable[tuple[Maps, Pairs]]) -> RelationScore:
    """Score every head for a relation over some sequences.

    mass = mean over queries t that may see an expected key of Σ_s A[t, s] over the expected keys s

    Args:
        sequences: for each a map (H, T, S) or (1, H, T, S), or those of all layers, as a recording holds them; and the
            relation's pairs in it.

    Returns: the scores, beside those of a uniform head on the same mask and of the best fixed offset.

    Raises:
        ShapeError: where there is no sequence, pairs and maps are of different texts, or sequences of other heads.
        DTypeError: for what is no (maps, pairs).
        ModelError: for weights that are not finite.

    Cost: mass, O(D) a pair and head; accuracy, one pass over the rows of queries that have pairs, O(S) memory a row;
    and one pass of the uniform head, where heads see the same keys for all of them at once.

    Source: Clark et al. 2019, section 4 (sub-words, argmax, the offset baseline).

    >>> from clearhead import DenseMap
    >>> from clearhead.heads import Tokens
    >>> before = torch.eye(4).roll(-1, 1)[None]  # attends to the previous token
    >>> before[0, 0] = torch.tensor([1.0, 0, 0, 0])
    >>> score = relation_score([(DenseMap(before), Tokens([1, 2, 3, 4]).previous())])
    >>> score.mass.tolist(), score.offset
    ([1.0], -1)
    """
    found, names, offsets, seen = [], [], Counter[int](), 0
    single = False
    for n, one in enumerate(sequences):
        maps, pairs = _checked(n, one)
        single = isinstance(maps, AttentionMap)
        layers = [maps] if isinstance(maps, AttentionMap) else list(maps)
        parts = [_Layer(_one_sequence(attn, pairs), pairs) for attn in layers]
        found.append(torch.stack([part.sums() for part in parts], 1))  # (5, L, H)
        offsets.update(parts[0].offsets())
        seen += int(parts[0].counted.sum())
        names.append(pairs.name)
    if not found:
        raise ShapeError("relation_score([]): expected at least one (maps, pairs).")
    if len({one.shape for one in found}) > 1:
        sizes = ", ".join(str(tuple(one.shape[1:])) for one in found)
        raise ShapeError(f"relation_score: sequences with (layers, heads) {sizes}; expected the same model for all.")
    sums = torch.stack([one[:, 0] if single else one for one in found])  # (sequences, 5, …)
    mass, accuracy, uniform, chance, queries = sums.sum(0)
    best = max(offsets, key=lambda o: (offsets[o], -abs(o)), default=None)
    return RelationScore(
        names[0],
        mass / queries,
        accuracy / queries,
        uniform / queries,
        chance / queries,
        best,
        offsets[best] / seen if best is not None else float("nan"),
        queries.long(),
        ratio_error(sums[:, 0], sums[:, 4]),
        ratio_error(sums[:, 1], sums[:, 4]),
    )


def ratio_error(sums: Tensor, counts: Tensor) -> Tensor:
    """The standard error of Σ sums / Σ counts over sequences: of a ratio, to first order."""
    n, total = len(sums), counts.sum(0)
    apart = sums - sums.sum(0) / total * counts
    return (n / (n - 1) * (apart**2).sum(0)).sqrt() / total if n > 1 else torch.full_like(total, torch.nan)


def _checked(n: int, one: Any) -> tuple[Maps, Pairs]:
    """The maps and pairs of sequence n."""
    both = tuple(one) if isinstance(one, tuple | list) else ()
    if len(both) == 2 and isinstance(both[1], Pairs) and isinstance(both[0], Iterable | AttentionMap):
        return both
    got = ", ".join(map(describe, both)) or describe(one)
    raise DTypeError(
        f"relation_score: sequence {n} is ({got}); expected [(maps, pairs), …], as Tokens(ids).previous()."
    )


def _one_sequence(attn: AttentionMap, pairs: Pairs) -> AttentionMap:
    """The map as (H, T, S)."""
    one = attn[0] if len(attn.shape) == 4 and attn.shape[0] == 1 else attn
    if len(one.shape) != 3 or one.shape[1:] != (pairs.queries.numel(), pairs.keys.numel()):
        raise ShapeError(
            f"relation_score({pairs!r}) of {attn!r}: expected a map (H, T, S) of one sequence with as many queries and"
            " keys; index the batch, attn[0]."
        )
    return one


class _Layer:
    """One map (H, T, S), and what its heads and the uniform one give to the pairs of one sequence."""

    def __init__(self, attn: AttentionMap, pairs: Pairs) -> None:
        self.attn, self.pairs = attn, pairs
        self.even = (attn[:1] if attn.heads_alike else attn).uniform()
        self.units, self.unit = torch.unique(pairs.q, return_inverse=True)  # query units that have pairs
        self.pair, t, s = pairs.tokens()
        self.share = 1 / torch.bincount(pairs.queries[pairs.queries >= 0])[pairs.q[self.pair]]  # of a token in its unit
        at_once = max(1, _AT_ONCE // attn.shape[0])
        chunks = list(zip(torch.split(t, at_once), torch.split(s, at_once), strict=True))
        self.own, self.evenly = (
            torch.cat([one.pick(*chunk).double() for chunk in chunks], -1) if chunks else one.like.new_zeros(1, 0)
            for one in (attn, self.even)
        )
        if not bool(torch.isfinite(self.own).all()):
            raise ModelError(f"relation_score of {attn!r}: its weights are not finite: look at the model's weights.")
        self.visible = (self.evenly > 0).any(0)  # (M,): to some head, since a head's weights may be 0 by rounding
        self.counted = self._by_unit(self.visible.double()) > 0  # (U,): may see an expected key

    def sums(self) -> Tensor:
        """Mass, accuracy, both of the uniform head, and the number of queries: (5, H), each summed over queries."""
        H, counted = self.attn.shape[0], self.counted
        mass, uniform = self._by_unit(self.own * self.share), self._by_unit(self.evenly * self.share)
        chance = uniform / self._candidates().clamp(min=1e-300)
        ones = torch.ones_like(uniform)
        return torch.stack(
            [(x.double() * counted).sum(-1).expand(H) for x in (mass, self._right(), uniform, chance, ones)]
        )

    def offsets(self) -> dict[int, int]:
        """How many queries have an expected key that they may see at each distance, in units."""
        visible = torch.zeros(self.pairs.q.numel(), dtype=torch.bool)
        visible[self.pair[self.visible]] = True
        at = torch.stack([self.pairs.q, self.pairs.k - self.pairs.q])[:, visible]
        o, counts = torch.unique(torch.unique(at, dim=1)[1], return_counts=True)
        return dict(zip(o.tolist(), counts.tolist(), strict=True))

    def _by_unit(self, values: Tensor) -> Tensor:
        """Values of token pairs (H, M), summed for each query unit: (H, U)."""
        total = values.new_zeros((*values.shape[:-1], self.units.numel()))
        return total.index_add(-1, self.unit[self.pair], values)

    def _candidates(self) -> Tensor:
        """What the uniform head gives to tokens that may be a prediction, (H or 1, U)."""
        keys = (self.pairs.keys >= 0).nonzero()[:, 0]
        mass = self.even.mass(keys).double()  # (H or 1, T)
        if not self.units.numel():  # no pair, no query
            return mass[:, :0]
        return torch.stack([mass[:, self.pairs.queries == unit].mean(-1) for unit in self.units], -1)

    def _right(self) -> Tensor:
        """Whether the most attended key is an expected one, (H, U)."""
        top = torch.cat(list(self._predictions()), -1) if self.units.numel() else self.units[None]
        last = int(self.pairs.keys.max()) + 1 if self.pairs.keys.numel() else 1
        expected = torch.isin(self.units * last + top, self.pairs.q * last + self.pairs.k)
        return expected & (top >= 0)

    def _predictions(self) -> Iterator[Tensor]:
        """The most attended key unit of each query unit, (H, u); -1 where there is no attention."""
        H, S = self.attn.shape[0], self.attn.shape[2]
        known = (self.pairs.keys >= 0).nonzero()[:, 0]
        last = int(self.pairs.keys.max()) + 1
        for units in torch.split(self.units, max(1, _AT_ONCE // (8 * H * S))):
            t = torch.isin(self.pairs.queries, units).nonzero()[:, 0]
            unit = torch.searchsorted(units, self.pairs.queries[t])
            weights = self.attn[:, t].to_dense().double()[..., known]
            words = weights.new_zeros(H, t.numel(), last).index_add(-1, self.pairs.keys[known], weights)
            summed = weights.new_zeros(H, units.numel(), last).index_add(1, unit, words)
            most, at = summed.max(-1)
            yield at.where(most > 0, -1)
