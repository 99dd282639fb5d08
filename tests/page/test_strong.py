"""The strong weights: what is kept, in which order, and what happens when there are too many."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead import SoftmaxMap, masks
from clearhead.kernels.path import force
from clearhead.kernels.tiles import stream, tile_size
from clearhead.maps import DenseMap
from clearhead.page import Strong
from clearhead.page.strong import THRESHOLD, floor_of, level_of


def random_weights(seed: int, heads: int, T: int, S: int) -> np.ndarray:
    scores = np.random.default_rng(seed).standard_normal((heads, T, S)) * 3
    weights = np.exp(scores)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def reduce(weights: np.ndarray, rows: int, cols: int, **options: float) -> Strong:
    reducer = Strong(**options)  # type: ignore[arg-type]
    with tile_size(rows, cols):
        stream(DenseMap(weights), reducer)
    return reducer


@given(
    st.integers(0, 99),
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_keeps_exactly_the_weights_at_or_above_the_threshold(seed, heads, T, S, rows, cols):
    weights = random_weights(seed, heads, T, S)
    kept = reduce(weights, rows, cols).result()
    for h in range(heads):
        counts, keys, values = kept.head(h)
        expected = [np.flatnonzero(row >= kept.threshold) for row in weights[h]]
        assert counts.tolist() == [len(row) for row in expected]
        assert keys.tolist() == [int(key) for row in expected for key in row]
        truth = np.concatenate([weights[h, t, row] for t, row in enumerate(expected)])
        assert np.abs((values / 255.0) ** 2 - truth).max(initial=0) <= 0.004


def test_the_threshold_rises_when_too_many_arrive():
    weights = random_weights(1, 2, 60, 60)
    free, tight = reduce(weights, 16, 60).result(), reduce(weights, 16, 60, limit=500).result()
    assert len(tight.keys) <= 500 < len(free.keys)
    assert tight.level > free.level
    assert tight.threshold == floor_of(tight.level)
    keep = free.values >= tight.level
    assert tight.values.tolist() == free.values[keep].tolist()
    assert tight.keys.tolist() == free.keys[keep].tolist()


def test_asking_early_or_twice_changes_nothing():
    weights = random_weights(2, 2, 40, 40)
    whole, reducer = reduce(weights, 40, 40).result(), Strong()
    for rows in (slice(0, 15), slice(15, 40)):
        reducer.update(SimpleNamespace(weights=torch.from_numpy(weights[:, rows]), rows=rows, cols=slice(0, 40)))
        reducer.result()
    again = reducer.result()
    assert again.keys is reducer.result().keys
    for name in ("counts", "keys", "values"):
        assert getattr(again, name).tolist() == getattr(whole, name).tolist()


@pytest.mark.parametrize("limit", [10**6, 3000])
def test_a_compiled_pass_keeps_what_tiles_keep(limit: int) -> None:
    pytest.importorskip("numba")
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, n, 300, 8, generator=g) for n in (4, 2))
    attn = SoftmaxMap(3 * q, k, mask=masks.causal())[0]
    by_tiles, compiled = Strong(limit=limit), Strong(limit=limit)
    for reducer, kernel in ((by_tiles, "tiles"), (compiled, "cpu")):
        with force(kernel):
            attn._stream(reducer)
    one, other = by_tiles.result(), compiled.result()
    assert (one.level, one.threshold) == (other.level, other.threshold)
    assert (one.level > level_of(THRESHOLD)) == (limit == 3000)
    assert len(one.keys) > 0.4 * min(limit, len(one.keys))
    for name in ("counts", "keys", "values"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_the_order_in_which_weights_come_says_nothing():
    weights = torch.from_numpy(random_weights(5, 2, 64, 64))
    tiles = [
        SimpleNamespace(weights=weights[:, n : n + 8], rows=slice(n, n + 8), cols=slice(0, 64)) for n in range(0, 64, 8)
    ]
    forth, back = Strong(limit=300), Strong(limit=300)
    for there, reducer in ((tiles, forth), (tiles[::-1], back)):
        for tile in there:
            reducer.update(tile)
    one, other = forth.result(), back.result()
    assert one.level == other.level > level_of(THRESHOLD)
    assert np.array_equal(one.values, other.values)
    forth.forget()
    assert (len(forth.result().keys), forth.level) == (0, level_of(THRESHOLD))


def test_no_gradient_is_asked():
    weights = torch.softmax(torch.randn(3, 4, 4, requires_grad=True), -1)
    reducer = Strong()
    reducer.update(SimpleNamespace(weights=weights, rows=slice(0, 4), cols=slice(0, 4)))
    assert reducer.result().counts.shape == (3, 4)


def test_rows_before_the_only_tile_are_empty():
    reducer = Strong()
    reducer.update(SimpleNamespace(weights=torch.full((1, 2, 3), 1 / 3), rows=slice(5, 7), cols=slice(4, 7)))
    assert reducer.result().counts.tolist() == [[0, 0, 0, 0, 0, 3, 3]]
    assert reducer.result().keys.tolist() == [4, 5, 6, 4, 5, 6]


def test_nothing_seen_is_nothing_kept():
    assert len(Strong().result().keys) == 0


@pytest.mark.parametrize("options", [{"threshold": 0}, {"threshold": 1.5}, {"limit": 0}])
def test_refuses_what_is_no_threshold_or_limit(options):
    with pytest.raises(ValueError, match="Strong"):
        Strong(**options)


def test_level_and_floor_belong_together():
    assert all(level_of(floor_of(level) * 1.0001) == level for level in range(1, 256))
