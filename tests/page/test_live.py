"""The page from the server, in a real browser: its numbers are Python's, and it asks nobody else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import ModelError, View, masks, scores
from clearhead.nn import MultiHeadAttention
from clearhead.page import answers as answers_module

from .conftest import Opened, side_by_side, tint
from .test_answers import looked_at, read
from .test_browser import pixel, shares
from .test_server import Running

pytestmark = pytest.mark.browser
N = 600
PAPER = [251, 251, 249]


@pytest.fixture(scope="module")
def plain() -> View:
    return read(N, mask=masks.causal())


@pytest.fixture(scope="module")
def biased() -> View:
    """Weights that do not follow from q and k alone: rows and columns are asked for one by one."""
    return read(N, mask=masks.sliding_window(100), bias=scores.alibi(4))


@pytest.fixture
def visit(open_page: Callable[..., Any]) -> Iterator[Callable[..., Opened]]:
    """Open the page of a view from a server. No console error, and no request to anybody else, may have come of it."""
    running, opened = [], []

    def visit(
        view: View, hash: str = "", *, size: tuple[int, int] = (1440, 900), ready: str = "[data-ready]"
    ) -> Opened:
        running.append(Running(view))
        one = Opened(open_page(size=size), [], [])
        opened.append((one, running[-1].url))
        one.page.on("console", lambda said: said.type == "error" and one.complaints.append(said.text))
        one.page.on("pageerror", lambda error: one.complaints.append(str(error)))
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.goto(running[-1].url + hash)
        one.page.wait_for_selector("body" + ready, timeout=20_000)
        return one

    yield visit
    for one, url in opened:
        assert one.complaints == []
        assert [asked for asked in one.requests if not asked.startswith((url, "data:", "blob:"))] == []
        one.page.close()
    for server in running:
        server.stop()


def until(wanted: Callable[[], object]) -> None:
    """Wait for something that is asked of the page: its policy lets nobody evaluate text in it."""
    end = time.monotonic() + 10
    while not wanted():
        assert time.monotonic() < end
        time.sleep(0.01)


def address(opened: Opened) -> str:
    return str(opened.page.evaluate("location.hash"))


def painted(opened: Opened) -> dict[str, float]:
    """Wait until nothing is missing in the matrix; where it is on the canvas."""
    until(lambda: "reading" not in opened.text("#pixel") and opened.text("#pixel"))
    opened.settle()
    data = json.loads(opened.page.evaluate("JSON.stringify(document.querySelector('#canvas').dataset)"))
    return {name: float(value) for name, value in data.items()}


def weights_of(view: View, h: int) -> np.ndarray:
    return view.maps[0][0, h].to_dense().numpy()


@pytest.mark.parametrize("name", ["plain", "biased"])
def test_a_pixel_of_the_whole_matrix_is_the_largest_weight_under_it(
    name: str, visit: Callable[..., Opened], request: pytest.FixtureRequest
):
    view: View = request.getfixturevalue(name)
    opened = visit(view, "#h=0.1&q=599&k=0&scale=root")
    at = painted(opened)
    side = int(re.search(r"max of (\d+)×\1 weights", opened.text("#pixel"))[1])
    assert side > 1
    assert side * at["cell"] >= 1.5 - 1e-6
    n = -(-N // side)
    most = np.pad(weights_of(view, 1), (0, n * side - N)).reshape(n, side, n, side).max((1, 3))
    checked = 0
    for y, x in [
        (n // 2, 0),
        (n - 9, n - 9),
        *zip(*np.unravel_index(most.ravel().argsort()[-40::8], most.shape), strict=True),
    ]:
        left = at["left"] + (x + 0.5) * side * at["cell"]
        top = at["top"] + (y + 0.5) * side * at["cell"]
        if x == y or x == 0 or y == n - 1:  # under the line along the diagonal, or the cross-hair
            continue
        expected = tint(round(255 * np.sqrt(most[y, x])) / 255)
        assert np.abs(np.array(pixel(opened, left, top)) - expected).max() <= 3, (y, x, most[y, x])
        checked += 1
    assert checked >= 3
    assert pixel(opened, at["left"] + 0.9 * N * at["cell"], at["top"] + 0.1 * N * at["cell"]) == PAPER


@pytest.mark.parametrize("name", ["plain", "biased"])
def test_cells_are_the_weights_with_their_numbers(
    name: str, visit: Callable[..., Opened], request: pytest.FixtureRequest
):
    view: View = request.getfixturevalue(name)
    weights = weights_of(view, 2)
    query = 400
    key = int(weights[query].argmax())
    opened = visit(view, f"#h=0.2&q={query}&k={key}&scale=root")
    opened.page.keyboard.press("z")
    at = painted(opened)
    assert at["cell"] >= 25
    assert opened.text("#pixel").startswith("each cell = 1 weight")
    for i, j in [
        (query + 1, key + 1),
        (query - 2, key - 1),
        (query + 2, int(weights[query + 2, key - 3 : key + 4].argmax()) + key - 3),
    ]:
        left, top = at["left"] + (j - at["x"] + 0.12) * at["cell"], at["top"] + (i - at["y"] + 0.12) * at["cell"]
        tone = round(255 * np.sqrt(weights[i, j])) / 255
        expected = tint(tone) if tone else np.array(PAPER)
        assert np.abs(np.array(pixel(opened, left, top)) - expected).max() <= 3, (i, j, weights[i, j])


@pytest.mark.parametrize("name", ["plain", "biased"])
def test_rows_and_columns_follow_what_is_chosen(
    name: str, visit: Callable[..., Opened], request: pytest.FixtureRequest
):
    view: View = request.getfixturevalue(name)
    weights = weights_of(view, 0)
    opened = visit(view, "#h=0.0&q=500&scale=root")
    for step in range(4):
        assert shares(opened.text("#pair > b"))[0] == pytest.approx(weights[500 + step].max(), abs=6e-5)
        for key, label in opened.page.eval_on_selector_all(
            "#chips .chip", "(all) => all.map((x) => [x.dataset.i, x.innerText])"
        ):
            assert shares(label)[-1] == pytest.approx(weights[500 + step, int(key)], abs=6e-4)
        opened.page.keyboard.press("ArrowRight")
        until(lambda want=step + 501: f"q={want}" in address(opened))
    opened.page.keyboard.press("t")
    until(lambda: "dir=to" in address(opened))
    key = int(re.search(r"k=(\d+)", address(opened))[1])
    for query, label in opened.page.eval_on_selector_all(
        "#chips .chip", "(all) => all.map((x) => [x.dataset.i, x.innerText])"
    ):
        assert shares(label)[-1] == pytest.approx(weights[int(query), key], abs=6e-4)
    assert "Every weight is exact" in opened.text("#note")


def test_the_last_of_many_choices_wins(biased: View, visit: Callable[..., Opened]):
    opened = visit(biased, "#h=0.3&q=300&k=290")
    for _ in range(30):
        opened.page.keyboard.press("ArrowRight")
    until(lambda: "q=330" in address(opened))
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(weights_of(biased, 3)[330].max(), abs=6e-5)


def test_what_is_out_of_sight_again_is_not_computed(visit: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch):
    """A slow server, and somebody who zooms through."""
    whole, asked = answers_module._OF_HEAD["tile"], []

    def slowly(layer: Any, h: int, query: dict[str, str]) -> bytes:
        asked.append(query)
        time.sleep(0.15)
        return whole(layer, h, query)

    opened = visit(looked_at(3000, mask=masks.causal()), "#h=0.1&q=2500&k=1500&wide=1")
    painted(opened)
    monkeypatch.setitem(answers_module._OF_HEAD, "tile", slowly)
    seen = len(opened.requests)
    for _ in range(5):
        opened.page.keyboard.press("+")
        opened.settle()
    painted(opened)
    sent = [url for url in opened.requests[seen:] if "/tile." in url]
    assert len(sent) >= 4
    assert len(asked) <= len(sent) / 2  # one was being computed; the others were given up before their turn


def test_the_derivation_asks_for_the_products_of_one_pair(visit: Callable[..., Opened]):
    torch.manual_seed(123)
    layer = MultiHeadAttention(3, 4, 6, 0.0, 2)
    view = clearhead.look(layer, torch.rand(6, 3), tokens=list("abcdef"))
    opened = visit(view, "#h=0.1&q=5&k=2")
    for query, key in ((5, 2), (5, 3), (4, 3)):
        opened.page.evaluate("(hash) => { location.hash = hash; }", f"h=0.1&q={query}&k={key}")
        until(lambda at=(query, key): f"q\n{at[0]}\n=\nx" in opened.text("[data-step=project]"))
        q = [f"{x:.3f}".replace("-", "−") for x in view.maps[0].q[0, 1, query].tolist()]
        assert opened.page.locator("[data-step=project] mtable.query, [data-step=project] mn.query").count() >= 2
        assert all(x in opened.text("[data-step=project]") for x in q)
    asked = [url for url in opened.requests if "/part/p." in url]
    assert all(re.search(r"p\.0\.1\?query=\d&key=\d$", url) for url in asked)
    before = len(asked)
    opened.page.evaluate("() => { location.hash = 'h=0.1&q=5&k=2'; }")  # known already
    until(lambda: "q\n5\n=\nx" in opened.text("[data-step=project]"))
    assert len([url for url in opened.requests if "/part/p." in url]) == before


def test_layers_are_heard_of_as_they_are_read(visit: Callable[..., Opened]):
    view = looked_at(200, mask=masks.causal())
    opened = visit(view, "#h=0.1")
    assert opened.text("#why") == "This head is being read."
    assert "reading" not in opened.text("#pixel")
    row = weights_of(view, 1)
    query, key = (int(re.search(rf"{name}=(\d+)", address(opened))[1]) for name in "qk")
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(row[query, key], abs=6e-5)  # already, before it is read
    view.heads()
    until(lambda: opened.text("#why") != "This head is being read.")
    assert opened.text("#badge") == view.heads()[1].role
    assert opened.page.evaluate("document.querySelector('[data-head=\"0.1\"]').getAttribute('aria-label')").endswith(
        view.heads()[1].role
    )


NOT_FINITE = {
    "the weights of a row": {"bias": scores.DenseBias(torch.full((1, 1, 9, 9), torch.nan))},
    "queries and keys": {"scale": 1e38},
}


@pytest.mark.parametrize("what", NOT_FINITE)
def test_weights_that_are_not_finite_are_told_and_not_shown(what: str, visit: Callable[..., Opened]):
    opened = visit(looked_at(9, **NOT_FINITE[what]), ready=".failed")
    assert opened.text("#state").startswith("The attention of this head is not finite")
    assert not opened.page.is_visible("main")


def test_a_head_that_is_not_finite_is_told_when_it_is_read(visit: Callable[..., Opened]):
    bias = torch.zeros(1, 4, 9, 9)
    bias[:, 2] = torch.nan
    view = looked_at(9, bias=scores.DenseBias(bias))
    opened = visit(view, "#h=0.1")
    with pytest.raises(ModelError):
        view.heads()
    opened.page.wait_for_selector("body.failed")
    assert "the attention of L0H2" in opened.text("#state")
    assert not opened.page.is_visible("main")


def test_one_token_is_shown(visit: Callable[..., Opened]):
    view = looked_at(1)
    view.heads()
    opened = visit(view)
    assert "1 token" in opened.text("#facts")
    assert opened.text("#pair > b") == "100%"


def test_pages_lead_to_one_another(plain: View, biased: View, open_page: Any):
    running = Running(plain, biased)
    page = open_page()
    try:
        page.goto(running.url)
        page.wait_for_selector("body[data-ready]")
        page.select_option("#pages", "1")
        page.wait_for_url("**page=1**")
        assert page.evaluate("document.querySelector('#pages').value") == "1"
        assert page.inner_text("#head-title").startswith("Layer")
    finally:
        page.close()
        running.stop()


def test_two_pages_side_by_side_show_the_same_head(plain: View, biased: View, open_page: Any):
    running = Running(plain, biased)
    page, complaints = open_page(), []
    page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
    try:
        page.goto(running.url + "#h=0.2")
        page.click("body[data-ready] #two-pages")
        for frame, view in zip(side_by_side(page, "Layer 0 · head 2"), (plain, biased), strict=True):
            until(lambda frame=frame: "live" in frame.locator("#facts").inner_text())
            head = int(frame.locator("#grid [aria-selected=true]").get_attribute("data-head")[2:])
            query, weights = int(frame.locator("#chips .query sub").inner_text()), weights_of(view, head)
            told = shares(frame.locator("#pair > b").inner_text())[0]
            assert told == pytest.approx(weights[query].max(), abs=6e-5)
            frame.locator("#tabs [data-v=matrix]").click()  # its tiles come the same way
            until(lambda frame=frame: "max of" in frame.locator("#pixel").inner_text())
        assert complaints == []
        running.stop()
        page.frame_locator("iframe").nth(1).locator("#t500").click()
        page.frame_locator("iframe").nth(1).locator("#state h2", has_text="The server does not answer").wait_for()
    finally:
        page.close()
        running.stop()


def test_a_server_that_stopped_is_told(plain: View, open_page: Any):
    running = Running(plain)
    page = open_page()
    page.goto(running.url)
    page.wait_for_selector("body[data-ready]")
    running.stop()
    page.keyboard.press("]")
    page.wait_for_selector("body.failed")
    assert page.inner_text("#state h2") == "The server does not answer"
    assert "Start it again" in page.inner_text("#state")
    page.close()


def test_the_policy_leaves_nothing_inline(plain: View, visit: Callable[..., Opened]):
    """Styles that the page sets itself, and all of its panes, come through the strict policy."""
    opened = visit(plain, "#h=0.1&q=300&k=100")
    for key in "?":
        opened.page.keyboard.press(key)
    opened.page.keyboard.press("Escape")
    for key in "amsldx":
        opened.page.keyboard.press(key)
        opened.settle()
    assert opened.page.evaluate("getComputedStyle(document.querySelector('.memory i')).getPropertyValue('--kept')")
