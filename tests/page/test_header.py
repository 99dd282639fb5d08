"""What can be taken away from the page, and the contact sheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from .conftest import Made, Opened, make, words

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]


def saved(opened: Opened, choice: str, tmp_path: Path) -> Path:
    opened.page.click("#save")
    with opened.page.expect_download() as download:
        opened.page.click(f"#save-menu [data-v={choice}]")
    target = tmp_path / download.value.suggested_filename
    download.value.save_as(target)
    return target


def test_a_saved_page_is_the_page(short: Made, show: Show, tmp_path: Path) -> None:
    opened = show(short, hash="#h=6.2&q=30&k=4")
    file = saved(opened, "page", tmp_path)
    assert file.name == "clearhead.html"
    again = show(file.read_text("utf-8"), hash="#h=6.2&q=30&k=4")
    for selector in ("#facts", "#head-title", "#chips", "#pair", "#looks", "#legend"):
        assert again.text(selector) == opened.text(selector)
    assert again.page.locator("#text .t").count() == 40
    twice = saved(again, "page", tmp_path)
    assert twice.read_text("utf-8") == file.read_text("utf-8")


def test_the_weights_of_a_token_as_a_table(show: Show, tmp_path: Path) -> None:
    tokens = words(20)
    tokens[3], tokens[5] = ' say "hi", ', "\n"
    made = make(tokens)
    opened = show(made, hash="#h=6.2&q=12&k=4")
    file = saved(opened, "weights", tmp_path)
    assert file.name == "layer6-head2-from-12.csv"
    rows = list(csv.DictReader(io.StringIO(file.read_bytes().decode(), newline="")))
    assert [row["text"] for row in rows] == tokens
    assert [int(row["token"]) for row in rows] == list(range(20))
    np.testing.assert_allclose([float(row["weight"]) for row in rows], made.weights[1][2][12], atol=1e-6)


def test_the_matrix_as_a_picture(short: Made, show: Show, tmp_path: Path) -> None:
    file = saved(show(short, hash="#h=6.2"), "picture", tmp_path)
    assert file.name == "layer6-head2.png"
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 3000


def test_the_menu_works_by_keyboard(short: Made, show: Show) -> None:
    page = show(short).page
    page.focus("#save")
    page.keyboard.press("Enter")
    assert page.get_attribute("#save", "aria-expanded") == "true"
    focused = "document.activeElement.dataset.v"
    assert page.evaluate(focused) == "page"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "picture"
    page.keyboard.press("ArrowUp"), page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == "weights"
    page.keyboard.press("Escape")
    assert not page.is_visible("#save-menu")
    assert page.evaluate("document.activeElement.id") == "save"
    page.click("#save"), page.click("#head-title")
    assert not page.is_visible("#save-menu")


def test_a_link_to_the_view_is_copied_or_pointed_at(short: Made, show: Show) -> None:
    opened = show(short, hash="#h=6.2&q=30&k=4")
    opened.page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (x) => (window.got = x) } })"
    )
    opened.page.click("#share")
    opened.page.wait_for_selector("#toast.on")
    assert "copied" in opened.text("#toast")
    assert opened.page.evaluate("got") == opened.page.url
    assert "h=6.2&q=30&k=4" in opened.page.url
    other = show(short, before="Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    other.page.click("#share")
    assert "Copy the address" in other.text("#toast")


def test_the_contact_sheet_shows_every_head_by_role_the_strongest_first(show: Show) -> None:
    made = make(words(20), layers=4)
    opened = show(made, hash="#h=6.2")
    page = opened.page
    page.click("#atlas-sheet")
    assert page.locator("#sheet canvas").count() == 16
    assert not page.is_visible("#text")
    heads = {f"{head.layer}.{head.head}": head for head in made.heads}
    for section in page.locator("#sheet section").all():
        role = section.get_attribute("aria-label")
        names = [button.get_attribute("data-sheet") for button in section.locator("button").all()]
        assert {heads[name].role for name in names} == {role}
        strengths = [heads[name].scores.get(role) or 0 for name in names]
        assert strengths == sorted(strengths, reverse=True)
    page.click("[data-sheet='7.1']")
    page.locator("#head-title", has_text="Layer 7 · head 1").wait_for()
    assert not page.is_visible("#sheet")
    assert page.is_visible("#text")


def test_the_contact_sheet_by_keyboard(short: Made, show: Show) -> None:
    opened = show(short, hash="#h=6.2")
    page, focused = opened.page, "document.activeElement.dataset.sheet"
    page.keyboard.press("a")
    assert page.evaluate(focused) == "6.2"
    assert "sheet=1" in page.url
    first = page.evaluate(focused)
    page.keyboard.press("ArrowRight")
    second = page.evaluate(focused)
    assert second != first
    assert page.is_visible("#tip")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) == first
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) != first
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused)
    page.keyboard.press("Escape")
    assert not page.is_visible("#sheet")
    assert page.evaluate("document.activeElement.dataset.head") == "6.2"
    page.keyboard.press("a"), page.keyboard.press("ArrowRight")
    name = page.evaluate(focused)
    page.keyboard.press("Enter")
    page.locator("#head-title", has_text="Layer {} · head {}".format(*name.split("."))).wait_for()
    assert not page.is_visible("#sheet")


def test_the_legend_filters_the_contact_sheet_too(short: Made, show: Show) -> None:
    opened = show(short, hash="#roles=sink.local&sheet=1")
    assert {s.get_attribute("aria-label") for s in opened.page.locator("#sheet section").all()} == {"sink", "local"}
    assert re.search("roles=sink.local", opened.page.url)
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("#legend [aria-pressed=true]").count() == 2
    opened.page.keyboard.press("Escape")
    assert "roles" not in opened.page.url
