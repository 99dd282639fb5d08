"""Scale, soft-cap and biases: the published numbers, alignment under a cache, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from clearhead import DTypeError, ShapeError, SoftmaxMap, reference, scores

SLOPES = json.loads((Path(__file__).parent / "data" / "defs.json").read_text())["alibi_slopes"]


@pytest.mark.parametrize("heads", SLOPES)
def test_alibi_slopes(heads: str) -> None:
    assert scores.alibi_slopes(int(heads)).tolist() == pytest.approx(SLOPES[heads], rel=1e-7)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (16, 64), (32, 20)])
def test_t5_buckets_are_those_of_transformers(bidirectional: bool, buckets: int, far: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-300, 301)
    theirs = t5.T5Attention._relative_position_bucket(distance, bidirectional, buckets, far)
    ours = scores.t5_buckets(distance, buckets=buckets, max_distance=far, bidirectional=bidirectional)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", [scores.alibi_slopes, lambda heads: torch.randn(32, heads)])
def test_trap_17_a_bias_under_a_cache_belongs_to_the_last_rows(make: object) -> None:
    numbers = make(2)  # type: ignore[operator]
    bias = scores.alibi(numbers) if numbers.ndim == 1 else scores.t5_bias(numbers)
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    whole, last = SoftmaxMap(q, k, bias=bias), SoftmaxMap(q[:, :, -2:], k, bias=bias)
    torch.testing.assert_close(last.to_dense(), whole.to_dense()[:, :, -2:])


def test_alibi_counts_tokens_in_float32_where_the_slopes_are_half() -> None:
    at = [torch.arange(n).reshape(shape) for n, shape in ((1, (1, 1, 1, 1)), (1, (1, 1, 1, 1)))]
    q, k = torch.tensor(1000).reshape(1, 1, 1, 1), torch.arange(1001).reshape(1, 1, 1, -1)
    values = scores.alibi(torch.tensor([0.5], dtype=torch.bfloat16)).values(*at, q, k, 1001, 1001)
    assert values.dtype == torch.float32
    assert torch.equal(values.flatten(), 0.5 * (torch.arange(1001) - 1000.0))


def test_trap_12_every_spelling_of_hidden_gives_exactly_0() -> None:
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = torch.finfo(dtype).min
        for hidden in (low, -math.inf, low / 2):
            bias = torch.zeros(3, 3, dtype=dtype)
            bias[:, 2] = hidden
            bias[0] = hidden  # a row of nothing but finfo.min is not uniform: it is empty
            weights = SoftmaxMap(q, k, bias=bias).to_dense()[0, 0]
            assert (weights[:, 2] == 0).all()
            assert (weights[0] == 0).all()
            assert weights[1].sum() == pytest.approx(1)


def test_trap_12_two_lowest_numbers_add_up_to_hidden() -> None:
    low = torch.full((2, 2), torch.finfo(torch.float32).min)
    weights = SoftmaxMap(torch.randn(2, 4), torch.randn(2, 4), bias=low + low).to_dense()
    assert (weights == 0).all()


def test_softcap_bounds_scores() -> None:
    x = torch.linspace(-100, 100, 9)
    assert torch.equal(scores.softcap(x, None), x)
    assert scores.softcap(x, 5.0).abs().max() <= 5
    torch.testing.assert_close(scores.softcap(torch.tensor(1e-3), 5.0), torch.tensor(1e-3))


def test_trap_17_softcap_comes_before_the_mask() -> None:
    q, k = torch.randn(3, 4) * 50, torch.randn(3, 4) * 50
    seen = torch.tensor([[True, False, True]] * 3)
    weights = SoftmaxMap(q, k, mask=seen, softcap=2.0).to_dense()
    assert (weights[:, 1] == 0).all()
    assert weights[:, [0, 2]].max() / weights[:, [0, 2]].min() <= math.exp(4) * 1.0001  # scores lie within ±2


def test_trap_17_learned_sinks_are_not_renormalised() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    attn = SoftmaxMap(q, k, sinks=torch.tensor([0.0, 3.0]))
    assert (attn.to_dense().sum(-1) < 1).all()
    assert "rows sum to less than 1" in repr(attn)


def test_trap_11_scale() -> None:
    q, k = torch.randn(3, 16), torch.randn(3, 16)
    assert SoftmaxMap(q, k).scale == 0.25
    torch.testing.assert_close(SoftmaxMap(q, k, scale=1.0).to_dense(), torch.softmax(q @ k.T, -1))


def test_a_float64_bias_does_not_widen_the_map() -> None:
    attn = SoftmaxMap(torch.randn(3, 4), torch.randn(3, 4), bias=torch.randn(3, 3, dtype=torch.float64))
    assert attn.tile(slice(0, 2), slice(0, 2)).dtype == attn.dtype == torch.float32


def test_repr_of_a_bias_shows_sizes_and_not_contents() -> None:
    assert repr(scores.t5_bias(torch.randn(32, 4))) == "t5_bias((32, 4))"
    assert repr(scores.dense_bias(torch.randn(5, 4))) == "dense_bias((1, 1, 5, 4))"
    assert repr(scores.alibi(8)) == "alibi(8 heads)"


def test_reference_alibi_is_the_rule() -> None:
    slopes = scores.alibi_slopes(4)
    at = [torch.arange(n).reshape(s) for n, s in ((1, (1, 1, 1, 1)), (4, (1, 4, 1, 1)), (3, (1, 1, 3, 1)), (5, (5,)))]
    assert torch.equal(scores.alibi(4).values(*at, 3, 5)[0], reference.alibi(slopes, 3, 5))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: scores.dense_bias(torch.ones(2, 2).bool()), DTypeError, "expected a float tensor"),
        (lambda: scores.dense_bias(torch.ones(2, 3, 3)), ShapeError, r"\(1, H, T, S\) for one per head"),
        (
            lambda: scores.alibi(torch.ones(3)).check(1, 2, 4, 4),
            ShapeError,
            r"one slope per head, \(2,\), got \(3,\)",
        ),
        (
            lambda: scores.t5_bias(torch.ones(32, 3)).check(1, 2, 4, 4),
            ShapeError,
            r"\(buckets, 2\), got \(32, 3\)",
        ),
        (lambda: scores.dense_bias(torch.ones(3, 4)).check(1, 2, 4, 4), ShapeError, "does not broadcast"),
    ],
)
def test_bad_biases_are_refused(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
