"""Pages of every kind of model in a real browser: what they show is what Python has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import View, Views
from clearhead.page import render
from clearhead.page.payload import together

from .conftest import Opened, make, side_by_side, tint, words

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]
SOURCE, TARGET = "The storm had not come, she wrote.", "The lamp was lit."


def shares(line: str) -> list[float]:
    return [0.0 if mark else float(x) / 100 for mark, x in re.findall(r"(<?)([\d.]+)%", line)]


def colour_of(weight: float, dark: bool) -> np.ndarray:
    """What the text and the matrix show of a weight, on the scale of roots."""
    step = round(255 * np.sqrt(weight))
    paper = [19, 21, 25] if dark else [251, 251, 249]
    return tint(step / 255, dark=dark) if step else np.array(paper)


def pixel(opened: Opened, query: int, key: int) -> np.ndarray:
    opened.settle()
    data = json.loads(opened.page.evaluate("JSON.stringify(document.querySelector('#canvas').dataset)"))
    cell, left, top = (float(data[name]) for name in ("cell", "left", "top"))
    x, y = left + (key + 0.3) * cell, top + (query + 0.3) * cell  # beside the number in the middle
    context = "document.querySelector('#canvas').getContext('2d')"
    return np.array(opened.page.evaluate(f"[...{context}.getImageData({x}, {y}, 1, 1).data].slice(0, 3)"))


def channels(css: str) -> list[float]:
    return [float(x) for x in re.findall(r"[\d.]+", css)]


def background(opened: Opened, selector: str) -> list[float]:
    return channels(opened.page.eval_on_selector(selector, "(e) => e.style.background"))


# --- two texts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(translator: Any, wordpieces: Any) -> View:
    return clearhead.look(translator, wordpieces, SOURCE, target=TARGET)


@pytest.mark.parametrize("dark", [False, True])
def test_cross_attention_tints_the_source_above_the_target(two: View, show: Show, dark: bool):
    opened = show(render(two.page()), hash="#h=2.1&q=4&k=2", dark=dark)
    page, row = opened.page, two.maps[2][0, 1, 4].numpy()
    assert opened.text("#head-title") == "Layer 2 · head 1 · cross"
    assert [name.lower() for name in page.locator(".side-name").all_inner_texts()] == ["source", "target"]
    assert page.locator("#t0").bounding_box()["y"] < page.locator("#u0").bounding_box()["y"]
    assert page.locator("#u4").get_attribute("class").split()[-1] == "is-query"
    for key, weight in enumerate(row):
        if weight >= 0.004:
            assert np.abs(np.array(background(opened, f"#t{key}")) - colour_of(weight, dark)).max() <= 2
        assert np.abs(pixel(opened, 3, key) - colour_of(float(two.maps[2][0, 1, 3, key]), dark)).max() <= 3
    assert page.locator("[id^=u][style*=background]").count() == 0
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(row[2], abs=6e-5)
    assert sum(shares(opened.text("#chips"))) == pytest.approx(1, abs=4e-3)


def test_to_reverses_cross_attention(two: View, show: Show):
    opened = show(render(two.page()), hash="#h=2.0&q=4&k=2")
    opened.page.keyboard.press("t")
    column = two.maps[2][0, 0, :, 2].numpy()
    assert opened.page.get_attribute("#text", "aria-activedescendant") == "t2"
    tinted = [q for q, weight in enumerate(column) if weight >= 0.004]
    for q in tinted:
        assert np.abs(np.array(background(opened, f"#u{q}")) - colour_of(column[q], False)).max() <= 2
    assert opened.page.locator("[id^=t][style*=background]").count() == 0
    opened.page.click("#t5")  # of the text that leads
    assert "k=5" in opened.page.url
    opened.page.click("#u1")  # of the other
    assert "q=1&k=5" in opened.page.url
    opened.page.keyboard.press("End")
    assert f"k={len(two.texts[0]) - 1}" in opened.page.url


def test_each_side_has_an_atlas_of_its_own(two: View, show: Show):
    opened = show(render(two.page()), hash="#h=2.1")
    page = opened.page
    legend = "[...document.querySelectorAll('#legend button')].map((b) => b.dataset.role)"
    assert page.evaluate(legend) == ["sink", "aligned", "broad", "other"]
    assert page.locator("#grid [role=gridcell]").count() == 2
    page.click("#sides [data-v=encoder]")
    page.locator("#head-title", has_text="encoder").wait_for()
    assert "aligned" not in page.evaluate(legend)
    assert page.locator("#text .t").count() == len(two.texts[0])
    page.focus("#sides [aria-checked=true]")
    page.keyboard.press("ArrowRight")
    page.locator("#head-title", has_text="decoder").wait_for()
    assert page.locator("#text .t").count() == len(two.texts[1])
    assert page.evaluate("document.activeElement.dataset.v") == "decoder"
    page.click("#sides [data-v=cross]")
    page.locator("#head-title", has_text="Layer 2 · head 1 · cross").wait_for()  # where one was before
    assert page.locator("#columns-in .side.key").count() == 0
    page.keyboard.press("m")
    assert page.locator("#columns-in .side.key").count() == len(two.texts[0])
    assert page.locator("#columns-in .side.query").count() == len(two.texts[1])


def test_a_weight_of_cross_attention_is_derived(two: View, show: Show):
    opened = show(render(two.page()), hash="#h=2.1&q=3&k=6")
    q, k = two.maps[2].q[0, 1, 3].double(), two.maps[2].k[0, 1, 6].double()
    assert f"{float(q @ k):.3f}".replace("-", "−") in opened.text("[data-step=compare]")
    assert "query" in opened.page.locator("[data-step=project] math").first.inner_html()
    rows = opened.page.locator("#looks tr[data-i]")
    order = [int(rows.nth(i).get_attribute("data-i")) for i in range(rows.count())]
    assert order[:-1] == np.argsort(-two.maps[2][0, 1, 3].numpy(), kind="stable")[: len(order) - 1].tolist()


# --- an image -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image(painter: Any) -> View:
    from transformers import ViTImageProcessorPil

    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3)).astype(np.uint8)
    return clearhead.look(painter, ViTImageProcessorPil(size={"height": 32, "width": 32}), pixels)


@pytest.mark.parametrize("dark", [False, True])
def test_patches_lie_over_the_image_with_their_weights(image: View, show: Show, dark: bool):
    opened = show(render(image.page()), hash="#h=0.1&q=6&k=3", dark=dark)
    page, row = opened.page, image.maps[0][0, 1, 6].numpy()
    assert page.evaluate("document.querySelector('#text img').complete")
    frame, patch = page.locator(".image").bounding_box(), page.locator("#t7").bounding_box()
    assert patch["x"] - frame["x"] == pytest.approx(2 / 4 * frame["width"], abs=1)  # row 1, column 2
    assert patch["y"] - frame["y"] == pytest.approx(1 / 4 * frame["height"], abs=1)
    assert "4 × 4 patches" in opened.text("#facts")
    for key, weight in enumerate(row[1:], 1):
        if weight >= 0.004:
            strength = round(255 * np.sqrt(weight))
            *colour, veil = background(opened, f"#t{key}")
            assert veil == pytest.approx(0.9 * strength / 255, abs=0.005)
            assert np.abs(np.array(colour) - tint(max(strength, 120) / 255, dark=dark)).max() <= 2
        assert np.abs(pixel(opened, 5, key) - colour_of(float(image.maps[0][0, 1, 5, key]), dark)).max() <= 3


def test_arrows_walk_the_rows_of_an_image(image: View, show: Show):
    opened = show(render(image.page()), hash="#h=0.0&q=6&k=3")
    opened.page.focus("#text")
    for key, token in (("ArrowDown", 10), ("ArrowRight", 11), ("ArrowUp", 7), ("ArrowUp", 3), ("ArrowUp", 3)):
        opened.page.keyboard.press(key)
        assert opened.page.get_attribute("#text", "aria-activedescendant") == f"t{token}"
    assert opened.page.get_attribute("#t7", "aria-label") == "row 1, column 2"
    legend = "[...document.querySelectorAll('#legend button')].map((b) => b.dataset.role)"
    assert opened.page.evaluate(legend) == ["sink", "self", "local", "broad", "other"]


# --- text that goes on, layers alone, a batch ---------------------------------------------------------------------


def test_what_the_model_wrote_is_told_apart(writer: Any, wordpieces: Any, show: Show):
    view = clearhead.look(writer, wordpieces, SOURCE, generate=4)
    opened = show(render(view.page()))
    given = view.texts[0].prompt
    written = opened.page.evaluate("[...document.querySelectorAll('.t.written')].map((t) => Number(t.dataset.i))")
    assert written == list(range(given, len(view.tokens)))
    assert opened.page.locator(".seam").count() == 1
    assert opened.page.is_visible("#wrote")
    assert "written by the model" in opened.text("#foot")
    plain = show(render(clearhead.look(writer, wordpieces, SOURCE).page()))
    assert not plain.page.is_visible("#wrote")


def test_some_layers_only(writer: Any, wordpieces: Any, show: Show):
    view = clearhead.look(writer, wordpieces, SOURCE, layers=[1])
    opened = show(render(view.page()), hash="#h=1.1&q=7&k=2")
    assert opened.text("#atlas-size") == "1 layer × 2 heads"
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(float(view.maps[0][0, 1, 7, 2]), abs=6e-5)


@pytest.fixture(scope="module")
def batch(writer: Any, wordpieces: Any) -> Views:
    inputs = wordpieces([SOURCE, TARGET], padding=True, return_tensors="pt")
    with clearhead.record(writer) as recording, torch.no_grad():
        writer(**inputs)
    return clearhead.look(recording, wordpieces, inputs)


def test_an_item_of_a_batch_is_chosen_and_its_padding_is_not_shown(batch: Views, show: Show):
    opened = show(render(batch.page()), hash="#h=1.0&q=4&k=2")
    page = opened.page
    assert page.locator("#text .t").count() == len(batch[0].tokens)
    page.select_option("#pages", "1")
    page.wait_for_url("**page=1**")
    texts = "[...document.querySelectorAll('#text .t')].map((t) => t.firstChild.textContent)"
    assert page.evaluate(texts) == [token.strip() for token in batch[1].tokens]
    assert len(batch[1].tokens) < len(batch[0].tokens)
    assert opened.text("#head-title") == "Layer 1 · head 0"
    page.evaluate("location.hash = 'h=1.0&q=4&k=2&page=1'")
    opened.settle()
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(float(batch[1].maps[1][0, 0, 4, 2]), abs=6e-5)
    again = show(render(batch.page()), hash=re.search("#.*", page.url)[0])
    assert again.text("#chips") == opened.text("#chips")


def test_two_items_stand_side_by_side_in_a_file(batch: Views, show: Show):
    page = show(render(batch.page()), hash="#h=1.0&q=4&k=2").page
    page.click("#two-pages")
    frames = side_by_side(page, "Layer 1 · head 0")
    name = frames[0].locator("#grid [aria-selected=true]").get_attribute("data-head")
    assert {f"#h={name}", "beside=1"} <= set(re.split("(?=#)|&", page.url))
    page.reload()
    frames = side_by_side(page, frames[0].locator("#head-title").inner_text())
    for frame, view in zip(frames, batch, strict=True):
        assert frame.locator("#text .t").count() == len(view.tokens)
        name = frame.locator("#grid [aria-selected=true]").get_attribute("data-head")
        layer, head = map(int, name.split("."))
        query = int(frame.locator("#chips .query sub").inner_text())
        most = float(view.maps[layer][0, head, query].max())
        assert shares(frame.locator("#pair > b").inner_text())[0] == pytest.approx(most, abs=6e-5)
    frames[1].locator("#t2").click()
    frames[1].locator("#two-pages").click()
    page.wait_for_url("**page=1**")
    assert "beside" not in page.url
    assert page.locator("#text .t").count() == len(batch[1].tokens)
    page.keyboard.press("t")
    assert "dir=to" in page.url


@pytest.fixture(scope="module")
def unlike() -> str:
    """A page of three: of one token and one head, of long tokens and markup, and of many tokens."""
    one = make(["x"], layers=1, heads=1, groups=1)
    odd = make(["a" * 300, " " + "東京" * 60, "\n\n", "<script>" * 10, " q"], layers=1, heads=2)
    long = make(words(60), layers=3, heads=2)
    return render(together([one.build, odd.build, long.build], ["one", "odd", "long"], 20_000_000))


def test_an_address_is_read_for_the_page_that_it_names(unlike: str, show: Show):
    asked = "#h=7.1&q=50&k=20&dir=from&scale=root&page=2&zoom=3,30,40"
    page = show(unlike, hash=asked).page
    page.wait_for_url("**zoom=3,30,40")
    assert page.url.endswith(asked)
    page.click("#two-pages")
    frame = page.frame_locator("#beside iframe").first
    frame.locator("#chips", has_text="50").wait_for()
    assert frame.locator("#head-title").inner_text() == "Layer 7 · head 1"


@pytest.mark.parametrize("hash", ["#page=-1", "#beside=0.5", "#page=1&q=900&k=-4"])
def test_an_address_that_names_what_is_not_there(hash: str, unlike: str, show: Show):
    page = show(unlike, hash=hash).page
    assert page.is_visible("#chips .query")
    assert page.locator("#beside").count() == 0


def test_pages_of_unlike_texts_and_heads_stand_side_by_side(unlike: str, show: Show):
    page = show(unlike, hash="#page=1&beside=0&q=4&k=3").page
    frames = [page.frame_locator("#beside iframe").nth(n) for n in (0, 1)]
    for frame, tokens in zip(frames, (5, 1), strict=True):
        frame.locator("body[data-ready]").wait_for()
        assert frame.locator("#text .t").count() == tokens
    frames[0].locator("[data-head='5.1']").click()  # the other has none
    frames[0].locator("#head-title", has_text="head 1").wait_for()
    assert frames[1].locator("#head-title").inner_text() == "Layer 5 · head 0"
    for key in ("ArrowRight", "End", "Shift+ArrowLeft", "z", "+", "0", "c", "t"):
        page.keyboard.press(key)


def test_a_derivation_written_over_another_is_whole(show: Show):
    """It is changed in place: from few numbers to many, and back."""
    few, many = make(words(6), layers=1, d=2), make(words(60), layers=1)
    page = show(render(together([few.build, many.build], ["few", "many"], 20_000_000)), hash="#h=5.1&q=4&k=2").page
    look = "[...document.querySelectorAll('#steps .eq, #steps svg')].map((one) => one.innerHTML)"
    seen = {}
    for n in ("1", "0"):
        page.select_option("#pages", n)
        page.wait_for_url(f"**page={n}**")
        seen[page.url] = page.evaluate(look)
    for url, there in seen.items():
        page.goto(url.replace("#", "?anew#"))
        page.wait_for_selector("body[data-ready]")
        assert page.evaluate(look) == there != []


# --- steps --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(wordpieces: Any) -> Views:
    """One text through a model at three steps of a training that never was."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": len(wordpieces), "bos_token_id": 101}
    torch.manual_seed(4)
    model = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=102)).eval()
    views = []
    for _ in range(3):
        views.append(clearhead.look(model, wordpieces, SOURCE))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    return clearhead.look(views, labels=[0, 500, 12_000])


def test_a_slider_walks_the_steps_with_the_same_head_and_pair(steps: Views, show: Show):
    opened = show(render(steps.page()), hash="#h=0.1&q=6&k=3")
    page, seen = opened.page, []
    page.focus("#pages")
    for n, label in enumerate(("0", "500", "12000")):
        page.wait_for_url(f"**page={n}**")
        assert page.get_attribute("#pages", "aria-valuetext").replace("\u202f", "") == label
        assert page.evaluate("document.activeElement.id") == "pages"
        assert "h=0.1&q=6&k=3" in page.url
        seen.append(shares(opened.text("#pair > b"))[0])
        assert seen[-1] == pytest.approx(float(steps[n].maps[0][0, 1, 6, 3]), abs=6e-5)
        assert np.abs(pixel(opened, 5, 2) - colour_of(float(steps[n].maps[0][0, 1, 5, 2]), False)).max() <= 3
        page.keyboard.press("ArrowRight")
    assert len(set(seen)) == 3
    page.keyboard.press("Home")
    page.wait_for_url("**page=0**")
    assert shares(opened.text("#pair > b"))[0] == pytest.approx(seen[0], abs=1e-9)


def test_a_copy_of_the_page_holds_every_step(steps: Views, show: Show, tmp_path: Path):
    page = show(render(steps.page())).page
    page.click("#save")
    with page.expect_download() as download:
        page.click("[data-v=page]")
    download.value.save_as(tmp_path / "copy.html")
    again = show((tmp_path / "copy.html").read_text("utf-8"), hash="#h=0.1&q=6&k=3&page=2")
    assert shares(again.text("#pair > b"))[0] == pytest.approx(float(steps[2].maps[0][0, 1, 6, 3]), abs=6e-5)
