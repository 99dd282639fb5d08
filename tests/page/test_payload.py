"""The encoding: what goes in comes out, the size is known before, and the budget holds."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ShapeError
from clearhead.page import Payload, render
from clearhead.page.encode import float_planes, json_element, key_width, pack_rows
from clearhead.page.payload import BudgetError, default_budget, least_nbytes
from clearhead.page.shell import shell

from .conftest import make, words


def blob(payload: Payload, name: str) -> bytes:
    pattern = f'data-blob="{re.escape(name)}" data-bytes="(\\d+)">([^<]*)<'
    found = re.search(pattern, "".join(payload.elements))
    assert found, name
    raw = gzip.decompress(base64.b64decode(found[2]))
    assert len(raw) == int(found[1])
    return raw


def unpack_rows(raw: bytes, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inverse of `pack_rows`, as the page does it: (counts, keys, values)."""
    data = np.frombuffer(raw, np.uint8)
    counts = data[:n].astype(np.int64) + 256 * data[n : 2 * n].astype(np.int64)
    total, width = int(counts.sum()), key_width(n)
    planes = data[2 * n : 2 * n + width * total].reshape(width, total).astype(np.int64)
    running = np.cumsum((planes * 256 ** np.arange(width)[:, None]).sum(0))
    before = np.concatenate([[0], running])[np.cumsum(counts) - counts]
    return counts, running - np.repeat(before, counts), data[2 * n + width * total :]


def facts(payload: Payload) -> dict:
    return json.loads(re.search('id="facts-data">(.*?)</script>', payload.elements[0])[1])


@given(st.sampled_from([1, 5, 256, 257, 70_000]), st.data())
def test_rows_come_back_as_they_went_in(n, data):
    some = min(n, 8)
    rows = data.draw(st.lists(st.sets(st.integers(0, n - 1), max_size=6), min_size=some, max_size=some))
    rows += [set()] * (n - some)
    keys = np.array([key for row in rows for key in sorted(row)], np.int64)
    values = np.arange(len(keys)).astype(np.uint8)
    counts = np.array([len(row) for row in rows])
    raw = pack_rows(counts, keys, values, n)
    assert len(raw) == 2 * n + len(keys) * (key_width(n) + 1)
    for got, expected in zip(unpack_rows(raw, n), (counts, keys, values), strict=True):
        assert got.tolist() == expected.tolist()


def test_floats_come_back_bit_for_bit():
    x = np.array([0.1, -np.inf, 3e-40, 7], np.float32)
    planes = np.frombuffer(float_planes(x[:1], x[1:]), np.uint8).reshape(4, 4)
    assert np.ascontiguousarray(planes.T).view("<f4")[:, 0].tolist() == x.tolist()


def test_json_cannot_end_its_element():
    nasty = "</script><!--\u2028🦊\ud800"
    element = json_element("x", nasty)
    assert element.count("<") == 2
    assert element.isascii()
    assert json.loads(re.search(">(.*)<", element)[1]) == nasty


@pytest.mark.parametrize("budget", [None, 225_000, 240_000])
def test_the_size_is_known_before_writing(short, budget):
    payload = short.build(budget)
    assert len(render(payload).encode("utf-8")) == payload.nbytes <= payload.budget


def test_every_head_holds_its_strong_weights(short):
    payload = short.build()
    n = len(short.tokens)
    for layer, weights in zip(short.layers, short.weights, strict=True):
        for h in range(len(weights)):
            counts, keys, values = unpack_rows(blob(payload, f"w.{layer.layer}.{h}"), n)
            dense = np.zeros((n, n))
            dense[np.repeat(np.arange(n), counts), keys] = (values / 255.0) ** 2
            missing = dense == 0
            assert np.abs(dense - weights[h])[~missing].max() <= 0.004
            assert weights[h][missing].max() < payload.threshold


def test_mass_held_is_the_share_of_all_weights(short):
    payload = short.build()
    held = sum(w[w >= payload.threshold].sum() for w in short.weights) / sum(w.sum() for w in short.weights)
    assert payload.mass_held == pytest.approx(held, abs=0.005)


def test_the_threshold_rises_until_the_file_fits():
    made = make(words(300), exact=False)
    free = made.build()
    tight = made.build(free.nbytes - 40_000)
    assert tight.nbytes <= tight.budget
    assert tight.nbytes > tight.budget - 12_000  # no more is left out than needed
    assert tight.threshold > free.threshold == 0.004
    assert tight.mass_held < free.mass_held
    assert any("left out" in note for note in tight.notes)
    assert not any("left out" in note for note in free.notes)
    assert facts(tight)["threshold"] == tight.threshold


def test_vectors_fill_the_rest_strongest_of_each_role_first():
    made = make(words(200), layers=4)
    free = made.build(5_000_000)
    assert len(free.exact) == 16
    some = made.build(free.nbytes - 100_000)
    assert 0 < len(some.exact) < 16
    assert some.exact == free.exact[: len(some.exact)]
    assert some.exact[0] == tuple(facts(some)["opening"])
    roles = [next(h.role for h in made.heads if (h.layer, h.head) == name) for name in free.exact[:8]]
    assert len(set(roles)) == 8


def test_vectors_give_the_exact_weights(short):
    payload, n, d = short.build(), len(short.tokens), 8
    layer, weights = short.layers[1], short.weights[1]

    def floats(name: str) -> np.ndarray:
        raw = np.frombuffer(blob(payload, name), np.uint8).reshape(4, -1)
        return np.ascontiguousarray(raw.T).view("<f4")[:, 0]

    mine, shared = floats("q.6.3"), floats("kv.6.1")
    q, lse, k = mine[: n * d].reshape(n, d), mine[n * d :], shared[: n * d].reshape(n, d)
    alpha = np.exp(layer.scale * q @ k.T - lse[:, None])
    assert np.abs(np.tril(alpha) - weights[3]).max() < 1e-5


def test_a_budget_that_holds_nothing_is_refused(short):
    with pytest.raises(BudgetError, match=r"a budget of 1\.0 kB for the page: .* take [12]\d\d kB"):
        short.build(1000)
    with pytest.raises(BudgetError):
        short.build(least_nbytes())
    assert least_nbytes() > len(shell())


def test_sizes_that_disagree_are_refused(short):
    fewer = replace(short, tokens=short.tokens[:-1])
    with pytest.raises(ShapeError, match="beyond 39 × 39 tokens"):
        fewer.build()
    with pytest.raises(ShapeError, match="heads in the layers"):
        replace(short, heads=short.heads[:-1]).build()
    with pytest.raises(ShapeError, match="needs layers, and their texts"):
        replace(short, tokens=[]).build()


def test_default_budgets():
    assert [default_budget(n) for n in (1, 128, 129, 512, 513)] == [2e6, 2e6, 10e6, 10e6, 25e6]


def test_rows_that_attend_to_nothing_are_not_counted():
    made = make(words(10), layers=1, heads=2)
    layer = made.layers[0]
    lse = layer.lse.copy()
    lse[:, :5] = -np.inf
    counts = layer.strong.counts.copy()
    gone = int(counts[0, :5].sum()), int(counts[1, :5].sum())
    parts = [layer.strong.head(h) for h in range(2)]
    counts[:, :5] = 0
    left = replace(
        layer.strong,
        counts=counts,
        keys=np.concatenate([keys[skip:] for (_, keys, _), skip in zip(parts, gone, strict=True)]),
        values=np.concatenate([values[skip:] for (_, _, values), skip in zip(parts, gone, strict=True)]),
    )
    made.layers[0] = replace(layer, lse=lse, strong=left)
    assert made.build().mass_held == pytest.approx(1, abs=0.01)


def test_the_page_itself_is_light():
    """In kB: derivation 39, text 31, matrix 24, atlas 15, data 12, all other script 46, style 32, markup 6."""
    assert len(shell().encode("utf-8")) < 216_000
