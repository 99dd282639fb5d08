"""Which heads changed most: between two texts of one model, or two models on one text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead._checks import check_count, describe
from clearhead._format import finite
from clearhead._progress import Progress, silent
from clearhead._tables import Labelled, Rows
from clearhead.errors import DTypeError, ModelError, ShapeError
from clearhead.kernels.tiles import Tile, stream
from clearhead.maps.base import AttentionMap
from clearhead.masks import Coverage

__all__ = ["Comparison", "HeadChange", "compare"]

Compared: TypeAlias = "AttentionMap | Sequence[AttentionMap] | Any"  # or a View, which stands above this module


@dataclass(frozen=True)
class HeadChange(Labelled):
    """How far apart one head's weights are in a and in b, the mean over queries.

    tvd: total variation distance, in [0, 1]. jsd: Jensen-Shannon divergence, nats, in [0, ln 2]. tvd_others and
    jsd_others: how far the head in a is from other heads of its layer in b, and the standard deviation of that over
    permutations; None where there are no other heads, or one permutation.
    """

    tvd: float
    jsd: float
    tvd_others: float | None
    tvd_others_std: float | None
    jsd_others: float | None
    jsd_others_std: float | None


class Comparison(Rows[HeadChange]):
    """How much each head changed, layer by layer. `queries`: how many were compared, the same in a and b."""

    def __init__(self, heads: Sequence[HeadChange], queries: int) -> None:
        super().__init__(heads)
        self.queries = queries

    def strongest(self, n: int = 8) -> list[HeadChange]:
        """The heads that changed most, by total variation distance."""
        return sorted(self, key=lambda head: -head.tvd)[:n]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, as JSON holds them."""
        return {"queries": self.queries, "heads": [asdict(head) for head in self]}

    def __repr__(self) -> str:
        first = self.strongest(1)[0]
        others = "" if first.tvd_others is None else f", others {first.tvd_others:.3f}"
        return f"Comparison({len(self)} heads, {self.queries} queries; most {first.label}, tvd {first.tvd:.3f}{others})"


@torch.no_grad()
def compare(a: Compared, b: Compared, *, permutations: int = 8, on_progress: Progress = silent) -> Comparison:
    """Which heads attend otherwise in b than in a: in two texts, two checkpoints, or with and without a knockout.

    tvd = mean_t ½ Σ_s |a[t, s] - b[t, s]|,    jsd = mean_t ½ KL(a[t] ‖ m[t]) + ½ KL(b[t] ‖ m[t]),  m = ½ (a + b)

    Query t is compared with query t, key s with key s. So it is for texts that stand side by side token by token: one
    text in two models, or two texts that differ in some words. Texts of different lengths are compared as far as the
    shorter goes, which needs causal heads, since then no query has keys of which the other text knows nothing.

    Whether a change is large is told by a permutation baseline: the heads of a layer in b are permuted, so that none
    meets itself. A head no closer to itself than to others has become another head. What a row lacks of a sum of 1, as
    where a learned sink takes it or a head is set to "zero", counts as one key more; queries that attend to nothing in
    both are left out.

    Args:
        a, b: a view, a recording, maps (B, H, T, S) of layers, or one map; as many layers and heads in both.
        permutations: of how many the baseline is the mean; where a layer has fewer other heads, of all.
        on_progress: called as (stage, done, total), with stage "compare".

    Raises:
        ShapeError: where layers, heads or tokens do not correspond; the message says which.
        DTypeError: for what holds no maps.
        ModelError: for weights that are not finite.

    Cost: one pass over both maps, in memory O(T) a head; each permutation adds about a third of such a pass.

    Source: Lin 1991 (the divergence).

    >>> from clearhead.maps import DenseMap
    >>> first, second = torch.eye(2)[None, None], torch.full((1, 1, 2, 2), 0.5)
    >>> compare(DenseMap(first), DenseMap(second))[0].tvd
    0.5
    """
    check_count("compare", "permutations", permutations, at_least=0)
    ours, theirs = _maps(a), _maps(b)
    numbers = _layers(a, b, len(ours), len(theirs))
    found, queries = list[HeadChange](), 0
    for n, (layer, one, other) in enumerate(zip(numbers, ours, theirs, strict=True)):
        on_progress("compare", n, len(numbers))
        pair = _Pair(layer, one, other)
        found += _changes(layer, pair, permutations)
        queries = max(queries, pair.shape[-2])
    on_progress("compare", len(numbers), len(numbers))
    return Comparison(found, queries)


class _Pair:
    """Two maps as one source of tiles, (2, B, H, T, S), over the queries and keys that both have."""

    def __init__(self, layer: int, a: AttentionMap, b: AttentionMap) -> None:
        (*lead, T, S), (*other, U, V) = a.shape, b.shape
        if lead != other or len(lead) not in (1, 2):
            raise ShapeError(
                f"compare: layer {layer} is {a!r} in one and {b!r} in the other; expected as many heads (and sequences)"
                " in both."
            )
        if (T, S) != (U, V):
            self._check_beginning(layer, a, b)
        self._maps, self.shape = (a, b), (2, *lead, min(T, U), min(S, V))
        self._dtype = torch.promote_types(a.dtype, b.dtype)

    @staticmethod
    def _check_beginning(layer: int, a: AttentionMap, b: AttentionMap) -> None:
        n = min(a.shape[-2], b.shape[-2])
        for attn in (a, b):
            T, S = attn.shape[-2:]
            later = n < S and attn.block(slice(0, n), slice(n, S)) is not Coverage.EMPTY
            if T != S or later:
                raise ShapeError(
                    f"compare: layer {layer} is {a!r} in one and {b!r} in the other. Texts of different lengths are"
                    " compared by their first tokens, which takes causal self-attention. Give texts of as many tokens"
                    " (is it the same tokenizer?)."
                )

    def tile(self, rows: slice, cols: slice) -> Tensor:
        return torch.stack([attn.tile(rows, cols).to("cpu", self._dtype) for attn in self._maps])

    def block(self, rows: slice, cols: slice) -> Coverage:
        return max(attn.block(rows, cols) for attn in self._maps)


class _Distances:
    """A reducer of a `_Pair`: sums of each row, and its distances as the heads stand and with those of b rolled on."""

    def __init__(self, shape: tuple[int, ...], shifts: Sequence[int]) -> None:
        *lead, T, _ = shape[1:]
        self.shifts = [0, *shifts]
        self.sums = torch.zeros(2, *lead, T, dtype=torch.float64)
        self.tvd, self.jsd = torch.zeros(2, len(self.shifts), *lead, T, dtype=torch.float64)

    def update(self, tile: Tile) -> None:
        self.sums[..., tile.rows] += tile.weights.sum(-1)
        self._add(tile.weights, tile.rows)

    def finish(self) -> None:
        """What is missing of a row's sum is one key more."""
        self._add((1 - self.sums).clamp(min=0)[..., None], slice(0, self.sums.shape[-1]))

    def means(self) -> Tensor:
        """Over the queries that attend to something in a or b: (2, permutations, H), tvd and jsd."""
        found = []
        for n, shift in enumerate(self.shifts):
            attends = (self.sums[0] > 0) | (self.sums[1].roll(shift, -2) > 0)
            kinds = torch.stack([self.tvd[n], self.jsd[n].clamp(min=0)]).where(attends, 0)
            over = (-1,) if attends.ndim == 2 else (-1, -3)  # and the sequences
            found.append(kinds.sum(over) / attends.sum(over).clamp(min=1))
        return torch.stack(found, 1)

    def _add(self, weights: Tensor, rows: slice) -> None:
        a, b = weights
        own, other = torch.xlogy(a, a).sum(-1), torch.xlogy(b, b).sum(-1)
        for n, shift in enumerate(self.shifts):
            moved, middle = b.roll(shift, -3), (a + b.roll(shift, -3)) / 2
            self.tvd[n, ..., rows] += (a - moved).abs().sum(-1) / 2
            self.jsd[n, ..., rows] += (own + other.roll(shift, -2)) / 2 - torch.xlogy(middle, middle).sum(-1)


def _changes(layer: int, pair: _Pair, permutations: int) -> list[HeadChange]:
    heads = pair.shape[-3]
    count = min(permutations, heads - 1)
    found = _Distances(pair.shape, [1 + n * (heads - 1) // count for n in range(count)])  # shifts, evenly spread
    stream(pair, found)
    if not bool(torch.isfinite(found.sums).all()):
        raise ModelError(
            f"compare: the weights of layer {layer} are not finite: look at the model's weights and dtype."
        )
    found.finish()
    means = found.means()  # (2, 1 + count, H)
    mean = means[:, 1:].mean(1)
    std = means[:, 1:].std(1) if count > 1 else torch.full_like(mean, torch.nan)
    columns = torch.stack([means[0, 0], means[1, 0], mean[0], std[0], mean[1], std[1]], -1).tolist()
    return [HeadChange(layer, head, tvd, jsd, *map(finite, others)) for head, (tvd, jsd, *others) in enumerate(columns)]


def _maps(given: Compared) -> list[AttentionMap]:
    """The maps of what is given, a layer each."""
    maps = getattr(given, "maps", given)
    found = [maps] if isinstance(maps, AttentionMap) else list(maps) if isinstance(maps, Sequence) else []
    if not found or not all(isinstance(attn, AttentionMap) for attn in found):
        raise DTypeError(
            f"compare: expected two views, as look(…) returns them, two recordings, or maps, got {describe(given)}."
        )
    return found


def _layers(a: Compared, b: Compared, ours: int, theirs: int) -> list[int]:
    """The numbers of the layers; ShapeError where they do not correspond, or the texts were cut otherwise."""
    numbers, others = (list(getattr(x, "layers", range(n))) for x, n in ((a, ours), (b, theirs)))
    if numbers != others:
        raise ShapeError(
            f"compare: {len(numbers)} layers ({numbers[0]} to {numbers[-1]}) in one, {len(others)} ({others[0]} to"
            f" {others[-1]}) in the other; expected the same layers in both."
        )
    pieces, other = (getattr(x, "tokens", None) for x in (a, b))
    if pieces != other and pieces and other and "".join(pieces) == "".join(other):
        raise ShapeError(
            f"compare: one text, cut into {len(pieces)} tokens in one and {len(other)} in the other, by different"
            " tokenizers; so its tokens do not correspond."
        )
    return numbers
