"""The text: its tints are weights, any token is text, words are found, and a very long one is built in parts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from clearhead.page import LayerData, Payload, StrongWeights, build, render
from clearhead.page.texts import Tokens
from clearhead.tokens import same_words

from .conftest import Head, Made, Opened, make, tint, words

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]
TINTS = """(spans) => spans.map((span) => [Number(span.dataset.i),
    (getComputedStyle(span).backgroundColor.match(/\\d+/g) || []).map(Number)])"""


def tone(weight: float, scale: str) -> float:
    return {"root": np.sqrt(weight), "linear": weight, "log": max(0, 1 + np.log10(max(weight, 1e-9)) / 4)}[scale]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("exact", [True, False])
def test_the_tint_of_a_token_is_its_weight(show: Show, dark: bool, exact: bool) -> None:
    made = make(words(40), exact=exact)
    row = made.weights[1][2][30]
    opened = show(made, hash="#h=6.2&q=30&k=4&scale=root", dark=dark)
    shown = row if exact else (np.rint(255 * np.sqrt(row)) / 255) ** 2  # 8 bits hold the square root
    for scale in ("root", "log", "linear"):
        floor, tinted = 2e-4 if scale == "log" else 0.004, 0
        for key, colour in opened.page.eval_on_selector_all("#text .t", TINTS):
            if shown[key] < floor or not (exact or row[key] >= 0.004):
                assert colour[3:] == [0], (key, row[key])
                continue
            tinted += 1
            expected = tint(round(255 * tone(shown[key], scale)) / 255, dark=dark)
            assert np.abs(np.array(colour[:3]) - expected).max() <= 2, (key, row[key])
        assert tinted > 5
        opened.page.keyboard.press("c")


def test_the_text_can_be_tinted_by_the_influence_on_the_last_token(show: Show) -> None:
    made = make(words(40))
    influence = np.linspace(0.001, 0.9, 40, dtype=np.float32)
    influence /= influence.sum()
    page = show(replace(made, influence=influence), hash="#h=6.2&q=3&k=2&scale=root").page
    page.click("#through")
    tinted = page.locator("#text .t").nth(39).and_(page.locator("[style*=background]"))  # a later token than the query
    tinted.wait_for()
    for key, colour in page.eval_on_selector_all("#text .t", TINTS):
        if influence[key] >= 0.004:
            assert np.abs(np.array(colour[:3]) - tint(round(255 * np.sqrt(influence[key])) / 255)).max() <= 2, key
    page.hover("#text .t >> nth=39")
    assert page.inner_text("#reader").endswith("% of the last token, through all layers")
    page.click("#through")
    tinted.wait_for(state="detached")


def test_where_no_influence_is_known_none_is_offered(show: Show) -> None:
    assert show(make(words(10))).page.is_hidden("#through")


ODD = [
    "<b>",
    "&amp;",
    "</script>",
    '"',
    " 'it'",
    "🦊",
    " 👩‍👩‍👧",
    "e\u0301",
    " a\u0308\u0323",
    " שלום",
    " عالم",
    "\n",
    "\n\n",
    "\t",
]
UNSEEN = {"\ufeff": "U+FEFF", "\u202e": "U+202E", " \u200b\u200d": "U+200B U+200D", "\x7f": "�"}
ODD += [*UNSEEN, "\r\n", "", "\x00", "    ", " onclick=alert(1)", "${1}", " 漢字", "한", "=1+1", " ok"]


@pytest.mark.parametrize("mode", ["text", "columns"])
def test_any_token_is_text(show: Show, mode: str) -> None:
    opened = show(make(ODD), hash=f"#h=5.1&q={len(ODD) - 1}&k=0&mode={mode}")
    page = opened.page
    assert page.locator("main :is(img, script), :is(#text, #columns) b").count() == 0
    if mode == "text":
        own = "(all) => all.map((t) => [...t.childNodes].find((c) => c.nodeType === 3)?.data ?? '')"
        shown = page.eval_on_selector_all("#text .t", own)
        for token, text in zip(ODD, shown, strict=True):
            if token in UNSEEN:
                assert text == UNSEEN[token]
            elif token.strip(" \n\t\r\x00") == token.strip() and token.strip():
                assert text == token.strip()
        for i, token in enumerate(ODD):
            if re.match(r" ?[א-ת؀-ۿ]", token):
                assert page.get_attribute(f"#t{i}", "dir") == "rtl"
    else:
        assert page.locator("#columns .side").count() == 2 * len(ODD)
    for i in range(len(ODD)):  # every pane names it: chips, question, table, matrix
        page.evaluate(f"location.hash = 'h=5.1&q={len(ODD) - 1}&k={i}&dir=from&mode={mode}'")
        page.locator("#pair .key sub", has_text=re.compile(rf"^{i}$")).wait_for()


def test_find_goes_through_all_places_and_over_tokens(short: Made, show: Show) -> None:
    opened = show(short, hash="#h=6.2&q=0&k=0")
    page, text = opened.page, "".join(short.tokens)
    starts = np.cumsum([0, *map(len, short.tokens)])
    wanted = "ROTE IN"
    places = [int(np.searchsorted(starts, m.start(), "right")) - 1 for m in re.finditer(wanted.lower(), text)]
    assert len(places) > 1
    page.keyboard.press("/")
    page.keyboard.type(wanted)
    for at, place in enumerate([*places, places[0]]):
        page.keyboard.press("Enter")
        assert page.get_attribute("#text", "aria-activedescendant") == f"t{place}"
        assert opened.text("#reader") == f"“{wanted}”: place {at % len(places) + 1} of {len(places)}"
    page.keyboard.press("Shift+Enter")
    assert page.get_attribute("#text", "aria-activedescendant") == f"t{places[-1]}"
    page.keyboard.type("zebra")
    page.keyboard.press("Enter")
    assert "is not in the text" in opened.text("#reader")
    assert "is not in the text" in opened.text("#live")
    page.keyboard.press("Escape")
    assert page.input_value("#find") == ""
    assert page.evaluate("document.activeElement.id") == "text"


def long_page(n: int) -> Payload:
    """A head over n tokens: half to the first, a fifth to a token in between, a fifth to itself."""
    draw = np.random.default_rng(0)
    kept = [sorted({0, int(draw.integers(0, max(1, t))), t}) for t in range(n)]
    counts = np.array([[len(keys) for keys in kept]], np.int32)
    values = np.concatenate([[180] + [120] * (len(keys) - 1) for keys in kept]).astype(np.uint8)
    strong = StrongWeights(counts, np.concatenate(kept), values, 16, 0.004)
    tokens = [word + ".\n\n" * (i % 391 == 390) for i, word in enumerate(words(n))]
    thumbs = draw.integers(0, 255, (1, 24, 24)).astype(np.uint8)
    head = Head(5, 0, "sink", {"sink": 0.5}, {"sink": 0.1}, 1.0, 3.0)
    layer = LayerData(5, thumbs, strong, True, [0])
    return build([layer], [Tokens(tokens, same_words(tokens))], [head], name="long", nbytes=1000, dense_nbytes=4000)


@pytest.fixture(scope="module")
def very_long() -> str:
    return render(long_page(25_000))


def test_of_a_very_long_text_only_what_is_near_is_built(very_long: str, show: Show) -> None:
    opened = show(very_long, hash="#q=12000&k=0")
    page = opened.page
    inside = """(i) => { const [a, b] = [document.querySelector('#t' + i), document.querySelector('#text')]
        .map((e) => e.getBoundingClientRect()); return a.top >= b.top && a.bottom <= b.bottom; }"""
    for move, token in ((None, 12_000), ("End", 24_999), ("ArrowLeft", 24_998), ("Home", 0), ("ArrowRight", 1)):
        if move:
            page.focus("#text")
            page.keyboard.press(move)
        opened.settle()
        assert page.locator("#text .t").count() < 26_000 / 2
        assert page.evaluate(inside, token)
        span = page.locator(f"#t{token}")
        assert span.get_attribute("aria-selected") == "true"
        assert (span.get_attribute("aria-posinset"), span.get_attribute("aria-setsize")) == (str(token + 1), "25000")
        unseen = page.eval_on_selector_all("#text .t.unseen", "(all) => all.map((t) => Number(t.dataset.i))")
        built = page.eval_on_selector_all("#text .t", "(all) => all.map((t) => Number(t.dataset.i))")
        assert unseen == [i for i in built if i > token]


def test_what_comes_into_the_window_is_painted_like_the_rest(very_long: str, show: Show) -> None:
    opened = show(very_long, hash="#q=20000&k=0")
    page = opened.page
    rows = page.eval_on_selector_all("#looks tr[data-i]", "(all) => all.map((row) => Number(row.dataset.i))")
    between = next(i for i in rows if i not in (0, 20_000))
    assert 2000 < between < 18_000
    assert page.locator(f"#t{between}").count() == 0
    page.evaluate(f"(t => t.scrollTop = t.scrollHeight * {between / 25_000})(document.querySelector('#text'))")
    page.locator(f"#t{between} > i").wait_for(state="attached")
    assert opened.text(f"#t{between} > i") == "22%"
    assert page.eval_on_selector(f"#t{between}", "(t) => t.style.background") != ""
    page.click(f"#t{between}")
    assert f"q={between}&" in page.url
    assert page.locator(f"#t{between + 1}.unseen").count() == 1
    assert page.locator(f"#t{between - 1}.unseen").count() == 0


def test_find_in_a_very_long_text(very_long: str, show: Show) -> None:
    opened = show(very_long, hash="#q=0&k=0")
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("storm came over the sea.")
    opened.page.keyboard.press("Enter")
    opened.page.keyboard.press("Enter")
    assert re.search(r"place 2 of \d+", opened.text("#reader"))
    assert opened.page.locator("#text [aria-selected=true]").is_visible()


def test_two_hundred_thousand_tokens(show: Show) -> None:
    text = render(long_page(200_000))
    before = time.monotonic()
    opened = show(text)
    assert time.monotonic() - before < 20
    assert "200000 tokens" in opened.text("#facts")
    opened.page.keyboard.press("2"), opened.page.keyboard.press("Home")
    assert opened.page.locator("#t0[aria-selected=true]").count() == 1
    opened.page.keyboard.press("m")
    assert "at most 600 tokens" in opened.text("#columns")
