"""The page in a browser: what follows a click, the pointer, a switch or a size; how pieces of text are set."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import clearhead
from clearhead.page import render

from .conftest import Made, Opened, make, words

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]
BARS = "(all) => all.map((row) => [Number(row.dataset.i), parseFloat(row.querySelector('b').style.width)])"


def test_a_shift_click_sets_the_key_and_selects_no_text(short: Made, show: Show):
    page = show(short, hash="#h=6.2&q=30&k=4").page
    page.click("#t30")
    page.click("#t7", modifiers=["Shift"])
    assert "k=7" in page.url
    assert page.evaluate("getSelection().toString()") == ""
    assert page.evaluate("document.activeElement.id") == "text"
    first, last = page.locator("#t2").bounding_box(), page.locator("#t6").bounding_box()
    page.mouse.move(first["x"] + 2, first["y"] + 10)
    page.mouse.down()
    page.mouse.move(last["x"] + last["width"] - 2, last["y"] + 10)
    page.mouse.up()
    assert "the lamp and" in page.evaluate("getSelection().toString()")


def test_the_text_comes_back_from_the_columns_as_it_was(short: Made, show: Show):
    opened = show(short, hash="#h=6.2&q=30&k=4&lines=1")
    page = opened.page
    look = """(box) => [box.style.fontSize, box.style.lineHeight,
        ...[...box.querySelectorAll("i")].map((label) => label.parentNode.id + label.textContent),
        ...[...box.querySelectorAll("path")].map((path) => path.getAttribute("d"))]"""
    before = page.locator("#text").evaluate(look)
    assert page.locator("#line-layer path").count() > 0
    page.keyboard.press("m")
    page.keyboard.press("c")
    assert not page.is_visible("#text")
    page.keyboard.press("c"), page.keyboard.press("c"), page.keyboard.press("m")
    assert page.locator("#text").evaluate(look) == before


def test_everything_follows_the_pointer_while_nothing_is_pinned(short: Made, show: Show):
    opened = show(short, hash="#h=6.2&q=30&k=4")
    page = opened.page
    page.click("#t30")
    for token in (12, 25):
        page.hover(f"#t{token}")
        opened.settle()
        key = int(short.weights[1][2][token].argmax())
        assert opened.text("#pair").startswith(
            f"{short.tokens[token].strip()}{token} → {short.tokens[key].strip()}{key}"
        )
        assert page.get_attribute("#chips [aria-pressed=true]", "data-i") == str(key)
        assert re.search(f"{short.tokens[token].strip()}{token} .* {short.tokens[key].strip()}{key}", asked(opened))
        assert page.get_attribute("#looks .on", "data-i") == str(key)
        assert page.locator(".is-query").first.get_attribute("id") == f"t{token}"
    page.mouse.move(700, 5)
    assert asked(opened).startswith("Why does night30")


def asked(opened: Opened) -> str:
    return re.sub(r"\s+", " ", opened.text("#question"))


def test_both_tables_have_one_scale_of_bars(quantised: Made, show: Show):
    page = show(quantised, hash="#h=6.2&q=30&k=4").page
    weights = quantised.weights[1][2]
    most = max(weights[30].max(), weights[:, 4].max(), 0.1)
    for table, weight in (("looks", weights[30]), ("seen", weights[:, 4])):
        for i, width in page.eval_on_selector_all(f"#{table} tr[data-i]", BARS):
            assert width == pytest.approx(100 * weight[i] / most, abs=100 * 0.005 / most)  # of 8 bits


class Even(torch.nn.Module):
    """Attention that spreads evenly over all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_tiny_weights_have_tiny_bars(show: Show):
    view = clearhead.look(Even(), torch.zeros(200, 4), tokens=words(200))
    page = show(render(view.page())).page
    for _, width in page.eval_on_selector_all("#two tr[data-i]", BARS):
        assert width == pytest.approx(5, abs=0.1)  # 0.5% on a scale up to 10%


def test_what_is_too_little_to_tell_is_not_nothing(short: Made, show: Show):
    rest = show(short, hash="#h=6.2&q=30&k=4").page.inner_text("#looks .rest td:last-child")
    assert rest.endswith("%")
    assert rest != "0%"


def test_brackets_walk_the_heads_that_the_legend_shows(show: Show):
    opened = show(make(words(20), layers=2), hash="#h=5.1")
    page, seen = opened.page, []
    page.click("#legend [data-role=broad]")
    page.click("#legend [data-role=sink]", modifiers=["Shift"])
    assert page.get_attribute("#after", "title") == "Next shown head (])"
    for key in "]][":
        opened.press_for_another_head(key)
        seen.append(opened.text("#badge"))
    assert seen == ["sink", "broad", "sink"]


def test_brackets_go_on_to_any_head_where_a_role_has_one_only(show: Show):
    opened = show(make(words(20), layers=2), hash="#h=5.1")
    page, seen = opened.page, [opened.text("#badge")]
    assert page.get_attribute("#after", "title") == "Next head (])"
    assert opened.text("#after") == "head ›"
    for key in "]][":
        opened.press_for_another_head(key)
        seen.append(opened.text("#badge"))
    assert seen == ["previous", "sink", "local", "sink"]
    page.click("#before")
    page.locator("#badge", has_text="previous").wait_for()
    page.click("#legend [data-role=previous]")  # of the roles shown it is the only one, too
    assert page.get_attribute("#before", "title") == "Previous head ([)"
    opened.press_for_another_head("[")
    assert opened.text("#badge") == "induction"


def test_one_head_has_no_next(show: Show):
    page = show(make(words(20), layers=1, heads=1, groups=1)).page
    assert page.locator("#before:visible, #after:visible").count() == 0


def test_line_ends_stand_where_they_stand_in_the_piece(show: Show):
    tokens = ["One", " two", ".", "\n\nThe", " next", "\n\n    make", " it", ".\n", "so", "\n\n", "End", "\nlast"]
    page = show(make(tokens)).page
    tops = page.eval_on_selector_all("#text .t", "(all) => all.map((t) => t.offsetTop)")
    starts = [i for i, (a, b) in enumerate(pairwise(tops), 1) if b > a + 20]
    assert [sum(i >= start for start in starts) for i in range(len(tops))] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 5]
    assert page.locator("#text .paragraph").count() == 4
    assert page.locator("#t5").evaluate("(t) => t.firstChild.data") == "make"


def test_a_token_inside_a_character_is_a_sliver(show: Show):
    opened = show(make([" a", " Ü", "\ufffd", "ber", " all"]), hash="#h=5.1&q=4&k=0")
    page, sliver = opened.page, opened.page.locator("#t2")
    assert sliver.evaluate("(t) => [...t.childNodes].every((child) => child.nodeType !== 3)")
    assert 4 <= sliver.bounding_box()["width"] <= 10
    assert sliver.get_attribute("title") == sliver.get_attribute("aria-label") == "continues the character before"
    sliver.hover()
    assert " 2: " in opened.text("#reader")
    sliver.click()
    assert "q=2" in page.url
    page.keyboard.press("ArrowLeft"), page.keyboard.press("ArrowRight")
    assert page.get_attribute("#text", "aria-activedescendant") == "t2"
    assert "\ufffd" not in page.inner_text("body")


def test_a_head_without_scores_names_none(show: Show):
    made = make(["a", " b"], layers=1, heads=1, groups=1)
    made.heads[0].role = "other"
    made.heads[0].scores = dict.fromkeys(made.heads[0].scores)
    assert show(made).text("#why") == "No score passes its threshold."


def test_labels_of_the_matrix_stay_on_it_and_it_is_centred_when_large(show: Show):
    spy = """const fill = CanvasRenderingContext2D.prototype.fillText; window.drawn = [];
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
          window.drawn.push(y + 5 <= parseFloat(this.canvas.style.height)); return fill.call(this, text, x, y); };"""
    opened = show(make(words(200), layers=1, heads=1, groups=1), hash="#q=199&k=3", before=spy)
    opened.settle()
    drawn = opened.page.evaluate("window.drawn")
    assert drawn
    assert all(drawn)
    opened.page.keyboard.press("x")
    opened.settle()
    left, right = opened.page.evaluate(
        """(([a, b]) => [b.left - a.left, a.right - b.right])(["#matrix", "#canvas-frame"]
        .map((name) => document.querySelector(name).getBoundingClientRect()))"""
    )
    assert left == pytest.approx(right, abs=6)
    assert left > 100
    opened.page.keyboard.press("?")
    assert re.search(r"Esc\s+back, then", opened.text("#help"))
