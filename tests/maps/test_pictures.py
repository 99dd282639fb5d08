"""A part of a map as a picture: every pixel is the largest, or the sum, of the dense weights under it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import AdditiveMap, DenseMap, LinearMap, ShapeError, SoftmaxMap, masks, scores
from clearhead.maps import AttentionMap, pictures
from clearhead.maps.pictures import block_picture
from clearhead.testing.memory import Allocations


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Q, K = 3 * numbers(2, 4, 38, 6), numbers(2, 2, 38, 6, seed=1)
NOBODY = masks.padding(keys=torch.arange(38).expand(2, 38) >= 5)
MAPS: dict[str, Callable[[], AttentionMap]] = {
    "causal": lambda: SoftmaxMap(Q, K, mask=masks.causal()),
    "padding: some rows see nothing": lambda: SoftmaxMap(Q, K, mask=masks.causal() & NOBODY),
    "a window": lambda: SoftmaxMap(Q, K, mask=masks.sliding_window(9)),
    "bias, soft-cap, sinks": lambda: SoftmaxMap(Q, K, bias=scores.alibi(4), softcap=3.0, sinks=numbers(4)),
    "one head": lambda: SoftmaxMap(Q, K, mask=masks.causal())[1, 2],
    "some queries": lambda: SoftmaxMap(Q, K, mask=masks.causal())[1, :, [3, 20, 21, 37]],
    "more keys than queries": lambda: SoftmaxMap(Q[:, :, :15], K, mask=masks.causal()),
    "additive": lambda: AdditiveMap(Q, K, numbers(6), mask=masks.causal()),
    "linear": lambda: LinearMap(Q, K, is_causal=True),
    "dense": lambda: DenseMap(torch.softmax(numbers(38, 38), -1)),
}


def pooled(weights: Tensor, side: int, maximum: bool) -> Tensor:
    """By the book: cut into blocks of side × side, the rest filled with zeros."""
    rows, cols = weights.shape[-2:]
    weights = F.pad(weights, (0, -cols % side, 0, -rows % side))
    blocks = weights.unflatten(-1, (-1, side)).unflatten(-3, (-1, side)).transpose(-2, -3)
    return blocks.flatten(-2).amax(-1) if maximum else blocks.flatten(-2).sum(-1)


@pytest.mark.parametrize("at_once", [900, 1 << 20])
@pytest.mark.parametrize("name", MAPS)
def test_a_pixel_is_the_weights_under_it(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "AT_ONCE", at_once)
    attn = MAPS[name]()
    T, S = attn.shape[-2:]
    dense = MAPS[name]().to_dense()
    for rows, cols in [(slice(0, T), slice(0, S)), (slice(1, T - 1), slice(7, 33)), (slice(2, 3), slice(S - 1, S))]:
        for side in (1, 3, 100):
            for maximum in (True, False):
                got = block_picture(attn, rows, cols, side, maximum=maximum)
                expected = pooled(dense[..., rows, cols], side, maximum)
                assert got.shape == expected.shape
                assert torch.allclose(got, expected, rtol=0, atol=1e-14 * side), (rows, cols, side, maximum)


def test_no_picture_makes_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1, 2048, 8)
    attn = SoftmaxMap(q, q, mask=masks.causal())[0, 0]
    attn.lse  # noqa: B018  # computed once, and kept
    with Allocations() as seen:
        block_picture(attn, slice(0, 2048), slice(0, 2048), 32)
    assert seen.peak < 3 * 4 * pictures.AT_ONCE < 4 * 2048**2


def test_a_side_of_nothing() -> None:
    with pytest.raises(ShapeError, match=r"block_picture\(side=0\): expected an integer >= 1"):
        block_picture(DenseMap(torch.eye(3)), slice(0, 3), slice(0, 3), 0)
