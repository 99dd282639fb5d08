"""Relations: which keys are expected, and how much weight a map gives them."""

from __future__ import annotations

import pytest
import torch

from clearhead import DenseMap, ShapeError, SoftmaxMap, masks
from clearhead.heads import RelationMass, relations
from clearhead.kernels import tiles
from clearhead.masks import MaskRule

IDS = torch.tensor([5, 7, 7, 5, 9, 7, 5])


def expected(rule: MaskRule, T: int, S: int) -> torch.Tensor:
    one = torch.zeros(1, dtype=torch.long)
    return rule.bind(T, S).tile(slice(0, T), slice(0, S), one, one)[0, 0]


def test_same_token_is_every_other_copy() -> None:
    want = [[s != t and IDS[s] == IDS[t] for s in range(7)] for t in range(7)]
    assert expected(relations.same_token(IDS), 7, 7).tolist() == want


def test_induction_is_the_token_after_another_copy() -> None:
    want = [[s >= 1 and s not in (t, t + 1) and IDS[s - 1] == IDS[t] for s in range(7)] for t in range(7)]
    assert expected(relations.induction(IDS), 7, 7).tolist() == want


@pytest.mark.parametrize(
    ("rule", "inside"),
    [
        (relations.previous(), lambda back: back == 1),
        (relations.to_self(), lambda back: back == 0),
        (relations.local(), lambda back: 2 <= abs(back) <= 8),
        (relations.far(9), lambda back: abs(back) >= 9),
    ],
)
def test_bands_with_fewer_queries_than_keys(rule: MaskRule, inside: object) -> None:
    T, S = 5, 23
    want = [[bool(inside(t + S - T - s)) for s in range(S)] for t in range(T)]  # type: ignore[operator]
    assert expected(rule, T, S).tolist() == want


@pytest.mark.parametrize("tile", [(3, 5), (128, 4096)])
def test_relation_mass_equals_the_dense_sum(tile: tuple[int, int]) -> None:
    torch.manual_seed(0)
    T = 300
    q, k = torch.randn(2, T, 8), torch.randn(2, T, 8)
    attn = SoftmaxMap(q, k, mask=masks.causal())
    ids = torch.randint(0, 9, (T,))
    dense = attn.to_dense().double()
    for rule in (relations.same_token(ids), relations.induction(ids), relations.local(), relations.previous()):
        mass = RelationMass(attn, rule)
        with tiles.tile_size(*tile):
            tiles.stream(attn, mass)
        want = (dense * expected(rule, T, T)).sum(-1)
        torch.testing.assert_close(mass.result.double(), want, rtol=0, atol=4 * T**0.5 * torch.finfo(q.dtype).eps)


def test_late_received_leaves_the_near_queries_out() -> None:
    torch.manual_seed(0)
    weights = torch.rand(2, 40, 40)
    attn = DenseMap(weights)
    late = relations.LateReceived(attn, 9)
    with tiles.tile_size(7, 11):
        tiles.stream(attn, late)
    apart = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    torch.testing.assert_close(late.result, (weights.double() * (apart >= 9)).sum(-2), rtol=0, atol=1e-5)


def test_token_ids_of_another_length_are_refused() -> None:
    attn = SoftmaxMap(torch.randn(2, 4, 8), torch.randn(2, 4, 8))
    with pytest.raises(ShapeError, match=r"one per key, \(4,\), got \(7,\)"):
        RelationMass(attn, relations.same_token(IDS))
    with pytest.raises(ShapeError, match=r"token ids of a sequence.*int64 tensor of shape \(1, 7\)"):
        relations.induction(IDS[None])


def test_relations_are_between_tokens_not_rows_of_a_selection() -> None:
    attn = SoftmaxMap(torch.randn(2, 6, 8), torch.randn(2, 6, 8))
    with pytest.raises(ShapeError, match="relations need every query"):
        RelationMass(attn[:, [1, 3]], relations.previous())
    with pytest.raises(ShapeError, match="relations need every query"):
        relations.LateReceived(attn[:, [1, 3]], 9)


def test_late_received_counts_who_may_see_a_key() -> None:
    attn = SoftmaxMap(torch.zeros(1, 1, 20, 4), torch.zeros(1, 1, 20, 4), mask=masks.causal())[0]
    count = relations.LateReceived(attn, 9, count=True)
    tiles.stream(attn, count)
    assert count.result[0].tolist() == [max(0, 11 - s) for s in range(20)]


def test_near_patches_are_two_rows_or_columns_away_at_most() -> None:
    """A special token, then 3 × 4 patches."""
    seen = expected(relations.near_patches(1, 3, 4), 13, 13)
    places = {1 + 4 * row + column: (row, column) for row in range(3) for column in range(4)}
    for t in range(13):
        for s in range(13):
            patches = t in places and s in places and t != s
            near = patches and all(abs(a - b) <= 2 for a, b in zip(places[t], places[s], strict=True))
            assert bool(seen[t, s]) is near


def test_aligned_keys_are_as_far_through_their_text() -> None:
    for T, S in ((1, 5), (5, 1), (4, 40), (40, 4), (9, 9)):
        seen = expected(relations.aligned(), T, S)
        assert seen[0, 0]
        assert seen[T - 1, S - 1 if T > 1 else 0]
        assert seen.any(-1).all()
    assert not expected(relations.aligned(), 9, 9)[0, 3]
