"""Everything that can be done, by mouse alone, by keyboard alone, and by touch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Made, Opened, make, words

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]
START = "#h=6.2&q=30&k=4&dir=from&scale=root"


@pytest.fixture
def page(short: Made, show: Show) -> Any:
    return show(short, hash=START).page


def state(page: Any, selector: str, name: str) -> str | None:
    return page.get_attribute(selector, name)


def chosen(page: Any) -> tuple[int, int]:
    """The query and the key."""
    return tuple(int(re.search(f"[#&]{name}=(\\d+)", page.url)[1]) for name in "qk")


SWITCHES = [  # where to click, the key that does the same, what shows it: an expression
    ("#direction [data-v=to]", "t", "document.querySelector('#direction [data-v=to]').ariaChecked === 'true'"),
    ("#mode [data-v=columns]", "m", "document.querySelector('#columns').offsetParent !== null"),
    ("#lines", "l", "document.querySelectorAll('#line-layer path').length > 0"),
    ("#fade", "s", "location.hash.includes('fade=1')"),
    ("#scale [data-v=log]", "c", "document.querySelector('#scale [data-v=log]').ariaChecked === 'true'"),
    ("#theme", "d", "document.documentElement.dataset.theme === 'dark'"),
    ("#atlas-sheet", "a", "document.querySelector('#sheet').offsetParent !== null"),
    ("#enlarge", "x", "document.querySelector('#text').offsetParent === null"),
    ("#find", "/", "document.activeElement.id === 'find'"),
    ("#ask", "?", "document.querySelector('#help').open"),
]


@pytest.mark.parametrize(("selector", "key", "shown"), SWITCHES, ids=[key for _, key, _ in SWITCHES])
def test_a_switch_by_mouse_and_by_key(page: Any, selector: str, key: str, shown: str) -> None:
    assert not page.evaluate(shown)
    page.click(selector)
    assert page.evaluate(shown)
    page.goto("about:blank")
    page.go_back()
    page.wait_for_selector("body[data-ready]")
    page.evaluate(f"location.hash = '{START}'")
    assert not page.evaluate(shown)
    page.keyboard.press(key)
    assert page.evaluate(shown)


def test_from_and_to_and_back(page: Any) -> None:
    for act in (lambda v: page.click(f"#direction [data-v={v}]"), lambda v: page.keyboard.press(v[0])):
        for direction in ("to", "from"):
            act(direction)
            assert f"dir={direction}" in page.url


def test_a_card_by_pointer_and_by_focus(short: Made, show: Show) -> None:
    opened = show(short, hash=START, size=(900, 640))  # no room for a card that stays
    page = opened.page
    page.hover("[data-head='5.1']")
    assert page.is_visible("#tip")
    assert "Layer 5 · head 1" in opened.text("#tip")
    page.mouse.move(600, 300)
    assert not page.is_visible("#tip")
    page.keyboard.press("1"), page.keyboard.press("ArrowUp")
    assert "Layer 5 · head 2" in opened.text("#tip")
    page.keyboard.press("Enter")
    page.locator("#head-title", has_text="Layer 5 · head 2").wait_for()


def test_the_heads_of_a_role_by_button_and_by_bracket(show: Show) -> None:
    opened = show(make(words(20), layers=4), hash="#h=5.1")
    title = opened.page.locator("#head-title")
    for act, head in (
        (lambda: opened.page.click("#after"), "Layer 7"),
        (lambda: opened.page.click("#before"), "Layer 5"),
        (lambda: opened.page.keyboard.press("]"), "Layer 7"),
        (lambda: opened.page.keyboard.press("["), "Layer 5"),
    ):
        act()
        title.filter(has_text=head).wait_for()


def test_the_legend_by_mouse_and_by_keyboard(page: Any) -> None:
    pressed = "[...document.querySelectorAll('#legend [aria-pressed=true]')].map((b) => b.dataset.role).join()"
    page.click("#legend [data-role=sink]")
    page.click("#legend [data-role=local]", modifiers=["Shift"])
    assert page.evaluate(pressed) == "sink,local"
    page.click("#legend [data-role=sink]")
    page.click("#legend [data-role=sink]")
    assert page.evaluate(pressed) == ""
    page.focus("#legend button")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate(pressed) == "previous"
    assert page.evaluate("document.activeElement.dataset.role") == "previous"
    page.keyboard.press("Escape")
    assert page.evaluate(pressed) == ""


def test_query_and_key_by_mouse(page: Any) -> None:
    page.click("#t20")
    assert chosen(page)[0] == 20
    page.click("#t7", modifiers=["Shift"])
    assert chosen(page) == (20, 7)
    page.locator("#chips .chip").last.click()
    assert chosen(page)[0] == 20
    row = page.locator("#looks tr[data-i]").nth(2)
    key = int(row.get_attribute("data-i"))
    row.click()
    assert chosen(page) == (20, key)
    page.click("#t20")  # again: the pointer leads
    page.hover("#t9")
    page.locator("#t9.is-query").wait_for()
    assert page.inner_text("#chips").startswith(page.inner_text("#t9").split("\n")[0])
    page.click("#t9")
    page.hover("#t3")
    assert page.locator("#t9.is-query").count() == 1


def test_query_and_key_by_keyboard(page: Any) -> None:
    press = page.keyboard.press
    press("2"), press("Home")
    assert chosen(page)[0] == 0
    press("End")
    assert chosen(page)[0] == 39
    press("ArrowLeft"), press("ArrowLeft"), press("ArrowRight")
    assert chosen(page)[0] == 38
    key = chosen(page)[1]
    press("Shift+ArrowLeft")
    assert chosen(page) == (38, max(0, key - 1))
    press("Shift+ArrowRight")
    assert chosen(page) == (38, max(0, key - 1) + 1)
    top = page.evaluate("document.querySelector('#t38').getBoundingClientRect().top")
    press("ArrowUp")
    above = chosen(page)[0]
    assert page.evaluate(f"document.querySelector('#t{above}').getBoundingClientRect().top") < top - 20
    press("ArrowDown")
    assert page.evaluate(f"document.querySelector('#t{chosen(page)[0]}').getBoundingClientRect().top") > top - 20
    press("4")
    order = page.eval_on_selector_all("#looks tr[data-i]", "(all) => all.map((row) => Number(row.dataset.i))")
    at = order.index(chosen(page)[1])
    press("ArrowDown" if at == 0 else "ArrowUp")
    assert chosen(page)[1] == order[1 if at == 0 else at - 1]
    press("2"), press("Enter")
    page.hover("#t9")
    page.locator("#t9.is-query").wait_for()
    press("Enter")
    page.locator(f"#t{chosen(page)[0]}.is-query").wait_for()


def test_a_pair_by_mouse_and_by_keyboard(page: Any) -> None:
    box = page.locator("#canvas").bounding_box()
    data = page.evaluate("({ ...document.querySelector('#canvas').dataset })")
    left, top, cell = (float(data[name]) for name in ("left", "top", "cell"))
    page.mouse.click(box["x"] + left + 8.5 * cell, box["y"] + top + 25.5 * cell)
    page.wait_for_url(re.compile("q=25&k=8"))
    page.keyboard.press("3")
    for key, pair in (("ArrowUp", (24, 8)), ("ArrowLeft", (24, 7)), ("ArrowDown", (25, 7)), ("ArrowRight", (25, 8))):
        page.keyboard.press(key)
        assert chosen(page) == pair


def port(page: Any) -> dict[str, float]:
    """Which part of the matrix is on the canvas, once that is painted: pixels a cell, and the first cell."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return {name: float(x) for name, x in page.evaluate("({ ...document.querySelector('#canvas').dataset })").items()}


def until_zoomed(page: Any, cell: float, larger: bool) -> dict[str, float]:
    for _ in range(100):
        at = port(page)
        if (at["cell"] > cell) if larger else (at["cell"] < cell):
            return at
    raise AssertionError(f"a cell takes {at['cell']} pixels still")


def middle_of(page: Any, at: dict[str, float], query: int, key: int) -> tuple[float, float]:
    """Where a cell is on the screen."""
    box = page.locator("#canvas").bounding_box()
    across, down = (box[edge] + at[side] for edge, side in (("x", "left"), ("y", "top")))
    return across + (key + 0.5 - at["x"]) * at["cell"], down + (query + 0.5 - at["y"]) * at["cell"]


def test_zoom_and_pan_by_mouse(page: Any) -> None:
    whole = port(page)
    where = middle_of(page, whole, 25, 12)
    page.mouse.move(*where)
    page.mouse.wheel(0, -600)
    near = until_zoomed(page, whole["cell"], True)
    assert middle_of(page, near, 25, 12) == pytest.approx(where, abs=1)  # it grew about the pointer
    page.mouse.down()
    page.mouse.move(where[0] + 21, where[1] + 12, steps=3)
    page.mouse.up()
    moved = port(page)
    assert moved["cell"] == near["cell"]
    assert (near["x"] - moved["x"], near["y"] - moved["y"]) == pytest.approx(
        (21 / near["cell"], 12 / near["cell"]), abs=0.01
    )
    assert chosen(page) == (30, 4)  # a drag is no click
    page.mouse.click(*where, button="right")
    page.mouse.move(where[0] + 9, where[1])
    assert (chosen(page), port(page)) == ((30, 4), moved)  # nor does a menu choose or drag
    page.mouse.wheel(0, 3000)
    assert until_zoomed(page, near["cell"], False) == whole
    page.mouse.dblclick(*where)
    cells = until_zoomed(page, 24.9, True)
    assert middle_of(page, cells, 25, 12) == pytest.approx(middle_of(page, cells, *chosen(page)), abs=0.01)
    page.mouse.dblclick(*middle_of(page, cells, 25, 12))
    assert until_zoomed(page, cells["cell"], False)["cell"] == whole["cell"]
    page.click("#zoom-in")
    near = until_zoomed(page, whole["cell"], True)
    page.click("#zoom-out")
    assert until_zoomed(page, near["cell"], False)["cell"] == whole["cell"]
    page.click("#zoom-cells")
    cells = until_zoomed(page, 24.9, True)
    page.wait_for_url("**zoom=**")
    page.click("#zoom-whole")
    assert until_zoomed(page, cells["cell"], False) == port(page)
    page.wait_for_url(lambda url: "zoom=" not in url)


def test_zoom_by_keyboard(page: Any) -> None:
    whole = port(page)
    page.keyboard.press("+")
    near = until_zoomed(page, whole["cell"], True)
    assert near["cell"] == pytest.approx(1.5 * whole["cell"])
    page.keyboard.press("-")
    assert until_zoomed(page, near["cell"], False)["cell"] == whole["cell"]
    page.keyboard.press("z")
    cells = until_zoomed(page, 24.9, True)
    page.keyboard.press("3")
    for _ in range(20):
        page.keyboard.press("ArrowUp")
    query, key = chosen(page)
    assert query == 10
    at = port(page)
    assert at["y"] <= query  # what is chosen stays in sight
    assert at["x"] <= key
    page.keyboard.press("0")
    assert until_zoomed(page, cells["cell"], False)["cell"] == whole["cell"]


def test_zoom_and_pan_with_two_fingers_and_with_one(short: Made, show: Show) -> None:
    page = show(short, hash=START, touch=True).page
    whole = port(page)
    left, top = middle_of(page, whole, 25, 12)
    session = page.context.new_cdp_session(page)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y} for x, y in points]})

    touch("touchStart", (left - 10, top), (left + 10, top))
    touch("touchMove", (left - 40, top), (left + 40, top))
    touch("touchEnd")
    near = until_zoomed(page, whole["cell"], True)
    assert near["cell"] == pytest.approx(4 * whole["cell"], rel=0.05)
    assert middle_of(page, near, 25, 12) == pytest.approx((left, top), abs=2)
    touch("touchStart", (left, top))
    touch("touchMove", (left + 15, top))
    touch("touchMove", (left + 30, top))
    touch("touchEnd")
    assert near["x"] - port(page)["x"] == pytest.approx(30 / near["cell"], rel=0.2)


def test_tab_reaches_every_control(page: Any) -> None:
    page.focus("#theme")
    reached = set()
    for _ in range(60):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.dataset.v || 'other'"))
        page.keyboard.press("Tab")
    assert {
        "theme",
        "share",
        "save",
        "ask",
        "atlas-sheet",
        "before",
        "after",
        "from",
        "text",
        "lines",
        "fade",
    } <= reached
    assert {"find", "canvas", "enlarge", "root"} <= reached


def test_single_keys_can_be_switched_off(page: Any) -> None:
    page.keyboard.press("?")
    page.uncheck("#single-keys")
    page.keyboard.press("Escape")
    page.keyboard.press("t"), page.keyboard.press("x"), page.keyboard.press("a")
    assert chosen(page) == (30, 4)
    assert "dir=from" in page.url
    assert page.is_visible("#text")
    page.focus("#text")
    page.keyboard.press("ArrowLeft")  # keys of the pane that has the focus still work
    assert chosen(page)[0] == 29
    page.click("#ask")
    page.check("#single-keys")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert "dir=to" in page.url


def test_keys_typed_into_the_find_box_are_text(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("tx1?")
    assert page.input_value("#find") == "tx1?"
    assert "dir=from" in page.url
    assert not page.is_visible("#help")


def test_the_find_box_is_left_where_the_text_is_hidden(page: Any) -> None:
    page.keyboard.press("m")
    page.keyboard.press("/")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.input_value("#find") == ""
    assert "dir=to" in page.url


def test_by_touch(short: Made, show: Show) -> None:
    page = show(short, hash=START, touch=True).page
    page.tap("[data-head='5.1']")
    page.locator("#head-title", has_text="Layer 5 · head 1").wait_for()
    page.tap("#t20")
    assert chosen(page)[0] == 20
    page.tap("#direction [data-v=to]")
    assert "dir=to" in page.url
    page.tap("#direction [data-v=from]")
    page.tap("#legend [data-role=sink]")
    assert state(page, "#legend [data-role=sink]", "aria-pressed") == "true"
    page.tap("#t20")
    box = page.locator("#t5").bounding_box()
    finger = [{"x": box["x"] + 4, "y": box["y"] + 8}]
    session = page.context.new_cdp_session(page)
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": finger})
    page.wait_for_timeout(520)
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_url(re.compile("q=20&k=5"))
