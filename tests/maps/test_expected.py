"""The weight on expected keys: what tiles, the compiled loop and single weights give is what the dense weights say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import DenseMap, ShapeError, SoftmaxMap, masks
from clearhead.heads import Pairs, Tokens
from clearhead.heads.pairs import near_patches
from clearhead.kernels import tiles
from clearhead.kernels.path import force
from clearhead.maps import compiled
from clearhead.maps.expected import ExpectedMass

N = 120
IDS = torch.randint(0, 9, (N,), generator=torch.Generator().manual_seed(0))
TEXT = Tokens(IDS)
RELATIONS = {
    "same token": TEXT.same_token(later=True),
    "induction": TEXT.induction(later=True),
    "nearest": TEXT.same_token(nearest=True),
    "local": TEXT.near(8, least=2),
    "previous": TEXT.previous(),
    "listed": TEXT.pairs([(0, 0), (7, 3), (7, 2), (110, 119)]),
}


def dense(pairs: Pairs) -> Tensor:
    _, t, s = pairs.tokens()
    found = torch.zeros(len(pairs.queries), len(pairs.keys), dtype=torch.float64)
    found[t, s] = 1
    return found


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1))


Q, K = numbers(1, 4, N, 8), numbers(1, 2, N, 8)
MAPS = {
    "causal": lambda: SoftmaxMap(Q, K, mask=masks.causal()),
    "both ways": lambda: SoftmaxMap(Q, K),
    "window": lambda: SoftmaxMap(Q, K, mask=masks.sliding_window(20)),
    "last queries": lambda: SoftmaxMap(Q[:, :, -40:], K, mask=masks.causal()),
    "soft-capped": lambda: SoftmaxMap(Q, K, mask=masks.causal(), softcap=2.0),
    "learned sinks": lambda: SoftmaxMap(Q, K, mask=masks.causal(), sinks=numbers(4)),
    "scattered": lambda: SoftmaxMap(Q, K, mask=numbers(N, N) > 0),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("way", ["tiles", "small tiles", "compiled"])
def test_it_is_the_dense_sum(name: str, relation: str, way: str) -> None:
    attn, pairs = MAPS[name](), RELATIONS[relation]
    mass, T = ExpectedMass(attn, pairs.expected), attn.shape[-2]
    with (
        force("cpu" if way == "compiled" else "tiles"),
        tiles.tile_size(*((50, 37) if way == "small tiles" else (128, 4096))),
    ):
        if way == "compiled":
            assert compiled.against(attn) is None
        attn._stream(mass)
    wanted = dense(pairs)[-T:] * MAPS[name]().to_dense().double()
    budget = 8 * N**0.5 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(mass.result, wanted.sum(-1), rtol=0, atol=budget)
    torch.testing.assert_close(mass.received, wanted.sum(-2), rtol=0, atol=T**0.5 * budget)


def test_tokens_that_all_expect_each_other_take_n_numbers() -> None:
    pairs = Tokens(torch.zeros(200_000, dtype=torch.long)).same_token(later=True)
    assert sum(x.numel() for x in (pairs.expected.keys, pairs.expected.start, pairs.expected.stop)) == 600_000


@pytest.mark.parametrize("relation", RELATIONS)
def test_which_queries_expect_a_key(relation: str) -> None:
    pairs = RELATIONS[relation]
    for key in (0, 3, 50, N - 1):
        assert torch.equal(pairs.expected.holds(key), dense(pairs)[:, key] > 0)


def test_near_patches_are_two_rows_or_columns_away_at_most() -> None:
    """A special token, then 3 × 4 patches."""
    seen = dense(near_patches(1, 3, 4, 13))
    places = {1 + 4 * row + column: (row, column) for row in range(3) for column in range(4)}
    for t in range(13):
        for s in range(13):
            patches = t in places and s in places and t != s
            near = patches and all(abs(a - b) <= 2 for a, b in zip(places[t], places[s], strict=True))
            assert bool(seen[t, s]) is near


def test_a_selection_and_a_text_of_another_length_are_refused() -> None:
    attn: Any = DenseMap(torch.rand(2, 6, 6))
    with pytest.raises(ShapeError, match="relations need every query"):
        ExpectedMass(attn[:, [1, 3]], Tokens(range(6)).previous().expected)
    with pytest.raises(ShapeError, match=r"a relation of 7 tokens: .* has 6 queries and 6 keys"):
        ExpectedMass(attn, Tokens(range(7)).previous().expected)
