"""What the page shows before, without, and instead of its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from clearhead.page import render

from .conftest import Made, Opened

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]

# Unpacking waits until the test lets it go on.
HELD = """
    window.go = new Promise((done) => (window.letGo = done));
    const arrayBuffer = Response.prototype.arrayBuffer;
    Response.prototype.arrayBuffer = async function () { await window.go; return arrayBuffer.call(this); };
"""
FLAT = """(() => {
    const canvas = document.querySelector("#grid canvas");
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const seen = new Set();
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add([...data.slice(i, i + 3)].join());
    return [...seen];
})()"""


def test_header_text_and_flat_thumbnails_come_first(short: Made, show: Show) -> None:
    opened = show(short, before=HELD, ready="body.reading")
    page = opened.page
    assert "40 tokens" in opened.text("#facts")
    assert page.locator("#text .t").count() == 40
    assert opened.text("#chips") == "reading weights …"
    assert opened.text("#steps") == "The derivation follows the weights."
    assert page.locator("#grid button").count() == 8
    assert page.evaluate(FLAT) == ["239,238,233"]
    for key in ("ArrowLeft", "t", "m", "4", "?"):
        page.keyboard.press(key)
    page.click("#theme")
    page.evaluate("letGo()")
    page.wait_for_selector("body[data-ready]")
    assert "attends to" in opened.text("#chips")
    assert len(page.evaluate(FLAT)) > 20


BROKEN = {
    "This file is cut short": lambda text: text[: text.index('data-blob="w.6.1"') + 60],
    "This file and its page do not match": lambda text: re.sub(r'"format":\d+', '"format":99', text),
    "There are no numbers in this file": lambda text: text[: text.index('<script type="application/json"')],
    "This file is damaged": lambda text: text.replace(
        'data-blob="thumbs" data-bytes="', 'data-blob="thumbs" data-bytes="9'
    ),
    "No text has been read yet": lambda text: re.sub(r'"tokens":\[.*?\]', '"tokens":[]', text, count=1),
}


@pytest.mark.parametrize("title", BROKEN)
def test_a_broken_file_says_so_names_the_call_and_shows_no_numbers(short: Made, show: Show, title: str) -> None:
    opened = show(BROKEN[title](render(short.build())), ready="body.failed")
    assert opened.text("#state").startswith(title)
    assert opened.text("#state pre").endswith('view.save("page.html")')
    assert not opened.page.is_visible("main")
    assert not re.search(r"tokens|kept", opened.text("header"))


def test_a_part_that_is_damaged_later_is_said_when_it_is_asked_for(short: Made, show: Show) -> None:
    text = render(short.build()).replace('data-blob="w.6.1" data-bytes="', 'data-blob="w.6.1" data-bytes="9')
    opened = show(text, hash="#h=5.0")
    opened.page.click("[data-head='6.1']")
    opened.page.wait_for_selector("body.failed")
    assert opened.text("#state").startswith("This file is damaged")
    assert "w.6.1" in opened.text("#state")


def test_an_old_browser_is_told(short: Made, show: Show) -> None:
    opened = show(short, ready="body.failed", before="delete window.DecompressionStream")
    assert opened.text("#state").startswith("This browser is too old")
    assert opened.page.locator("#state pre").count() == 0


def test_without_scripts_a_sentence_says_so(short: Made, open_page: Any) -> None:
    page = open_page(java_script_enabled=False)
    page.set_content(render(short.build()))
    assert "switched off" in page.inner_text("noscript")
    page.close()
