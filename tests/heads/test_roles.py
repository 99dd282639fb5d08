"""Heads with a known behaviour get exactly the scores and the role they must have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clearhead import DenseMap, ShapeError, SoftmaxMap, masks
from clearhead.heads import ROLES, Head, HeadTable, Judgement, Scorer, Tokens, judge, role_of
from clearhead.heads.roles import LayerScores, score_cross, score_layer
from clearhead.masks import MaskRule

CAUSAL = masks.causal()
T = 101  # Olsson et al. 2022: a first token, then 25 random tokens, 4 times


@pytest.fixture
def ids() -> Tensor:
    torch.manual_seed(0)
    return torch.cat([torch.tensor([0]), (torch.randperm(400)[:25] + 1).repeat(4)])


def looking_at(pattern: Tensor, *, mask: MaskRule | None = None) -> SoftmaxMap:
    """One head that spreads evenly over the pattern's visible keys; a query with none looks at the first token."""
    visible = pattern if mask is None else pattern & torch.ones(T, T, dtype=torch.bool).tril()
    visible = visible.clone()
    visible[~visible.any(-1), 0] = True
    bias = torch.where(visible, 0.0, -100.0)  # e^-100: nothing in float32, and yet a key that may be seen
    return SoftmaxMap(torch.zeros(1, 1, T, 4), torch.zeros(1, 1, T, 4), mask=mask, bias=bias)


def score(pattern: Tensor, ids: Tensor, *, mask: MaskRule | None = CAUSAL) -> tuple[LayerScores, Head]:
    scores = score_layer(looking_at(pattern, mask=mask)[0], ids)
    return scores, scores.heads(0)[0]


@pytest.mark.parametrize("role", ["previous", "induction", "duplicate", "self", "local", "broad", "sink"])
def test_a_perfect_head_has_its_role_and_score_1(role: str, ids: Tensor) -> None:
    t, s = torch.arange(T)[:, None], torch.arange(T)
    after = torch.zeros(T, T, dtype=torch.bool)
    after[:, 1:] = (ids[:, None] == ids[None, :-1]) & (s[1:] < t)
    patterns = {
        "previous": t - s == 1,
        "induction": after,
        "duplicate": (ids[:, None] == ids) & (s < t),
        "self": t == s,
        "local": (t - s >= 2) & (t - s <= 8),
        "broad": t >= s,
        "sink": (s == 0) & (t >= 0),
    }
    _, head = score(patterns[role], ids)
    assert head.role == role
    assert head.scores[role] == pytest.approx(1, abs=1e-6)


def test_a_previous_token_head_scores_nothing_on_induction(ids: Tensor) -> None:
    t, s = torch.arange(T)[:, None], torch.arange(T)
    _, head = score(t - s == 1, ids)
    assert head.scores["induction"] < 1e-40


def test_the_uniform_head_is_its_own_baseline(ids: Tensor) -> None:
    """Scores of a head that spreads evenly equal the baselines, and are what counting the pairs gives."""
    attn = SoftmaxMap(torch.zeros(1, 1, T, 4), torch.zeros(1, 1, T, 4), mask=masks.causal())
    scores = score_layer(attn[0], ids)
    head = scores.heads(0)[0]
    assert dict(head.scores) == pytest.approx(dict(head.baselines))
    known = ids.tolist()
    after = [[s for s in range(1, t) if known[s - 1] == known[t]] for t in range(T)]
    shares = [len(keys) / (t + 1) for t, keys in enumerate(after) if t >= 2 and keys]
    assert head.baselines["induction"] == pytest.approx(sum(shares) / len(shares), rel=1e-5)
    assert head.scores["broad"] == pytest.approx(1)
    assert head.entropy == pytest.approx(sum(math.log(t + 1) for t in range(T)) / T, rel=1e-5)


def test_sinks_are_not_only_the_first_token(ids: Tensor) -> None:
    t, s = torch.arange(T)[:, None], torch.arange(T)
    scores, head = score((s == 0) | (s == 40) & (t >= 0), ids)
    assert scores.sinks == [0, 40]
    assert head.role == "sink"
    assert head.scores["sink"] == pytest.approx(1)
    assert head.scores["first"] < 0.9
    assert head.scores["local"] == pytest.approx(0, abs=1e-5)  # resting on a sink nearby is no evidence


def test_a_sink_late_in_the_text_needs_no_larger_share(ids: Tensor) -> None:
    """6 % of the attention of the queries that may see it, wherever it stands (7 % here)."""
    q, k = torch.zeros(1, 1, T, 1), torch.zeros(1, 1, T, 1)
    bias = torch.zeros(T, T)
    bias[:, 80] = torch.log(0.07 / 0.93 * torch.arange(T))  # α = e^b / (e^b + t)
    attn = SoftmaxMap(q, k, mask=CAUSAL, bias=bias)[0]
    assert attn[0, :, 80][90:] == pytest.approx([0.07] * (T - 90), rel=1e-4)
    assert score_layer(attn, ids).sinks == [0, 80]


def test_trap_27_every_score_has_the_uniform_baseline_beside_it(ids: Tensor) -> None:
    _, head = score(torch.rand(T, T) > 0.5, ids)
    assert head.scores.keys() == head.baselines.keys() == {*ROLES, "first"} - {"other"}


def test_trap_05_padded_queries_are_left_out(ids: Tensor) -> None:
    """Left padding changes neither scores nor sinks: the padded rows attend to nothing."""
    torch.manual_seed(1)
    q, k = torch.randn(3, T, 8), torch.randn(3, T, 8)
    bare = score_layer(SoftmaxMap(q[None], k[None], mask=masks.causal())[0], ids)
    pad = 17
    longer = [torch.cat([torch.randn(3, pad, 8), x], 1) for x in (q, k)]
    real = torch.tensor([[False] * pad + [True] * T])
    rule = masks.causal() & masks.padding(keys=real, queries=real)
    padded_map = SoftmaxMap(*(x[None] for x in longer), mask=rule)[0]
    padded = score_layer(padded_map, torch.cat([torch.full((pad,), -1), ids]))
    for with_pad, without in zip(padded.scores, bare.scores, strict=True):
        kept = {name: value for name, value in with_pad.items() if name not in ("first", "sink", "local")}
        assert kept == pytest.approx({name: without[name] for name in kept}, abs=1e-5)
    assert padded.entropy == pytest.approx(bare.entropy, rel=1e-5)


def test_texts_too_short_for_a_relation_give_none() -> None:
    head = score_layer(SoftmaxMap(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))[0], torch.tensor([3])).heads(0)[0]
    assert head.role == "other"
    assert head.scores["induction"] is None
    assert head.strength == 0


def test_encoders_see_both_ways(ids: Tensor) -> None:
    t, s = torch.arange(T)[:, None], torch.arange(T)
    near = ((t - s).abs() >= 2) & ((t - s).abs() <= 8)
    _, head = score(near, ids, mask=None)
    assert head.role == "local"
    assert head.scores["local"] == pytest.approx(1, abs=1e-5)


def test_one_uniform_head_serves_all_that_see_the_same_keys(ids: Tensor) -> None:
    """A mask per head gives a baseline per head."""
    q = torch.randn(1, 2, T, 4)
    tril = torch.ones(T, T, dtype=torch.bool).tril()
    seen = torch.stack([tril, tril & ~tril.tril(-5)])[None]
    one, two = score_layer(SoftmaxMap(q, q, mask=masks.dense(seen))[0], ids).baselines
    alone = score_layer(SoftmaxMap(q[:, 1:], q[:, 1:], mask=masks.dense(seen[:, 1:]))[0], ids).baselines[0]
    assert two == pytest.approx(alone)
    assert one["previous"] < two["previous"]


@pytest.mark.parametrize(
    ("scores", "baselines", "role"),
    [
        ({"previous": 0.25, "sink": 0.49}, {}, "previous"),
        ({"previous": 0.25, "sink": 0.5}, {}, "sink"),  # rests twice as much as it looks back
        ({"previous": 0.24, "sink": 0.7, "broad": 0.83}, {}, "sink"),
        ({"sink": 0.6, "broad": 0.73}, {}, "broad"),
        ({"sink": 0.49, "broad": None}, {}, "other"),
        ({"sink": 0.45}, {"sink": 0.04}, "sink"),  # of about a hundred tokens
        ({"sink": 0.44}, {"sink": 0.04}, "other"),
        ({"sink": 0.19}, {"sink": 0.0012}, "sink"),  # of 7,658
        ({"sink": 0.18}, {"sink": 0.0012}, "other"),
    ],
)
def test_role_thresholds(scores: dict[str, float | None], baselines: dict[str, float], role: str) -> None:
    assert role_of(scores, baselines) == role


def test_confidence_is_the_distance_to_the_next_role() -> None:
    assert judge({"previous": 0.25}, {}).confidence == 0
    assert judge({"previous": 1.0}, {}).confidence == 0.75
    assert judge({"previous": 0.5, "broad": 0.9}, {}) == Judgement("previous", "", pytest.approx(0.25))
    assert judge({"previous": 0.2}, {}) == Judgement("other", "", pytest.approx(0.2))
    assert judge({}, {}) == Judgement("other", "", 1.0)


def test_details_say_what_a_role_is_more_exactly(ids: Tensor) -> None:
    t, s = torch.arange(T)[:, None], torch.arange(T)
    assert score((t - s == 3) & (t >= 0), ids)[1].detail == "offset -3"
    _, head = score(t - s == 1, ids)
    assert (head.role, head.detail) == ("previous", "")
    pieces = [" ." if n % 10 == 7 else " word" for n in range(T)]
    stops = (s % 10 == 7) & (t >= s)
    scores = Scorer(ids, pieces=pieces)(looking_at(stops, mask=CAUSAL)[0])
    (head,) = scores.heads(0)
    assert head.detail == "delimiter"
    assert head.details["delimiter"] == pytest.approx(
        (stops & (t != s)).float().sum(-1).div(stops.sum(-1).clamp(min=1)).mean()
    )
    parsed = Tokens(ids).pairs([(n, n - 5) for n in range(5, T)])
    scores = Scorer(ids, given={"nsubj": parsed})(looking_at(t - s == 5, mask=CAUSAL)[0])
    assert scores.heads(0)[0].detail == "nsubj"


def test_trap_27_on_a_short_text_a_role_must_beat_the_uniform_head() -> None:
    """Of ten tokens most are near: a head is not local for looking at what is there."""
    assert role_of({"local": 0.7}, {"local": 0.64}) == "other"
    assert role_of({"local": 0.84, "induction": 0.56}, {"local": 0.64, "induction": 0.10}) == "induction"


def test_head_table() -> None:
    heads = [Head(0, h, "local", {"local": h / 10}, {"local": 0.1}, 1.0, 2.0) for h in range(4)]
    table = HeadTable(heads)
    assert [head.label for head in table.strongest("local", 2)] == ["L0H3", "L0H2"]
    assert table.counts()["local"] == 4
    assert table[1:3][0].head == 1
    assert repr(table) == "HeadTable(4 heads: 4 local)"
    with pytest.raises(ValueError, match=r"'nonsense'.*the roles are sink, previous"):
        table.strongest("nonsense")


def test_a_batch_is_refused() -> None:
    attn = SoftmaxMap(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4))
    with pytest.raises(ShapeError, match=r"expected one sequence, a map \(H, T, S\)"):
        score_layer(attn, torch.arange(5))
    with pytest.raises(ShapeError, match=r"has 5 keys, token ids are a int64 tensor of shape \(4,\)"):
        score_layer(attn[0], torch.arange(4))


def test_smollm2_has_the_induction_heads_it_is_known_for(smollm2: tuple[object, object]) -> None:
    """On repeated random tokens, previous-token and induction heads stand out from the uniform head."""
    import clearhead

    model, _ = smollm2
    torch.manual_seed(0)
    ids = torch.randint(1000, 40000, (25,)).repeat(4)[None]
    with clearhead.record(model) as recording, torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    heads = HeadTable([h for n, attn in enumerate(recording) for h in score_layer(attn[0], ids[0]).heads(n)])
    best = max(heads, key=lambda head: head.scores["induction"])
    assert best.scores["induction"] > 0.5 > 5 * best.baselines["induction"]
    assert max(head.scores["previous"] for head in heads) > 0.5


@pytest.mark.parametrize(("shape", "role"), [((8, 8), "aligned"), ((6, 24), "aligned"), ((24, 6), "aligned")])
def test_a_head_that_follows_the_other_text_is_aligned(shape: tuple[int, int], role: str) -> None:
    rows, columns = shape
    weights = torch.full((1, rows, columns), 1e-9)  # it might look elsewhere
    at = torch.arange(rows) * (columns - 1) / (rows - 1)
    weights[0, torch.arange(rows), at.round().long()] = 1
    scores = score_cross(DenseMap(weights))
    (head,) = scores.heads(4)
    assert (head.role, head.scores["aligned"], head.scores["sink"]) == (role, pytest.approx(1, abs=1e-6), 0.0)
    assert scores.sinks == []


def test_keys_that_collect_three_times_their_share_are_sinks_of_cross_attention() -> None:
    weights = torch.full((2, 10, 20), 0.2 / 19)
    weights[:, :, 7] = 0.8
    scores = score_cross(DenseMap(weights))
    assert scores.sinks == [7]
    assert {head.role for head in scores.heads(0)} == {"sink"}
    assert scores.heads(0)[0].scores["sink"] == pytest.approx(0.8)
    assert scores.heads(0)[0].baselines["sink"] == pytest.approx(1 / 20)


def test_an_even_head_of_cross_attention_is_broad_and_padded_queries_are_left_out() -> None:
    weights = torch.full((1, 10, 20), 1 / 20)
    weights[:, 6:] = 0
    (head,) = score_cross(DenseMap(weights)).heads(0)
    assert (head.role, head.scores["broad"]) == ("broad", pytest.approx(1.0))
    assert head.entropy == pytest.approx(math.log(20), abs=1e-5)
    with pytest.raises(ShapeError, match="one pair of texts"):
        score_cross(DenseMap(weights[None]))
