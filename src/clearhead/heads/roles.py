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
from clearhead.heads.judging import CROSS, ROLES, judge, role_of
from clearhead.heads.pairs import Pairs, Tokens, is_delimiter
from clearhead.heads.table import Head, HeadTable
from clearhead.kernels.tiles import Reducer
from clearhead.maps import reductions as reduce
from clearhead.maps.base import AttentionMap
from clearhead.maps.expected import Expected, ExpectedMass
from clearhead.maps.softmax import SoftmaxMap

__all__ = [
    "CROSS",
    "ROLES",
    "Head",
    "HeadTable",
    "LayerScores",
    "Scorer",
    "pooled",
    "role_of",
    "score_cross",
    "score_layer",
]

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
    queries: list[dict[str, int]]  # of how many queries each score is the mean; "entropy": those that attend
    details: list[dict[str, float | None]]  # further scores, for what a role is more exactly
    detail_baselines: list[dict[str, float | None]]

    def heads(self, layer: int) -> list[Head]:
        """One `Head` each."""
        return [self._head(layer, h) for h in range(len(self.scores))]

    def _head(self, layer: int, h: int) -> Head:
        scores, baselines, details = self.scores[h], self.baselines[h], self.details[h]
        found = judge({**scores, **details}, {**baselines, **self.detail_baselines[h]})
        known = (found.detail, found.confidence, details)
        return Head(layer, h, found.role, scores, baselines, self.entropy[h], self.distance[h], *known)


def pooled(texts: Sequence[LayerScores]) -> LayerScores:
    """The scores of one layer over several texts: means over the queries of all of them, each text with its own sinks.

    Args: texts: the layer's scores on each. Returns: LayerScores without sinks, since these are places in one text.
    """
    heads = range(len(texts[0].scores))

    def means(table: str) -> list[dict[str, float | None]]:
        tables = [(getattr(text, table), text.queries) for text in texts]
        return [
            {name: _over([(known[h][name], queries[h][name]) for known, queries in tables]) for name in tables[0][0][h]}
            for h in heads
        ]

    def over_rows(what: str) -> list[float | None]:
        return [_over([(getattr(text, what)[h], text.queries[h]["entropy"]) for text in texts]) for h in heads]

    return LayerScores(
        means("scores"),
        means("baselines"),
        [one or 0.0 for one in over_rows("entropy")],
        over_rows("distance"),
        [],
        [{name: sum(text.queries[h][name] for text in texts) for name in texts[0].queries[h]} for h in heads],
        means("details"),
        means("detail_baselines"),
    )


def _over(means: Sequence[tuple[float | None, int]]) -> float | None:
    """The mean over all, of means each of which is over so many."""
    known = [(mean, n) for mean, n in means if mean is not None and n]
    return sum(mean * n for mean, n in known) / sum(n for _, n in known) if known else None


class Scorer:
    """Scores the heads of maps (H, T, S) of one text, one after another; what all of them share is found once.

    Args:
        ids: token ids (S,).
        pieces: of text, one a token: heads that rest on punctuation and special tokens are known by them.
        given: relations of your own, as `Parse.pairs` gives them; a head that follows one has it as its detail.
        near: of an image, which patches are near a patch; scores that ask for an order of tokens are left out then.
    """

    def __init__(
        self,
        ids: Tensor,
        *,
        pieces: Sequence[str] | None = None,
        given: Mapping[str, Pairs] | None = None,
        near: Pairs | None = None,
    ) -> None:
        tokens = Tokens(ids.cpu())
        self.ids, self._near = ids, tokens.near(SINK_DISTANCE - 1)
        self._delimiters = torch.tensor([n for n, piece in enumerate(pieces or ()) if is_delimiter(piece)]).long()
        around = (
            {} if near is not None else {f"offset {o:+}": tokens.offset(o) for o in range(-8, 9) if o not in (0, -1)}
        )
        self._details = {**around, **(given or {})}
        in_order = {
            "previous": tokens.previous(),
            "self": tokens.itself(),
            "local": tokens.near(SINK_DISTANCE - 1, least=2),
            "duplicate": tokens.same_token(later=True),
            "induction": tokens.induction(later=True),
        }
        self._expected = in_order if near is None else {"self": tokens.itself(), "local": near}
        self._all = {name: _of_tokens(pairs) for name, pairs in {**self._expected, **self._details}.items()}
        self._even: tuple[Any, _Even] | None = None

    @torch.no_grad()
    def __call__(self, attn: AttentionMap, *more: Reducer) -> LayerScores:
        """The scores of a map's heads, in one pass that `more` reducers share.

        Cost: one pass over the map; O(D) a pair of tokens that a relation expects. Raises ShapeError.
        """
        if len(attn.shape) != 3:
            raise ShapeError(
                f"score_layer({attn!r}): expected one sequence, a map (H, T, S): index the batch, attn[0]."
            )
        if self.ids.shape != attn.shape[-1:]:
            raise ShapeError(f"score_layer: {attn!r} has {attn.shape[-1]} keys, token ids are {describe(self.ids)}.")
        even, heads = self._even_of(attn), attn.shape[0]
        there = {name: self._all[name] for name, mass in even.masses.items() if bool((mass.result > 0).any())}
        seen = _Pass(attn, there)
        near = ExpectedMass(attn, self._near.expected)
        attn._stream(*seen.reducers(), near, *more)
        sinks = _sinks((seen.received.result - near.received) / even.far.clamp(min=1))
        where = even.queries(sinks)
        tables = []
        for one in (seen, even):
            found = one.scores(sinks, where, even, heads) | self._on_delimiters(one, even, heads)
            tables += [_rows({name: found.get(name) for name in names}, heads) for names in self._names(found)]
        counts = where | {"delimiter": even.attends, "entropy": even.attends}
        return LayerScores(
            tables[0],
            tables[2],
            _mean(seen.entropy.result, even.attends.expand(heads, -1)),
            _mean(seen.distance.result, even.attends.expand(heads, -1)),
            sinks.tolist(),
            _counted(counts, heads),
            tables[1],
            tables[3],
        )

    def _names(self, found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Those of the scores, and those of details."""
        scores = ["first", "sink", *self._expected, "broad"]
        return scores, [name for name in found if name not in scores]

    def _on_delimiters(self, one: _Pass, even: _Pass, heads: int) -> dict[str, list[float | None]]:
        """The mean share of delimiters other than the query itself: column sums, so that it costs nothing."""
        at, positions = self._delimiters.to(one.attn.device), one.attn.positions
        if not len(at) or not bool(even.attends.any()):
            return {}
        own = one.masses["self"].result[..., torch.isin(positions, at)].sum(-1) if "self" in one.masses else 0.0
        total = one.received.result.double()[..., at].sum(-1) - own
        return {"delimiter": (total / even.attends.sum(-1)).expand(heads).tolist()}

    def _even_of(self, attn: AttentionMap) -> _Even:
        """The uniform head on the same mask: that of the map before, if it has the same rule."""
        rule = (attn.mask, attn.shape) if isinstance(attn, SoftmaxMap) and attn.bias is None else object()
        if self._even is None or self._even[0] != rule:
            # Where all heads see the same keys, one uniform head is the baseline of all.
            self._even = rule, _Even((attn[:1] if attn.heads_alike else attn).uniform(), self._all, self._near)
        return self._even[1]


def _of_tokens(pairs: Pairs) -> Pairs:
    """The pairs of tokens that pairs of words are."""
    tokens = torch.arange(len(pairs.keys))
    if torch.equal(pairs.keys, tokens):
        return pairs
    _, t, s = pairs.tokens()
    return Pairs.listed(pairs.name, zip(t.tolist(), s.tolist(), strict=True), tokens, tokens)


class _Pass:
    """Everything the scores need of one map, gathered in one pass."""

    def __init__(self, attn: AttentionMap, expected: Mapping[str, Pairs]) -> None:
        lead, (T, S), like = attn.shape[:-2], attn.shape[-2:], attn.like
        self.attn = attn
        self.masses = {name: ExpectedMass(attn, pairs.expected) for name, pairs in expected.items()}
        self.entropy = reduce.PerQuery(lead, T, like, reduce.entropy)
        self.distance = reduce.PerQuery(lead, T, like, reduce.distance(attn.positions))
        self.peak = reduce.PerQuery(lead, T, like, reduce.peak, maximum=True)
        self.received = reduce.PerKey(lead, S, like)

    def reducers(self) -> list[Any]:
        return [*self.masses.values(), self.entropy, self.distance, self.peak, self.received]

    @property
    def attends(self) -> Tensor:
        """(H, T): the queries that may attend to something."""
        return self.peak.result > 0

    def scores(self, sinks: Tensor, where: Mapping[str, Tensor], even: _Even, heads: int) -> dict[str, Any]:
        """Of each score the means over the queries that count, a head each."""
        found = {
            "first": _mean_or_none(self.attn.mass(0), where["first"], heads),
            "sink": _mean_or_none(self.attn.mass(sinks), where["sink"], heads),
        }
        for name, mass in even.masses.items():
            share = self.masses[name].result if name in self.masses else torch.zeros_like(mass.result)
            found[name] = _mean_or_none(share, where[name], heads)
        most = even.entropy.result.where(where["broad"], 1.0)
        return found | {"broad": _mean_or_none(self.entropy.result / most, where["broad"], heads)}


class _Even(_Pass):
    """The same of a uniform head, which also decides which queries count."""

    def __init__(self, attn: AttentionMap, expected: Mapping[str, Pairs], near: Pairs) -> None:
        super().__init__(attn, expected)
        attn._stream(*self.reducers())
        T, S = attn.shape[-2:]
        count = self.peak.result.reciprocal().where(self.attends, 0)  # of keys that a query sees
        _, t, s = near.tokens()
        t, s = (x[t >= S - T].to(attn.device) for x in (t, s))
        close = (attn.pick(t - (S - T), s) > 0).to(count)
        self.far = (attn.mT @ count[..., None])[..., 0].round().index_add(-1, s, -close)  # who sees a key from afar
        self._on_sinks: dict[tuple[str, int], Tensor] = {}

    def queries(self, sinks: Tensor) -> dict[str, Tensor]:
        """(H, T) for each score, the queries that count: they may see three keys or more, since with fewer there is
        little choice; for sinks they are none themselves; for relations they expect a key, and no sink."""
        choice = self.attends & (self.peak.result < 0.4)
        others = choice & ~torch.isin(self.attn.positions, sinks)
        seen = self.attn.columns(sinks) > 0  # (H, T, sinks)
        expects = {name: choice & self._expects(name, sinks, seen) for name in self.masses}
        return {"first": others, "sink": others, "broad": choice, **expects}

    def _expects(self, name: str, sinks: Tensor, seen: Tensor) -> Tensor:
        """The queries with an expected key, no sink among them.

        What rests on a sink is no evidence of a relation, whichever the relation.
        """
        mass = self.masses[name]
        on_sinks = torch.stack([self._expecting(name, int(sink)) for sink in sinks], -1)
        return (mass.result > 0) & ~(seen & on_sinks).any(-1)

    def _expecting(self, name: str, key: int) -> Tensor:
        """The queries (T,) that expect a key; layers often share their sinks."""
        if (name, key) not in self._on_sinks:
            mass = self.masses[name]
            self._on_sinks[name, key] = mass.expected.holds(key)[mass.before :]
        return self._on_sinks[name, key]


def _sinks(share: Tensor) -> Tensor:
    """The first token, and every key that gets 6 % of the attention of far queries that see it, mean over heads."""
    found = share.mean(0) >= SINK_SHARE
    found[0] = True
    return found.nonzero().squeeze(-1)


def score_layer(attn: AttentionMap, ids: Tensor, *more: Reducer, near: Pairs | None = None) -> LayerScores:
    """Score every head of a map (H, T, S) over the token ids (S,): `Scorer` for several maps of one text."""
    return Scorer(ids, near=near)(attn, *more)


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
    attn._stream(*seen.reducers(), *more)
    even.attn._stream(*even.reducers())
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
    nothing: list[dict[str, float | None]] = [{} for _ in range(heads)]
    where = {"sink": attends, "aligned": attends, "broad": spread, "entropy": attends}
    sums = (table(seen), table(even), entropy, [None] * heads, sinks.tolist(), _counted(where, heads))
    return LayerScores(*sums, nothing, nothing)


def _as_far_through(T: int, S: int) -> Expected:
    """Of cross-attention: keys about as far through their text as the query through its own, a tenth of it away."""
    along, apart = torch.arange(T) * (S - 1) / max(1, T - 1), max(1.0, S / 10)
    start, stop = (along - apart).ceil().clamp(0, S).long(), (along + apart).floor().add(1).clamp(0, S).long()
    return Expected(torch.arange(S), start, stop)


class _Crossing:
    """What the scores of cross-attention need of one map, gathered in one pass."""

    def __init__(self, attn: AttentionMap) -> None:
        lead, (T, S), like = attn.shape[:-2], attn.shape[-2:], attn.like
        self.attn = attn
        self.aligned = ExpectedMass(attn, _as_far_through(T, S).to(attn.device))
        self.entropy = reduce.PerQuery(lead, T, like, reduce.entropy)
        self.peak = reduce.PerQuery(lead, T, like, reduce.peak, maximum=True)
        self.received = reduce.PerKey(lead, S, like)

    def reducers(self) -> list[Any]:
        return [self.aligned, self.entropy, self.peak, self.received]

    @property
    def attends(self) -> Tensor:
        """(H or 1, T): the queries that may attend to something."""
        return self.peak.result > 0


def _rows(columns: Mapping[str, Any], heads: int) -> list[dict[str, float | None]]:
    """A dict a head."""
    return [{name: None if column is None else column[h] for name, column in columns.items()} for h in range(heads)]


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
