"""What a live page is told, part by part, is what Python has."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import ShapeError, View, masks, scores
from clearhead import view as view_module
from clearhead.heads import rollout
from clearhead.maps.reductions import Blocks
from clearhead.page import answers as answers_module
from clearhead.page.answers import Answers, UnknownPart
from clearhead.page.encode import pack_rows
from clearhead.page.peaks import FINEST, encoded, peaks_side, picture_of
from clearhead.page.strong import Strong

from .conftest import words

N, HEADS, D = 90, 4, 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer(torch.nn.Module):
    """Hands out a map of random q and k."""

    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self.rules = rules

    def attend(self, x: Tensor) -> tuple[Tensor, clearhead.SoftmaxMap]:
        n = len(x)
        q, k, v = 3 * numbers(1, HEADS, n, D), numbers(1, 2, n, D, seed=1), numbers(1, 2, n, D, seed=2)
        attn = clearhead.SoftmaxMap(q, k, v=v, **self.rules)
        return attn @ v, attn


def looked_at(n: int = N, **rules: Any) -> View:
    return clearhead.look(Layer(**rules), torch.zeros(n, 1), tokens=words(n), name="a layer")


def read(n: int = N, **rules: Any) -> View:
    """The same, and its heads are known."""
    view = looked_at(n, **rules)
    view.heads()
    return view


@pytest.fixture(scope="module")
def view() -> View:
    return read(mask=masks.causal())


@pytest.fixture(scope="module")
def biased() -> View:
    return read(mask=masks.sliding_window(20), bias=scores.alibi(4), softcap=5.0, sinks=numbers(4))


def floats(answer: bytes, *shape: int) -> np.ndarray:
    return np.frombuffer(answer, "<f4").reshape(shape)


def asked(view: View, name: str, **query: object) -> bytes:
    return view.answers().part(name, {key: str(value) for key, value in query.items()})


def test_facts_are_those_of_the_file_and_say_that_they_are_live(view: View) -> None:
    facts, filed = json.loads(asked(view, "facts")), json.loads(view.page().elements[0].split(">", 1)[1][:-10])
    assert facts.pop("live") is True
    assert facts.pop("reading") == 0
    assert {name for name in filed if name not in facts} == {"blobs"}
    same = [name for name in facts if name not in ("threshold", "massHeld", "notes", "exact")]
    assert {name: facts[name] for name in same} == {name: filed[name] for name in same}
    assert facts["notes"] == ["Every weight is exact, computed when it is asked for."]


def test_vectors_and_strong_weights_are_those_of_a_file(view: View) -> None:
    attn = view.maps[0][0]
    for h in range(HEADS):
        planes = np.frombuffer(asked(view, f"q.0.{h}"), np.uint8).reshape(4, -1)
        joined = np.ascontiguousarray(planes.T).view("<f4").ravel()
        assert np.array_equal(joined, torch.cat([attn.q[h].flatten(), attn.lse[h]]).numpy())
        strong = Strong()
        clearhead.kernels.tiles.stream(attn, strong)
        assert asked(view, f"w.0.{h}") == pack_rows(*strong.result().head(h), N)
    planes = np.frombuffer(asked(view, "kv.0.1"), np.uint8).reshape(4, -1)
    joined = np.ascontiguousarray(planes.T).view("<f4").ravel()
    assert np.array_equal(joined, torch.cat([attn.k[1].flatten(), attn.v[1].flatten()]).numpy())


@pytest.mark.parametrize("name", ["view", "biased"])
def test_rows_columns_and_pictures_are_those_of_the_map(name: str, request: pytest.FixtureRequest) -> None:
    view: View = request.getfixturevalue(name)
    dense = view.maps[0].to_dense()[0, 2].numpy()
    assert np.array_equal(floats(asked(view, "row.0.2", query=40), N), view.maps[0][0, 2, 40].numpy())
    assert np.allclose(floats(asked(view, "row.0.2", query=40), N), dense[40], atol=1e-6)
    assert np.allclose(floats(asked(view, "column.0.2", key=17), N), dense[:, 17], atol=1e-6)
    part = floats(asked(view, "tile.0.2", rows="10-40", keys="5-20", side=1), 30, 15)
    assert np.allclose(part, dense[10:40, 5:20], atol=1e-6)
    whole = floats(asked(view, "tile.0.2", rows=f"0-{N}", keys=f"0-{N}", side=9), 10, 10)
    assert np.allclose(whole, dense.reshape(10, 9, 10, 9).max((1, 3)), atol=1e-6)
    sums = floats(asked(view, "tile.0.2", rows=f"0-{N}", keys=f"0-{N}", side=9, of="sum"), 10, 10)
    assert np.allclose(sums, dense.reshape(10, 9, 10, 9).sum((1, 3)), atol=1e-5)


def test_far_pictures_come_from_the_peaks_within_the_stated_error(view: View) -> None:
    """8 bits: half a step of √w at either side, (√w + 1/510)² - w, which is .004 at w = 1."""
    dense = np.pad(view.maps[0].to_dense()[0, 1].numpy(), (0, -N % 32))
    for side in (16, 32):
        n = -(-N // side)
        got = floats(asked(view, "tile.0.1", rows=f"0-{N}", keys=f"0-{N}", side=side), n, n)
        expected = dense[: n * side, : n * side].reshape(n, side, n, side).max((1, 3))
        assert np.abs(np.sqrt(got) - np.sqrt(expected)).max() <= 0.5 / 255 + 1e-6
        assert not np.array_equal(got, expected)
    got = floats(asked(view, "tile.0.1", rows="16-90", keys="32-64", side=16), 5, 2)
    assert (
        np.abs(np.sqrt(got) - np.sqrt(dense[16:96, 32:64].reshape(5, 16, 2, 16).max((1, 3)))).max() <= 0.5 / 255 + 1e-6
    )
    exact = floats(asked(view, "tile.0.1", rows="8-40", keys="0-32", side=16), 2, 2)  # beside the blocks
    assert np.allclose(exact, dense[8:40, :32].reshape(2, 16, 2, 16).max((1, 3)), atol=1e-6)


def test_a_derivation_has_every_number_of_a_weight(view: View, biased: View) -> None:
    for one, t, s in [(view, 50, 20), (biased, 50, 45)]:
        attn = one.maps[0][0, 3]
        told = json.loads(asked(one, "derive.0.3", query=t, key=s))
        q, k = attn.q[t].double(), attn.k[s].double()
        assert told["dot"] == pytest.approx(float(q @ k), rel=1e-5)
        assert (told["q"], told["k"]) == (attn.q[t].tolist(), attn.k[s].tolist())
        assert told["scale"] == pytest.approx(D**-0.5)
        assert told["weight"] == pytest.approx(float(attn[t, s]), rel=1e-5)
        assert told["weight"] == pytest.approx(np.exp(told["score"] - told["lse"]), rel=1e-4)
        assert told["z"] == pytest.approx((attn[t] @ attn.v).tolist(), abs=1e-5)
    assert told["capped"] == pytest.approx(5 * np.tanh(told["scale"] * told["dot"] / 5), rel=1e-5)
    slope = float(scores.alibi_slopes(4)[3])
    assert told["score"] == pytest.approx(told["capped"] - slope * 5, rel=1e-5)
    hidden = json.loads(asked(biased, "derive.0.3", query=50, key=51))
    assert (hidden["score"], hidden["weight"]) == (None, 0)


def test_of_weights_alone_there_are_rows_and_pictures_but_no_vectors() -> None:
    class Given(torch.nn.Module):
        def attend(self, x: Tensor) -> tuple[Tensor, clearhead.DenseMap]:
            return x, clearhead.DenseMap(torch.softmax(numbers(2, 9, 9), -1))

    view = clearhead.look(Given(), torch.zeros(9, 1))
    view.heads()
    assert np.array_equal(floats(asked(view, "row.0.1", query=4), 9), view.maps[0][0, 1, 4].numpy())
    assert set(json.loads(asked(view, "derive.0.1", query=4, key=2))) == {"query", "key", "weight"}
    for name in ("q.0.1", "kv.0.0", "p.0.0"):
        with pytest.raises(UnknownPart, match="do not follow from q and k alone"):
            asked(view, name)


# --- layers that are read while the page is open ------------------------------------------------------------------


def test_what_is_not_read_yet_follows(view: View) -> None:
    late = looked_at(mask=masks.causal())
    answers = late.answers()
    facts = json.loads(answers.part("facts"))
    assert facts["reading"] == 1
    assert {head[2] for head in facts["heads"]} == {None}
    assert set(answers.part("thumbs")) == {0}
    assert answers.part("q.0.1") == asked(view, "q.0.1")  # a head can be looked at before
    assert answers.part("w.0.1") == pack_rows(np.zeros(N, np.int32), np.zeros(0), np.zeros(0, np.uint8), N)
    before = floats(answers.part("tile.0.1", {"rows": "0-64", "keys": "0-64", "side": "16"}), 4, 4)
    assert np.allclose(
        before, view.maps[0].to_dense()[0, 1, :64, :64].numpy().reshape(4, 16, 4, 16).max((1, 3)), atol=1e-6
    )
    assert json.loads(answers.part("heads", {"have": "0"})) == {"reading": 1, "news": [], "failed": None}
    late.heads()
    told = json.loads(answers.part("heads", {"have": "0"}))
    assert told["reading"] == 0
    (news,) = told["news"]
    first = json.loads(asked(view, "facts"))
    assert (news["scores"], news["heads"], [news["layer"]]) == (first["scores"], first["heads"], first["layers"])
    assert base64.b64decode(news["thumbs"]) == answers.part("thumbs") == asked(view, "thumbs")
    assert answers.part("w.0.1") == asked(view, "w.0.1")
    assert json.loads(answers.part("heads", {"have": "1"})) == {"reading": 0, "news": [], "failed": None}


def test_a_page_that_opens_while_a_layer_is_read_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late = looked_at(mask=masks.causal())
    reading = threading.Thread(target=late.heads)
    whole = view_module.page_facts

    def slowly(*args: Any, **kwargs: Any) -> dict[str, Any]:
        reading.start()
        reading.join(0.5)
        return whole(*args, **kwargs)

    monkeypatch.setattr(view_module, "page_facts", slowly)
    answers = late.answers()
    reading.join(20)
    told = json.loads(answers.part("heads", {"have": "0"}))
    assert (told["reading"], len(told["news"])) == (0, 1)


def test_whatever_ends_the_reading_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    late = looked_at(mask=masks.causal())
    answers = late.answers()

    def fails(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room for it")

    with monkeypatch.context() as patch:
        patch.setattr(view_module, "Scorer", fails)
        with pytest.raises(MemoryError):
            late.heads()
    assert json.loads(answers.part("heads", {"have": "0"}))["failed"] == "no room for it"
    assert len(late.heads()) == HEADS  # and another run reads it


def test_a_view_that_is_read_tells_no_news(view: View) -> None:
    assert json.loads(asked(view, "heads", have=0)) == {"reading": 0, "news": [], "failed": None}


# --- what cannot be answered --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "facts.0.0",
        "w",
        "w.0",
        "w.0.4",
        "w.1.0",
        "kv.0.2",
        "w.0.-1",
        "w.0.1.2",
        "w.0.９",
        "../facts",
        "w.0.99999999",
        "__init__",
    ],
)
def test_there_is_no_such_part(name: str, view: View) -> None:
    with pytest.raises(UnknownPart, match="there is no"):
        asked(view, name)


@pytest.mark.parametrize(
    ("name", "query", "said"),
    [
        ("row.0.0", {}, "query='': expected a whole number below 90"),
        ("row.0.0", {"query": 90}, "below 90"),
        ("row.0.0", {"query": "-1"}, "below 90"),
        ("row.0.0", {"query": "1e3"}, "below 90"),
        ("column.0.0", {"key": "9" * 5000}, "key='99999999999999999999': expected"),
        (
            "tile.0.0",
            {"rows": "0-91", "keys": "0-9", "side": 1},
            "rows='0-91': expected two numbers, first-end, within 0-90",
        ),
        ("tile.0.0", {"rows": "5-5", "keys": "0-9", "side": 1}, "within 0-90"),
        ("tile.0.0", {"rows": "9-5", "keys": "0-9", "side": 1}, "within 0-90"),
        ("tile.0.0", {"rows": "0-9", "keys": "0-9", "side": 0}, "expected a side from 1 on"),
        ("tile.0.0", {"rows": "0-9", "keys": "0-9", "side": 1, "of": "mean"}, "of max or sum"),
        ("derive.0.0", {"query": 3}, "key='': expected"),
    ],
)
def test_a_question_that_means_nothing(name: str, query: dict[str, object], said: str, view: View) -> None:
    with pytest.raises(ShapeError, match=said):
        asked(view, name, **query)


def test_a_picture_of_a_million_pixels_or_of_too_many_weights(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "PIXELS", 8000)
    with pytest.raises(ShapeError, match="a picture of 8,100 pixels: at most 8,000 at a time"):
        asked(view, "tile.0.0", rows="0-90", keys="0-90", side=1)
    monkeypatch.setattr(answers_module, "WEIGHTS", 8000)
    with pytest.raises(ShapeError, match="a picture of 8,100 weights: at most 8,000 at a time, ask for less"):
        asked(view, "tile.0.0", rows="0-90", keys="0-90", side=3)
    assert len(asked(view, "tile.0.0", rows="0-90", keys="0-90", side=16)) == 4 * 36  # from the peaks, without a limit


# --- what is kept -------------------------------------------------------------------------------------------------


def test_the_latest_answers_are_kept_and_no_more_than_fit(monkeypatch: pytest.MonkeyPatch, view: View) -> None:
    monkeypatch.setattr(answers_module, "CACHE", 8 * 4 * N)
    monkeypatch.setattr(answers_module, "SMALLEST", 1)
    answers, made = view.answers(), []
    whole = answers_module._OF_HEAD["row"]
    monkeypatch.setitem(answers_module._OF_HEAD, "row", lambda *args: made.append(args[2]["query"]) or whole(*args))
    for n in [*range(8), 0, 8, 0, 1]:
        assert answers.part("row.0.0", {"query": str(n)}) == whole(answers._layers[0], 0, {"query": str(n)})
    assert made == [*map(str, range(9)), "1"]  # 0 was asked for again in between, and 1 made way for 8
    assert answers._kept._held == sum(map(len, answers._kept._answers.values())) <= 8 * 4 * N


def test_the_questions_that_are_kept_have_a_bound_too(monkeypatch: pytest.MonkeyPatch, view: View) -> None:
    monkeypatch.setattr(answers_module, "CACHE", 10 * answers_module.SMALLEST)
    answers = view.answers()
    for n in range(20):
        answers.part("row.0.0", {"query": "1", "more": str(n) * 8000})
    assert len(answers._kept._answers) == 10


def test_what_would_push_out_everything_is_not_kept(monkeypatch: pytest.MonkeyPatch, view: View) -> None:
    monkeypatch.setattr(answers_module, "CACHE", 7 * 4 * N)
    answers = view.answers()
    answers.part("row.0.0", {"query": "1"})
    assert answers._kept._held == 0


# --- peaks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1000, 1000), (7, 13), (50, 33), (16, 32)])
def test_peaks_do_not_depend_on_the_tiles(size: tuple[int, int]) -> None:
    weights = torch.softmax(3 * numbers(3, 75, 110), -1)
    peaks = Blocks((3,), 75, 110, 16, weights)
    with clearhead.kernels.tiles.tile_size(*size):
        clearhead.kernels.tiles.stream(clearhead.DenseMap(weights), peaks)
    padded = torch.nn.functional.pad(weights, (0, 2, 0, 5)).view(3, 5, 16, 7, 16)
    assert np.array_equal(encoded(peaks.result), (255 * padded.amax((2, 4)).sqrt()).round().to(torch.uint8).numpy())


def test_a_picture_of_peaks() -> None:
    peaks = np.random.default_rng(0).integers(0, 256, (7, 10), np.uint8)
    padded = np.pad(peaks[1:, 2:], ((0, 0), (0, 1)))
    expected = (padded.reshape(2, 3, 3, 3).max((1, 3)) / 255) ** 2
    assert np.allclose(picture_of(peaks, slice(1, 7), slice(2, 10), 3), expected, atol=1e-6)


def test_peaks_keep_to_their_room() -> None:
    assert peaks_side(8192, 8192, 270, 235_000_000) == FINEST
    assert peaks_side(131_072, 131_072, 9, 150_000_000) == 32 * 2
    assert peaks_side(10, 10, 1, 0) == FINEST


def test_many_threads_may_ask(view: View) -> None:
    from concurrent.futures import ThreadPoolExecutor

    answers = Answers({}, list(view.answers()._layers.values()))
    rows = [view.maps[0][0, 0, n].numpy().tobytes() for n in range(N)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: answers.part("row.0.0", {"query": str(n % N)}), range(3 * N)))
    assert found == rows * 3


def test_pages_that_stand_together_answer_for_one_another():
    views = clearhead.look([looked_at(20), looked_at(30)], labels=[0, 500])
    for view in views:
        view.heads()
    first, second = views.answers()
    told = json.loads(first.part("1.facts"))
    assert (told["pages"], told["page"], len(told["texts"][0]["tokens"])) == ([0, 500], 1, 30)
    for name, query in (("w.0.1", {}), ("row.0.1", {"query": "25"}), ("thumbs", {})):
        assert first.part(f"1.{name}", query) == second.part(name, query)
    for name in ("2.facts", "1.1.facts", "1.w.0.9", "0.0.0.thumbs"):
        with pytest.raises(UnknownPart):
            first.part(name)


# --- the influence on the last token ------------------------------------------------------------------------------


def test_influence_is_the_last_row_of_the_rollout_in_a_file_too(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rollout(view.maps)[0, -1].numpy()
    np.testing.assert_array_equal(floats(asked(view, "influence"), N), expected)
    (held,) = (element for element in view.page().elements if 'data-blob="influence"' in element)
    packed = base64.b64decode(held.split("data-blob", 1)[1].split(">", 1)[1].split("<", 1)[0])
    np.testing.assert_array_equal(floats(gzip.decompress(packed), N), expected)
    monkeypatch.setattr(view_module, "INFLUENCE", N - 1)
    assert not any("influence" in element for element in view.page().elements)


def test_two_texts_have_no_last_token_in_common(view: View) -> None:
    two = View(view.maps, view.layers, view.texts * 2, "two")
    assert json.loads(asked(two, "facts"))["influence"] is False
    with pytest.raises(UnknownPart, match="where one text is read"):
        asked(two, "influence")
