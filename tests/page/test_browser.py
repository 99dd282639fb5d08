"""The page in a real browser: its numbers are Python's, every control works, nothing is asked of the net."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead
import clearhead.page
from clearhead.page import render
from clearhead.page.shell import DATA, static

from .conftest import Made, Opened, make, tint, words

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]


def weights_of(made: Made, layer: int, head: int) -> np.ndarray:
    return made.weights[layer - 5][head]


def shares(line: str) -> list[float]:
    """The percentages of a line, as shares; "<0.1%" counts as 0."""
    return [0.0 if mark else float(x) / 100 for mark, x in re.findall(r"(<?)([\d.]+)%", line)]


def pixel(opened: Opened, x: float, y: float) -> list[int]:
    canvas = "document.querySelector('#canvas').getContext('2d')"
    return opened.page.evaluate(f"[...{canvas}.getImageData({x}, {y}, 1, 1).data].slice(0, 3)")


def test_chips_labels_tables_and_pair_show_python_s_numbers(short: Made, show: Show):
    opened = show(short, hash="#h=6.2&q=30&k=4&dir=from&scale=root")
    page, row = opened.page, weights_of(short, 6, 2)[30]
    chips = page.locator("#chips .chip")
    for i in range(chips.count()):
        key = int(chips.nth(i).get_attribute("data-i"))
        assert shares(chips.nth(i).inner_text())[-1] == pytest.approx(row[key], abs=6e-4)
    assert sum(shares(opened.text("#chips"))) == pytest.approx(1, abs=4e-3)
    for key, label in page.eval_on_selector_all(
        "#text .t > i", "(all) => all.map((x) => [x.parentNode.id, x.textContent])"
    ):
        assert shares(label)[0] == pytest.approx(row[int(key[1:])], abs=5.1e-3)
    rows = page.locator("#looks tr[data-i]")
    order = [int(rows.nth(i).get_attribute("data-i")) for i in range(rows.count())]
    expected = np.argsort(-row)[: len(order)].tolist()
    assert order[:-1] == expected[:-1]
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(row[4], abs=6e-5)
    assert "exact" in opened.text("#note")


class Mixed(torch.nn.Module):
    """A causal layer, then one whose mask is a tensor that lets every query see some later keys."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[-2]
        scattered = (torch.arange(n)[:, None] + torch.arange(n)) % 3 != 0
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(attend(x, x, x, is_causal=True), x, x, attn_mask=scattered)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_causal_layer_beside_one_that_is_not(layer: int, show: Show):
    x = 1.5 * torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    made = clearhead.look(Mixed(), x, tokens=words(30))
    page = made.page()
    assert page.exact == ((0, 0),)
    assert made.maps[1][0, 0, 3, 4] > 0
    opened = show(render(page), hash=f"#h={layer}.0")
    error = 6e-4 if layer == 0 else 0.01
    for q in (3, 20):
        row = made.maps[layer][0, 0, q].numpy()
        for k in (q - 1, q + 1, 29):
            opened.page.evaluate(f"location.hash = 'h={layer}.0&q={q}&k={k}&dir=from'")
            opened.settle()
            said = opened.text("#pair > b")
            if layer == 0 and k > q:
                assert said == "cannot be seen"
            else:
                assert shares(said)[0] == pytest.approx(row[k], abs=error)
        chips = opened.page.locator("#chips .chip")
        for i in range(chips.count()):
            key = int(chips.nth(i).get_attribute("data-i"))
            assert shares(chips.nth(i).inner_text())[-1] == pytest.approx(row[key], abs=error)
        assert sum(shares(opened.text("#chips"))) == pytest.approx(1, abs=5 * error)
    lines, others = opened.page.locator("#looks tr[data-i]").count(), opened.page.locator("#looks .rest")
    hidden = int(others.inner_text().split()[0]) if others.count() else 0
    assert lines + hidden == (21 if layer == 0 else 30)  # the keys that token 20 could see


def test_a_head_without_vectors_has_its_row_and_its_column(quantised: Made, show: Show):
    opened = show(quantised, hash="#h=6.2&q=30&k=4")
    weights = weights_of(quantised, 6, 2)
    for table, true in (("looks", weights[30]), ("seen", weights[:, 4])):
        rows = opened.page.locator(f"#{table} tr[data-i]")
        assert int(rows.first.get_attribute("data-i")) == int(true.argmax())
        for i in range(rows.count() - 1):
            at = int(rows.nth(i).get_attribute("data-i"))
            assert shares(rows.nth(i).inner_text())[-1] == pytest.approx(true[at], abs=0.009)
    second = opened.page.locator("#seen tr[data-i]").nth(1).get_attribute("data-i")
    opened.page.click(f"#seen tr[data-i='{second}']")
    assert f"q={second}&k=4" in opened.page.url
    opened.page.keyboard.press("ArrowUp")
    assert opened.page.evaluate("document.activeElement.closest('table').id") == "seen"
    assert f"q={second}&" not in opened.page.url


def test_eight_bit_heads_are_within_the_stated_error_and_say_so(quantised: Made, show: Show):
    opened = show(quantised, hash="#h=5.1&q=50&k=0")
    row = weights_of(quantised, 5, 1)[50]
    chips = opened.page.locator("#chips .chip")
    assert chips.count() > 1
    for i in range(chips.count()):
        shown, true = shares(chips.nth(i).inner_text())[-1], row[int(chips.nth(i).get_attribute("data-i"))]
        assert shown == pytest.approx(true, abs=0.004 + (5e-3 if true > 0.0995 else 5e-4))
    note = opened.text("#note")
    assert "8-bit weights, largest error 0.004" in note
    assert "0.4% and more" in note
    weak = int(np.flatnonzero(row[:51] < 0.003)[0])
    opened.page.evaluate(f"location.hash = 'h=5.1&q=50&k={weak}'")
    opened.settle()
    assert "under 0.4%" in opened.text("#pair")


@pytest.mark.parametrize("scale", ["root", "linear", "log"])
def test_a_pixel_of_the_matrix_has_the_colour_of_its_weight(short: Made, show: Show, scale: str):
    opened = show(short, hash=f"#h=6.2&q=2&k=0&scale={scale}")
    weights = weights_of(short, 6, 2)
    opened.settle()
    data = json.loads(opened.page.evaluate("JSON.stringify(document.querySelector('#canvas').dataset)"))
    cell, left, top = (float(data[name]) for name in ("cell", "left", "top"))
    for i, j in [(20, 0), (30, int(weights[30].argmax())), (39, int(weights[39].argmax())), (25, 12)]:
        x, y = left + (j + 0.5) * cell, top + (i + 0.5) * cell
        got = pixel(opened, x, y)
        w = weights[i, j]
        t = {"root": np.sqrt(w), "linear": w, "log": max(0, 1 + np.log10(w) / 4)}[scale]
        expected = tint(round(255 * t) / 255) if round(255 * t) else np.array([251, 251, 249])
        assert np.abs(np.array(got) - expected).max() <= 3, (i, j, w)
    assert pixel(opened, left + 30.5 * cell, top + 10.5 * cell) == [251, 251, 249]


def test_a_long_text_is_pooled_and_scrolled_and_says_so(show: Show):
    made = make(words(700), layers=1, heads=2, exact=False)
    opened = show(made)
    assert re.search(r"max of (\d)×\1 weights", opened.text("#pixel"))
    assert opened.page.evaluate("(b => b.scrollHeight > b.clientHeight)(document.querySelector('#text'))")
    assert opened.page.is_visible("#ruler")
    opened.page.keyboard.press("m")
    assert "at most 600 tokens" in opened.text("#columns")


def test_a_keyboard_alone_reaches_everything(short: Made, show: Show):
    opened = show(short, hash="#h=5.0&q=20&k=3")
    page, press = opened.page, opened.page.keyboard.press
    focus = "document.activeElement"
    press("1")
    assert page.evaluate(f"{focus}.dataset.head") == "5.0"
    press("ArrowDown"), press("ArrowRight")
    assert page.evaluate(f"{focus}.dataset.head") == "6.1"
    press("Enter")
    page.locator("#head-title", has_text="Layer 6 · head 1").wait_for()
    assert page.get_attribute("#grid [aria-selected=true]", "data-head") == "6.1"
    assert "layer 6 head 1" in opened.text("#live")
    press("2")
    assert page.evaluate(f"{focus}.id") == "text"
    press("ArrowRight")
    assert page.get_attribute("#text", "aria-activedescendant") == "t21"
    assert page.get_attribute("#t21", "aria-selected") == "true"
    assert re.search(r"query 21 lit. Strongest .*%", opened.text("#live"))
    press("Home")
    assert page.get_attribute("#text", "aria-activedescendant") == "t0"
    press("End"), press("ArrowUp"), press("ArrowLeft")
    press("Shift+ArrowLeft")
    press("3")
    assert page.evaluate(f"{focus}.id") == "canvas"
    before = page.url
    press("ArrowUp")
    assert page.url != before
    press("4")
    assert page.evaluate(f"{focus}.tagName") == "TR"
    press("ArrowDown")
    assert page.evaluate(f"{focus}.getAttribute('aria-current')") == "true"
    press("t")
    assert page.get_attribute("#direction [data-v=to]", "aria-checked") == "true"
    press("c")
    assert page.get_attribute("#scale [data-v=log]", "aria-checked") == "true"
    press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    press("/")
    page.keyboard.type("storm")
    press("Enter")
    assert page.inner_text("#text [aria-selected=true]").startswith("storm")
    press("Escape"), press("?")
    assert page.is_visible("#help")
    press("Escape")
    assert not page.is_visible("#help")


def test_brackets_walk_the_heads_of_one_role(show: Show):
    opened = show(make(words(20), layers=4), hash="#h=5.1")
    seen = []
    for _ in range(3):
        opened.press_for_another_head("]")
        seen.append((opened.text("#head-title"), opened.text("#badge")))
    assert seen == [
        ("Layer 7 · head 1", "previous"),
        ("Layer 5 · head 1", "previous"),
        ("Layer 7 · head 1", "previous"),
    ]


def test_every_head_can_be_chosen_and_tells_its_scores(short: Made, show: Show):
    opened = show(short, size=(1440, 1100))
    for head in short.heads:
        opened.page.click(f"[data-head='{head.layer}.{head.head}']")
        opened.page.locator("#head-title", has_text=f"Layer {head.layer} · head {head.head}").wait_for()
        assert opened.text("#badge") == head.role
        card = opened.text("#card")
        assert f"induction {round(100 * head.scores['induction'])}%" in re.sub(r"\s+", " ", card)
        assert re.search(r"duplicate\s+–", card)
        assert "1.25 nats" in card


def test_the_legend_counts_and_filters(short: Made, show: Show):
    opened = show(short)
    page = opened.page
    role = short.heads[0].role
    assert page.inner_text(f"#legend [data-role={role}] .count") == "1"
    page.click(f"#legend [data-role={role}]")
    page.click("#legend [data-role=sink]", modifiers=["Shift"])
    pressed = page.locator("#legend [aria-pressed=true]")
    assert {pressed.nth(i).get_attribute("data-role") for i in range(pressed.count())} == {role, "sink"}
    page.keyboard.press("Escape")
    assert page.locator("#legend [aria-pressed=true]").count() == 0


def test_hover_leads_until_a_click_pins(short: Made, show: Show):
    opened = show(short, hash="#h=6.2&q=30&k=4")
    page = opened.page
    page.hover("#t3")
    assert re.search(r"“the” 3: [\d.<]+%, rank \d+, 27 tokens back", opened.text("#reader"))
    page.hover("#t35")
    assert "cannot be seen" in opened.text("#reader")
    page.click("#t30")
    page.hover("#t12")
    assert opened.text("#chips").startswith("while12 attends to")
    assert page.locator(".t.unseen").count() == 40 - 13
    page.click("#t20")
    page.hover("#t5")
    assert opened.text("#chips").startswith("keeper20 attends to")
    page.click("#t7", modifiers=["Shift"])
    assert "k=7" in page.url
    box = page.locator("#canvas").bounding_box()
    data = json.loads(page.evaluate("JSON.stringify(document.querySelector('#canvas').dataset)"))
    cell = float(data["cell"])
    page.mouse.click(box["x"] + float(data["left"]) + 8.5 * cell, box["y"] + float(data["top"]) + 25.5 * cell)
    assert "q=25&k=8" in page.url


MARKUP = [
    "<s>",
    "</script>",
    "<!--",
    " <img src=x onerror=alert(1)>",
    "&lt;",
    "\"'",
    "\n",
    "\n\n",
    "\t",
    "",
    "🦊",
]
MARKUP += [" שלום", "\u2028", "\x00", "    ", " ok"]


def test_tokens_are_text_never_markup(show: Show):
    opened = show(make(MARKUP))
    page = opened.page
    assert page.locator("#text .t").count() == len(MARKUP)
    assert page.locator("main img, main s, main script").count() == 0
    for i in (0, 1, 2, 3, 4, 5, 11, 15):
        label = page.locator(f"#t{i}").evaluate("(t) => [...t.childNodes].find((c) => c.nodeType === 3).textContent")
        assert label == MARKUP[i].strip()
    assert page.title() == "clearhead: a <b>model</b>"
    page.keyboard.press("m")
    assert page.locator("#columns .side").count() == 2 * len(MARKUP)
    assert page.locator("#columns img").count() == 0


def test_an_encoder_has_square_thumbnails_and_dims_nothing(show: Show):
    made = make(words(30), causal=False)
    opened = show(made, hash="#h=5.2&q=10&k=25")
    assert opened.page.locator(".t.unseen").count() == 0
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(weights_of(made, 5, 2)[10, 25], abs=6e-5)
    grid = "document.querySelector('#grid canvas').getContext('2d')"
    corner = grid + ".getImageData({x}, {y}, 1, 1).data[3]"
    place = "(b => [b.offsetLeft, b.offsetTop, b.offsetWidth])(document.querySelector('[data-head=\"5.0\"]'))"
    left, top, width = opened.page.evaluate(place)
    corner = corner.format(x=left + width - 2, y=top + 2)
    assert opened.page.evaluate(corner) == 255
    assert show(make(words(30))).page.evaluate(corner) == 0


def test_a_layer_of_one_s_own_on_six_tokens(show: Show):
    made = make(["Your", " journey", " starts", " with", " one", " step"], layers=1, heads=2, groups=2)
    opened = show(made, hash="#h=5.1&q=3&k=1")
    assert "1 layer × 2 heads" in opened.text("#facts")
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(weights_of(made, 5, 1)[3, 1], abs=6e-5)
    assert opened.page.locator("#looks tr[data-i]").count() == 4
    assert "Every weight is exact" in opened.text("#note")


def test_one_token(show: Show):
    opened = show(make(["Hi"], layers=1, heads=1, groups=1))
    assert shares(opened.text("#pair > b")) == [1.0]
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("t")
    assert "100%" in opened.text("#chips")


def test_the_address_holds_the_view(short: Made, show: Show):
    opened = show(short)
    page = opened.page
    page.click("[data-head='6.3']")
    page.click("#t17")
    for key in ("t", "l", "s", "c", "m"):
        page.keyboard.press(key)
    hash = re.search("#.*", page.url)[0]
    again = show(short, hash=hash)
    assert again.page.url.endswith(hash)
    for selector in ("#head-title", "#chips", "#pair"):
        assert again.text(selector) == opened.text(selector)
    assert again.page.is_checked("#lines")
    assert again.page.is_checked("#fade")
    assert again.page.is_visible("#columns")
    assert again.page.get_attribute("#scale [aria-checked=true]", "data-v") == page.get_attribute(
        "#scale [aria-checked=true]", "data-v"
    )


def test_a_wrong_address_is_no_error(short: Made, show: Show):
    opened = show(short, hash="#h=99.99&q=100000&k=-3&dir=up&scale=x")
    assert opened.page.get_attribute("#text", "aria-activedescendant") == "t39"


@pytest.mark.parametrize("dark", [False, True])
def test_themes_follow_the_system(short: Made, show: Show, dark: bool):
    opened = show(short, dark=dark)
    colour = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(19, 21, 25)" if dark else "rgb(251, 251, 249)")
    opened.page.click("#theme")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") != colour


@pytest.mark.parametrize("size", [(1440, 900), (1024, 768), (990, 768), (800, 768), (900, 640)])
def test_nothing_overflows_its_pane(short: Made, show: Show, size: tuple[int, int]):
    opened = show(short, size=size)
    wide = """[...document.querySelectorAll('header, #controls, #headline, #caption, #legend, #tables')]
        .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.id || e.tagName)"""
    assert opened.page.evaluate(wide) == []
    assert opened.page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert opened.page.is_visible("#looks")
    opened.page.keyboard.press("3")  # on a small page the matrix is behind a tab
    assert opened.page.is_visible("#canvas")


def test_a_threshold_that_rose_is_said_on_the_page(quantised: Made, show: Show):
    free = quantised.build()
    tight = quantised.build(free.nbytes - 3000)
    assert tight.threshold > free.threshold
    opened = show(render(tight))
    note = opened.text("#note")
    assert "left out to keep the file within" in note
    assert f"{100 * tight.mass_held:.3g}% of all attention" in note


def test_inside_a_frame_of_a_notebook(short: Made, open_page):
    page = open_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_content('<iframe sandbox="allow-scripts" style="width: 900px; height: 640px"></iframe>')
    page.evaluate("(text) => (document.querySelector('iframe').srcdoc = text)", render(short.build()))
    frame = page.frame_locator("iframe")
    frame.locator("#t20").click()
    assert frame.locator("#chips").inner_text().startswith("keeper")
    frame.locator("#tabs [data-v=matrix]").click()
    canvas, cells = frame.locator("#canvas"), []
    for keys in ([], ["Control"]):  # the wheel is the notebook's, until Ctrl or the focus says that the matrix is meant
        canvas.hover()
        for key in keys:
            page.keyboard.down(key)
        page.mouse.wheel(0, -200)
        page.wait_for_timeout(100)
        cells.append(float(canvas.get_attribute("data-cell")))
    page.keyboard.up("Control")
    canvas.focus()
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(100)
    assert sorted({*cells, float(canvas.get_attribute("data-cell"))}) == [
        *cells,
        float(canvas.get_attribute("data-cell")),
    ]
    assert complaints == []
    page.close()


def test_the_modules_also_work_as_modules(short: Made, open_page, tmp_path: Path):
    """Served as they are: every import must name what it uses, which the joined script would not tell."""
    (tmp_path / "index.html").write_text(static("index.html").replace(DATA, "".join(short.build().elements)), "utf-8")
    source = Path(clearhead.page.__file__).parent / "static"
    for file in source.iterdir():
        if file.suffix in (".js", ".css"):
            (tmp_path / file.name).write_bytes(file.read_bytes())

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = open_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/index.html")
        page.wait_for_selector("body[data-ready]", timeout=10_000)
        for key in "?":
            page.keyboard.press(key)
        assert page.is_visible("#help")
    finally:
        page.close()
        server.shutdown()
        server.server_close()
    assert complaints == []
