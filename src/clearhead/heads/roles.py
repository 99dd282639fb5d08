"""Roles: what a head mostly does, read off its scores, each score beside what a uniform head would get.

A score is a share of attention, so a head that spreads evenly over what it may see scores something too: the baseline.
Scores describe; whether a head matters to the model is another question (knock it out and look at the loss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import ShapeError
from clearhead.heads import relations
from clearhead.heads.table import CROSS, ROLES, Head, HeadTable, role_of
from clearhead.kernels.tiles import Reducer, stream
from clearhead.maps import reductions as reduce
from clearhead.maps.base import AttentionMap
from clearhead.masks import MaskRule

__all__ = ["CROSS", "ROLES", "Head", "HeadTable", "LayerScores", "pooled", "role_of", "score_cross", "score_layer"]

SINK_DISTANCE = 9  # a sink is looked at from at least this far away …
SINK_SHARE = 0.06  # … with this share of the attention of those queries, mean over the layer's heads


@dataclass(frozen=True)
class LayerScores:
    """The scores of a layer's heads on one text, and where its sinks are."""

    scores: list[dict[str, float | None]]  # one a head
    baselines: list[dict[str, float | None]]
    entropy: list[float]
    distance: Sequence[float | None]
    sinks: list[int]
    queries: list[
        dict[str, int]
    ]  # one a head: over how many queries each score is a mean; "entropy": that and distance

    def heads(self, layer: int) -> list[Head]:
        """One `Head` each."""
        rows = zip(self.scores, self.baselines, self.entropy, self.distance, strict=True)
        return [Head(layer, h, role_of(s, b), s, b, e, d) for h, (s, b, e, d) in enumerate(rows)]


def pooled(texts: Sequence[LayerScores]) -> LayerScores:
    """The scores of one layer over several texts: means over the queries of all of them, each text with its own sinks.

    Args: texts: the layer's scores on each. Returns: LayerScores without sinks, since these are places in one text.
    """
    heads = [_pooled_head(texts, h) for h in range(len(texts[0].scores))]
    scores, baselines, entropy, distance, queries = (list(column) for column in zip(*heads, strict=True))
    return LayerScores(scores, baselines, entropy, distance, [], queries)


def _pooled_head(texts: Sequence[LayerScores], h: int) -> tuple[Any, ...]:
    counts = [text.queries[h] for text in texts]
    rows = [n["entropy"] for n in counts]

    def means(tables: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
        return {name: _over([one[name] for one in tables], [n[name] for n in counts]) for name in tables[0]}

    return (
        means([text.scores[h] for text in texts]),
        means([text.baselines[h] for text in texts]),
        _over([text.entropy[h] for text in texts], rows) or 0.0,
        _over([text.distance[h] for text in texts], rows),
        {name: sum(n[name] for n in counts) for name in counts[0]},
    )


def _over(means: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """The mean over all that each of the means is of so many."""
    known = [(mean, n) for mean, n in zip(means, counts, strict=True) if mean is not None and n]
    return sum(mean * n for mean, n in known) / sum(n for _, n in known) if known else None


class _Pass:
    """Everything the scores need of one map, gathered in one pass."""

    def __init__(self, attn: AttentionMap, expected: Mapping[str, MaskRule]) -> None:
        lead, T, like = attn.shape[:-2], attn.shape[-2], attn.like
        self.attn, self.expected = attn, expected
        self.masses = {name: relations.RelationMass(attn, rule) for name, rule in expected.items()}
        self.entropy = reduce.PerQuery(lead, T, like, reduce.entropy)
        self.distance = reduce.PerQuery(lead, T, like, reduce.distance(attn.positions))
        self.peak = reduce.PerQuery(lead, T, like, reduce.peak, maximum=True)
        self.late = relations.LateReceived(attn, SINK_DISTANCE)

    def reducers(self) -> list[Reducer]:
        return [*self.masses.values(), self.entropy, self.distance, self.peak, self.late]

    @property
    def attends(self) -> Tensor:
        """(H, T): the queries that may attend to something."""
        return self.peak.result > 0

    @property
    def chooses(self) -> Tensor:
        """(H, T), of a uniform head: the queries that may see three keys or more; with fewer there is little choice."""
        return (self.peak.result > 0) & (self.peak.result < 0.4)

    def expects(self, name: str, sinks: Tensor) -> Tensor:
        """(H, T), of a uniform head: the queries with an expected key, no sink among them.

        What rests on a sink is no evidence of a relation, whichever the relation.
        """
        T, S = self.attn.shape[-2:]
        t, one = torch.arange(T, device=sinks.device), sinks.new_zeros(1, 1)
        on_sinks = self.expected[name].allows(one, one, t[:, None], sinks, T, S)
        return (self.masses[name].result > 0) & ~((self.attn.columns(sinks) > 0) & on_sinks).any(-1)

    def sinks(self, queries: Tensor) -> Tensor:
        """The first token, and every key that gets 6 % of the attention of far queries that see it, mean over heads.

        `queries` (H or 1, S): how many those are.
        """
        found = (self.late.result / queries.clamp(min=1)).mean(0) >= SINK_SHARE
        found[0] = True
        return found.nonzero().squeeze(-1)


@torch.no_grad()
def score_layer(attn: AttentionMap, ids: Tensor, *more: Reducer, near: MaskRule | None = None) -> LayerScores:
    """Score every head of a map (H, T, S) over the token ids (S,), in one pass that `more` reducers share.

    Args: near: of an image, which patches are near a patch; scores that ask for an order of tokens are left out then.
    Cost: one pass over the map and one over the uniform head on the same mask. Raises ShapeError.
    """
    if len(attn.shape) != 3:
        raise ShapeError(f"score_layer({attn!r}): expected one sequence, a map (H, T, S): index the batch, attn[0].")
    if ids.shape != attn.shape[-1:]:
        raise ShapeError(f"score_layer: {attn!r} has {attn.shape[-1]} keys, token ids are {describe(ids)}.")
    in_order = {
        "previous": relations.previous(),
        "self": relations.to_self(),
        "local": relations.local(),
        "duplicate": relations.same_token(ids),
        "induction": relations.induction(ids),
    }
    expected = in_order if near is None else {"self": relations.to_self(), "local": near}
    # Where all heads see the same keys, one uniform head is the baseline of all.
    alike = attn[:1] if attn.heads_alike else attn
    seen, even = _Pass(attn, expected), _Pass(alike.uniform(), expected)
    stream(attn, *seen.reducers(), *more)
    far = relations.LateReceived(even.attn, SINK_DISTANCE, count=True)
    stream(even.attn, *even.reducers(), far)
    sinks, heads = seen.sinks(far.result), attn.shape[0]
    return LayerScores(
        _scores(seen, even, sinks, heads),
        _scores(even, even, sinks, heads),
        _mean(seen.entropy.result, even.attends.expand(heads, -1)),
        _mean(seen.distance.result, even.attends.expand(heads, -1)),
        sinks.tolist(),
        _queries(even, sinks, heads),
    )


@torch.no_grad()
def score_cross(attn: AttentionMap, *more: Reducer) -> LayerScores:
    """Score every head of a map (H, T, S) between two texts, in one pass that `more` reducers share.

    A sink is a key that gets 6 % of all attention, three times its share, and as much as three queries have, mean over
    heads: in a short target each key that is looked at gets a good part.
    Cost: one pass over the map and one over the uniform head on the same mask. Raises ShapeError.
    """
    if len(attn.shape) != 3:
        raise ShapeError(f"score_cross({attn!r}): expected one pair of texts, a map (H, T, S): index the batch.")
    heads, T, S = attn.shape
    alike = attn[:1] if attn.heads_alike else attn
    seen, even = _Crossing(attn), _Crossing(alike.uniform())
    stream(attn, *seen.reducers(), *more)
    stream(even.attn, *even.reducers())
    attends = even.attends
    share = (seen.received.result / attends.sum(-1, keepdim=True).clamp(min=1)).mean(0)
    sinks = (share >= max(SINK_SHARE, 3 / S, 3 / max(1, T))).nonzero().squeeze(-1)
    most = even.entropy.result.where(attends & (even.entropy.result > 0), 1.0)

    def table(one: _Crossing) -> list[dict[str, float | None]]:
        columns = {
            "sink": _mean_or_none(one.attn.mass(sinks), attends, heads),
            "aligned": _mean_or_none(one.aligned.result, attends, heads),
            "broad": _mean_or_none(one.entropy.result / most, attends & (even.entropy.result > 0), heads),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    entropy = _mean(seen.entropy.result, attends.expand(heads, -1))
    spread = attends & (even.entropy.result > 0)
    where = {"sink": attends, "aligned": attends, "broad": spread, "entropy": attends}
    return LayerScores(table(seen), table(even), entropy, [None] * heads, sinks.tolist(), _counted(where, heads))


class _Crossing:
    """What the scores of cross-attention need of one map, gathered in one pass."""

    def __init__(self, attn: AttentionMap) -> None:
        lead, (T, S), like = attn.shape[:-2], attn.shape[-2:], attn.like
        self.attn = attn
        self.aligned = relations.RelationMass(attn, relations.aligned())
        self.entropy = reduce.PerQuery(lead, T, like, reduce.entropy)
        self.peak = reduce.PerQuery(lead, T, like, reduce.peak, maximum=True)
        self.received = reduce.PerKey(lead, S, like)

    def reducers(self) -> list[Reducer]:
        return [self.aligned, self.entropy, self.peak, self.received]

    @property
    def attends(self) -> Tensor:
        """(H or 1, T): the queries that may attend to something."""
        return self.peak.result > 0


def _scores(one: _Pass, even: _Pass, sinks: Tensor, heads: int) -> list[dict[str, float | None]]:
    """A dict a head. Which queries count is decided by the uniform head: those with a choice and an expected key."""
    choice = even.chooses
    others = choice & ~torch.isin(one.attn.positions, sinks)
    table = {
        "first": _mean_or_none(one.attn.mass(0), others, heads),
        "sink": _mean_or_none(one.attn.mass(sinks), others, heads),
    }
    for name in one.masses:
        table[name] = _mean_or_none(one.masses[name].result, even.expects(name, sinks) & choice, heads)
    most = even.entropy.result.where(choice, 1.0)
    table["broad"] = _mean_or_none(one.entropy.result / most, choice, heads)
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def _queries(even: _Pass, sinks: Tensor, heads: int) -> list[dict[str, int]]:
    """Over how many queries each score of `_scores` is a mean, a dict a head."""
    choice = even.chooses
    others = choice & ~torch.isin(even.attn.positions, sinks)
    where = {"first": others, "sink": others, "broad": choice, "entropy": even.attends}
    return _counted(where | {name: even.expects(name, sinks) & choice for name in even.masses}, heads)


def _counted(where: Mapping[str, Tensor], heads: int) -> list[dict[str, int]]:
    counts = {name: queries.sum(-1).expand(heads).tolist() for name, queries in where.items()}
    return [dict(zip(counts, row, strict=True)) for row in zip(*counts.values(), strict=True)]


def _mean_or_none(values: Tensor, where: Tensor, heads: int) -> list[float | None]:
    values, where = values.expand(heads, -1), where.expand(heads, -1)
    return [mean if n else None for mean, n in zip(_mean(values, where), where.sum(-1).tolist(), strict=True)]


def _mean(values: Tensor, where: Tensor) -> list[float]:
    """The mean over some queries, a head each, summed in float64."""
    total = values.double().where(where, 0).sum(-1)
    means: list[float] = (total / where.sum(-1).clamp(min=1)).tolist()
    return means
