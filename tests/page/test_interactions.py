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
