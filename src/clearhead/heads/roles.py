"""Roles: what a head mostly does, read off its scores, each score beside what a uniform head would get.

A score is a share of attention, so a head that spreads evenly over what it may see scores something too: the baseline.
Scores describe; whether a head matters to the model is another question (knock it out and look at the loss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from clearhead._checks import describe
from clearhead.errors import ShapeError
from clearhead.heads import relations
from clearhead.kernels.tiles import Reducer, stream
from clearhead.maps import reductions as reduce
from clearhead.maps.base import AttentionMap
from clearhead.masks import MaskRule

__all__ = ["CROSS", "ROLES", "Head", "HeadTable", "LayerScores", "role_of", "score_cross", "score_layer"]

ROLES = ("sink", "previous", "induction", "duplicate", "self", "local", "broad", "other")
CROSS = ("sink", "aligned", "broad", "other")  # of heads whose keys are another text
SPECIFIC = ("previous", "induction", "duplicate", "self", "local", "aligned")
SINK_DISTANCE = 9  # a sink is looked at from at least this far away …
SINK_SHARE = 0.06  # … with this share of the attention of those queries, mean over the layer's heads


@dataclass(frozen=True)
class Head:
    """One head: its role, its scores and those of a uniform head on the same mask.

    Scores are mean shares of attention in [0, 1], over the queries that may see three keys or more: first and sink (of
    queries that are no sinks themselves), previous, self, local (2 to 8 tokens away), duplicate (other copies of the
    token), induction (the token after one), the last five over queries that have such keys and no sink among them;
    broad is the entropy over its maximum. Of cross-attention, over all queries: sink (keys that collect three times
    their share), aligned (keys as far through their text as the query is through its own), broad. In an image local
    means patches one or two away, and scores that ask for the order of tokens are left out. None where no query counts.
    Entropy in nats, distance in tokens; None between two texts.
    """

    layer: int
    head: int
    role: str
    scores: Mapping[str, float | None]
    baselines: Mapping[str, float | None]
    entropy: float
    distance: float | None

    @property
    def label(self) -> str:
        """L17H5, zero-based."""
        return f"L{self.layer}H{self.head}"

    @property
    def strength(self) -> float:
        """The score of the head's role; 0 for "other"."""
        return self.scores.get(self.role) or 0.0

    @property
    def summary(self) -> str:
        """Its label, the score of its role and that of a uniform head: ``L17H5 0.51 / 0.02``.

        The score alone for "broad", since a uniform head has all the entropy there is; "other" has none.
        """
        score, baseline = self.scores.get(self.role), self.baselines.get(self.role)
        if score is None or baseline is None:
            return self.label
        return f"{self.label} {score:.2f}" + ("" if self.role == "broad" else f" / {baseline:.2f}")


class HeadTable(Sequence[Head]):
    """All heads of a view, layer by layer."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self._heads = tuple(heads)

    @overload
    def __getitem__(self, index: int) -> Head: ...
    @overload
    def __getitem__(self, index: slice) -> HeadTable: ...
    def __getitem__(self, index: int | slice) -> Head | HeadTable:
        return HeadTable(self._heads[index]) if isinstance(index, slice) else self._heads[index]

    def __len__(self) -> int:
        return len(self._heads)

    def counts(self) -> dict[str, int]:
        """How many heads have each role; "aligned" where there are heads of cross-attention."""
        roles = (*ROLES, "aligned") if any("aligned" in head.scores for head in self) else ROLES
        return {role: sum(head.role == role for head in self) for role in roles}

    def strongest(self, role: str, n: int = 5) -> list[Head]:
        """The heads of a role, strongest first."""
        if role not in (*ROLES, *CROSS):
            raise ValueError(f"strongest({role!r}): the roles are {', '.join(dict.fromkeys((*ROLES, *CROSS)))}.")
        return sorted((head for head in self if head.role == role), key=lambda head: -head.strength)[:n]

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {role}" for role, n in self.counts().items() if n)
        return f"HeadTable({len(self)} heads: {counts})"


def role_of(scores: Mapping[str, float | None], baselines: Mapping[str, float | None]) -> str:
    """The role that a head's scores, beside a uniform head's, add up to.

    Of previous, induction, duplicate, self, local and aligned with a score ≥ .25 and ≥ 1.25 times the baseline, the
    one furthest above its baseline; else sink if ≥ .7; broad if the entropy is ≥ .6 of its maximum; sink if ≥ .5;
    other. Without the baseline nearly every head is "local" on a text of ten tokens, where most keys are near.

    >>> role_of({"previous": 0.4, "sink": 0.5}, {"previous": 0.1}), role_of({"local": 0.6, "sink": 0.8}, {"local": 0.6})
    ('previous', 'sink')
    """
    value, base = ({name: table.get(name) or 0.0 for name in (*ROLES, *CROSS)} for table in (scores, baselines))
    found = [name for name in SPECIFIC if value[name] >= max(0.25, 1.25 * base[name])]
    if found:
        return max(found, key=lambda name: value[name] - base[name])
    if value["sink"] >= 0.7:
        return "sink"
    if value["broad"] >= 0.6:
        return "broad"
    return "sink" if value["sink"] >= 0.5 else "other"


@dataclass(frozen=True)
class LayerScores:
    """The scores of a layer's heads on one text, and where its sinks are."""

    scores: list[dict[str, float | None]]  # one a head
    baselines: list[dict[str, float | None]]
    entropy: list[float]
    distance: Sequence[float | None]
    sinks: list[int]

    def heads(self, layer: int) -> list[Head]:
        """One `Head` each."""
        rows = zip(self.scores, self.baselines, self.entropy, self.distance, strict=True)
        return [Head(layer, h, role_of(s, b), s, b, e, d) for h, (s, b, e, d) in enumerate(rows)]


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
    return LayerScores(table(seen), table(even), entropy, [None] * heads, sinks.tolist())


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


def _mean_or_none(values: Tensor, where: Tensor, heads: int) -> list[float | None]:
    values, where = values.expand(heads, -1), where.expand(heads, -1)
    return [mean if n else None for mean, n in zip(_mean(values, where), where.sum(-1).tolist(), strict=True)]


def _mean(values: Tensor, where: Tensor) -> list[float]:
    """The mean over some queries, a head each, summed in float64."""
    total = values.double().where(where, 0).sum(-1)
    means: list[float] = (total / where.sum(-1).clamp(min=1)).tolist()
    return means
