"""The textbook itself: by hand, by loops, and by PyTorch in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from clearhead import reference
from clearhead.testing.contract import _pool


def test_masks_by_hand() -> None:
    assert reference.causal(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert reference.causal(3, 2).int().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert reference.causal_upper_left(2, 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert reference.sliding_window(4, 4, 2).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert reference.documents(2, 3, [0, 1, 1]).int().tolist() == [[0, 1, 1], [0, 1, 1]]
    assert reference.strided(3, 4, 2).int().tolist() == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert reference.block_sparse(2, 3, [[True, False], [True, True]], 2).int().tolist() == [[1, 1, 0], [1, 1, 1]]
    assert reference.global_tokens(2, 3, [2]).int().tolist() == [[0, 0, 1], [1, 1, 1]]
    assert reference.causal(0, 3).shape == (0, 3)
    assert reference.causal(3, 0).shape == (3, 0)


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 3, 5, 4)])
def test_attention_is_pytorchs_in_float64(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    for mask in (None, reference.causal(5, 5)):
        ours = reference.attention(q, k, v, mask=mask)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, mask), atol=1e-14, rtol=1e-13)


def test_grouped_heads_are_interleaved() -> None:
    q, k, v = torch.randn(2, 4, 3, 5), torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 5)
    ours = reference.attention(q, k, v)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    torch.testing.assert_close(ours[:, 1], reference.attention(q[:, 1], k[:, 0], v[:, 0]))


def test_weights_by_hand() -> None:
    q, k = torch.tensor([[1.0]]).double(), torch.tensor([[0.0], [math.log(3.0)]]).double()
    assert reference.weights(q, k).tolist() == [[pytest.approx(0.25), pytest.approx(0.75)]]
    assert reference.weights(q, k, bias=torch.tensor([[math.log(3.0), 0.0]])).tolist() == [[0.5, 0.5]]
    assert reference.weights(q, k, scale=0.0).tolist() == [[0.5, 0.5]]
    assert reference.weights(q[None], k[None], sinks=torch.tensor([math.log(4.0)])).tolist() == [
        [[pytest.approx(1 / 8), pytest.approx(3 / 8)]]
    ]
    capped = reference.scores(q, k, softcap=1.0)
    assert capped.tolist() == [[0.0, pytest.approx(math.tanh(math.log(3.0)))]]


def test_additive_and_linear_weights_by_hand() -> None:
    q, k = torch.tensor([[0.0, 1.0]]).double(), torch.tensor([[1.0, 0.0], [-1.0, 2.0]]).double()
    W, U, v = torch.eye(2).double(), 2 * torch.eye(2).double(), torch.tensor([1.0, -1.0]).double()
    e = [math.tanh(2.0) - math.tanh(1.0), math.tanh(-2.0) - math.tanh(5.0)]
    assert reference.additive_scores(q, k, W, U, v).tolist() == [pytest.approx(e)]
    # φ(q) = (1, 2), φ(k) = (2, 1) and (1/e, 3)
    products = [2 + 2, math.exp(-1) + 6]
    assert reference.linear_weights(q, k).tolist() == [pytest.approx([x / sum(products) for x in products])]
    assert reference.linear_weights(q, k, mask=torch.tensor([[True, False]])).tolist() == [[1, 0]]
    assert reference.linear_weights(q, k, mask=torch.tensor([[False, False]])).tolist() == [[0, 0]]


def test_a_row_without_keys_is_0_and_has_gradients() -> None:
    q = torch.randn(2, 3, requires_grad=True)
    weights = reference.weights(q, q.detach(), mask=torch.tensor([[False, False], [True, False]]))
    assert weights.tolist() == [[0, 0], [1, 0]]
    assert reference.weights(torch.ones(2, 3), torch.ones(0, 3)).shape == (2, 0)


def test_statistics_by_hand() -> None:
    a = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0, 0, 0]]).double()
    assert reference.entropy(a).tolist() == [0, pytest.approx(math.log(2)), 0]
    assert reference.distance(a).tolist() == [0, 0.5, 0]
    assert reference.distance(a[1:]).tolist() == [0.5, 0]  # the queries are the last two tokens
    assert reference.received(a).tolist() == [1.5, 0.5, 0]
    assert reference.pool(a, (1, 3), maximum=True).tolist() == [[1, 0.5, 0]]
    assert reference.pool(a, (3, 1), maximum=False).tolist() == [[1], [1], [0]]
    assert reference.alibi(torch.tensor([0.5]), 2, 3).tolist() == [[[-0.5, 0, 0.5], [-1, -0.5, 0]]]


@pytest.mark.parametrize("maximum", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (3, 2), (5, 7), (2, 7)])
def test_the_contracts_pictures_are_the_textbooks(size: tuple[int, int], maximum: bool) -> None:
    """The contract needs a faster oracle than a loop over all pairs."""
    a = torch.rand(2, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(_pool(a, size, maximum), reference.pool(a, size, maximum=maximum))


def test_the_textbook_is_short() -> None:
    assert len(Path(reference.__file__).read_text().splitlines()) <= 200
