"""Cost follows the number of non-empty blocks, by counts: in the streaming loop and under PyTorch's fused kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import SoftmaxMap, masks
from clearhead.kernels import fused, tiles
from clearhead.maps import softmax

N, BLOCK = 2048, 128
LAYOUT = torch.eye(16).bool() | (torch.arange(16) % 5 == 0)
RULES = {
    "causal": masks.causal(),
    "window": masks.sliding_window(256),
    "sinks + window": masks.first_tokens(4) & masks.causal() | masks.sliding_window(256),
    "global + window": (masks.global_tokens([0, 1000]) | masks.symmetric_window(200)) & masks.causal(),
    "block sparse": masks.block_sparse(LAYOUT, BLOCK) & masks.causal(),
    "strided": masks.strided(1024) & masks.causal() | masks.sliding_window(64),
    "documents": masks.documents(torch.arange(N) // 500),
    "nothing": masks.first_tokens(0),
}
# Of 16 × 16 blocks, counted by hand where that is easy.
BY_HAND = {"causal": 136, "window": 16 + 15 + 14, "sinks + window": 45 + 13, "nothing": 0}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many scores each matrix product gives."""
    counted: list[int] = []
    multiply = softmax.grouped_matmul

    def count(q: Tensor, k: Tensor) -> Tensor:
        scores = multiply(q, k)
        counted.append(scores.numel())
        return scores

    monkeypatch.setattr(softmax, "grouped_matmul", count)
    return counted


class Seen:
    """How many weights a pass shows."""

    def __init__(self) -> None:
        self.pairs = 0

    def update(self, tile: tiles.Tile) -> None:
        self.pairs += tile.weights.numel()


@pytest.mark.parametrize("name", BY_HAND)
def test_non_empty_blocks_by_hand(name: str) -> None:
    assert RULES[name].bind(N, N).count_blocks(BLOCK, BLOCK) == BY_HAND[name]


@pytest.mark.parametrize("name", RULES)
def test_requirement_35_the_streaming_loop_computes_the_non_empty_blocks(name: str, products: list[int]) -> None:
    attn, seen = SoftmaxMap(torch.randn(N, 4), torch.randn(N, 4), mask=RULES[name]), Seen()
    with tiles.tile_size(BLOCK, BLOCK):
        tiles.stream(attn, seen)
    pairs = RULES[name].bind(N, N).count_blocks(BLOCK, BLOCK) * BLOCK * BLOCK
    assert seen.pairs == pairs
    assert pairs <= sum(products) <= 2 * pairs  # each tile once, and once more where a row's lse needs several tiles


@pytest.mark.parametrize("wanted", [False, True], ids=["", "on the graph"])
def test_a_few_weights_cost_the_rows_they_stand_in(wanted: bool, products: list[int]) -> None:
    """Not those of every row, whose log-sum-exp nobody needs: neither forward nor backward."""
    q = torch.randn(N, 4, requires_grad=wanted)
    found = SoftmaxMap(q, torch.randn(N, 4), mask=masks.causal()).pick([5, 2000, 2000], [3, 7, 1900])
    if wanted:
        found.sum().backward()
    assert 0 < sum(products) <= 4 * 2 * N


@pytest.mark.parametrize("rows", [128, 512])
@pytest.mark.parametrize("name", RULES)
def test_requirement_35_the_fused_kernel_is_given_the_non_empty_blocks(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, attention = 0, F.scaled_dot_product_attention

    def count(q: Tensor, k: Tensor, *arguments: Any, **named: Any) -> Tensor:
        nonlocal given
        given += q.shape[2] * k.shape[2]
        return attention(q, k, *arguments, **named)

    monkeypatch.setattr(fused, "ROWS", rows)
    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    bound, x = RULES[name].bind(N, N), torch.randn(1, 1, N, 4)
    out = fused.attention(x, x, x, bound)
    assert given == bound.count_blocks(rows, BLOCK) * rows * BLOCK
    assert out.shape == x.shape
