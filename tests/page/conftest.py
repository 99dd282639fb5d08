"""Small pages for the tests: maps made here from random q and k, so that every weight is known in Python."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.page import LayerData, Payload, Strong, build, render, thumbnails
from clearhead.page.texts import Tokens
from clearhead.tokens import same_words

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@dataclass
class Tile:
    weights: Any
    rows: slice
    cols: slice


@dataclass
class Head:
    layer: int
    head: int
    role: str
    scores: dict[str, float | None]
    baselines: dict[str, float | None]
    entropy: float
    distance: float


@dataclass
class Made:
    """A page and all that it was made from. weights[layer] is (H, n, n), float64."""

    tokens: list[str]
    weights: list[np.ndarray]
    layers: list[LayerData]
    heads: list[Head]
    kv_heads: int
    influence: np.ndarray | None = None

    def build(self, budget: int | None = None) -> Payload:
        return build(
            self.layers,
            [Tokens(self.tokens, same_words(self.tokens))],
            self.heads,
            name="a <b>model</b>",
            nbytes=1000,
            dense_nbytes=4000,
            budget=budget,
            influence=self.influence,
        )


def tiles(weights: np.ndarray, size: int = 50) -> Iterator[Tile]:
    """(H, T, S) in blocks, as the streaming loop shows them: float32 tensors."""
    T, S = weights.shape[-2:]
    for t in range(0, T, size):
        for s in range(0, S, size):
            rows, cols = slice(t, min(T, t + size)), slice(s, min(S, s + size))
            yield Tile(torch.from_numpy(weights[:, rows, cols].astype(np.float32)), rows, cols)


def strong(weights: np.ndarray, **options: Any) -> Any:
    reducer = Strong(**options)
    for tile in tiles(weights):
        reducer.update(tile)
    return reducer.result()


def _softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    most = scores.max(-1, keepdims=True)
    total = np.exp(scores - most).sum(-1, keepdims=True)
    lse = most + np.log(total)
    return np.exp(scores - lse), lse[..., 0]


def _pooled(weights: np.ndarray, side: int) -> np.ndarray:
    n = weights.shape[-1]
    edges = np.linspace(0, n, min(n, side) + 1).astype(int)
    sums = np.add.reduceat(np.add.reduceat(weights, edges[:-1], -2), edges[:-1], -1)
    return sums / np.diff(edges)[None, :, None]


def make(
    tokens: list[str],
    *,
    layers: int = 2,
    heads: int = 4,
    groups: int = 2,
    causal: bool = True,
    exact: bool = True,
    d: int = 8,
) -> Made:
    rng = np.random.default_rng(0)
    n, scale = len(tokens), 1 / math.sqrt(d)
    all_weights, data, table = [], [], []
    roles = ("induction", "previous", "sink", "local", "broad", "self", "duplicate", "other")
    for layer in range(layers):
        q = (2.5 * rng.standard_normal((heads, n, d))).astype(np.float32)
        k, v = rng.standard_normal((2, groups, n, d)).astype(np.float32)
        keys = np.repeat(k, heads // groups, 0).astype(np.float64)
        scores = scale * q.astype(np.float64) @ keys.swapaxes(1, 2)
        if causal:
            scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights, lse = _softmax(scores)
        vectors = {"q": q, "k": k, "v": v, "lse": lse.astype(np.float32), "scale": scale} if exact else {}
        data.append(
            LayerData(layer + 5, thumbnails(_pooled(weights, 24)), strong(weights), causal, [0], groups, **vectors)
        )
        all_weights.append(weights)
        for h in range(heads):
            role = roles[(layer * heads + h) % len(roles)]
            values = {name: 0.05 * i + 0.01 * h for i, name in enumerate(roles[:-1])}
            table.append(Head(layer + 5, h, role, {**values, "duplicate": None}, values, 1.25, 7.5))
    return Made(tokens, all_weights, data, table, groups)


TEXT = "the keeper lit the lamp and wrote in the log that night while a storm came over the sea"


def words(n: int) -> list[str]:
    repeated = (TEXT.split() * n)[:n]
    return [("" if i == 0 else " ") + word for i, word in enumerate(repeated)]


def tint(t: float, *, dark: bool = False) -> np.ndarray:
    """The weight scale at t, in 8 bits: lightness linear, chroma and hue by stops, in OKLCH."""
    if dark:
        lightness = 0.198 + 0.752 * t
        chroma = np.interp(t, [0, 0.25, 0.55, 0.8, 1], [0.01, 0.085, 0.125, 0.09, 0.03])
        hue = np.radians(np.interp(t, [0, 0.5, 1], [275, 250, 205]))
    else:
        lightness = 0.987 - 0.687 * t
        chroma = np.interp(t, [0, 0.2, 0.5, 0.75, 1], [0, 0.045, 0.115, 0.145, 0.11])
        hue = np.radians(np.interp(t, [0, 0.5, 1], [215, 246, 272]))
    lab = np.array([lightness, chroma * np.cos(hue), chroma * np.sin(hue)])
    to_lms = [
        [1, 0.3963377774, 0.2158037573],
        [1, -0.1055613458, -0.0638541728],
        [1, -0.0894841775, -1.291485548],
    ]
    to_rgb = [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.707614701],
    ]
    linear = np.clip(np.array(to_rgb) @ (np.array(to_lms) @ lab) ** 3, 0, 1)
    return np.round(255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


@pytest.fixture(scope="session")
def short() -> Made:
    return make(words(40))


@pytest.fixture(scope="session")
def quantised() -> Made:
    return make(words(60), exact=False)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests; skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an empty page in a context of this kind, see Playwright's `new_context`.

    Each kind of context is made once: with a new one a page takes twice the time. Nothing is kept in one: the page
    stores nothing but its address.
    """
    contexts: dict[str, Any] = {}

    def open_page(*, size: tuple[int, int] = (1440, 900), **kind: Any) -> Any:
        name = repr((size, sorted(kind.items())))
        if name not in contexts:
            contexts[name] = browser.new_context(viewport={"width": size[0], "height": size[1]}, **kind)
        return contexts[name].new_page()

    yield open_page
    for context in contexts.values():
        context.close()


@dataclass
class Opened:
    """An open page, everything it said in the console and every address it asked for."""

    page: Any
    complaints: list[str]
    requests: list[str]

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector)).replace("\u202f", "")

    def press_for_another_head(self, key: str) -> None:
        """Press a key and wait for the head that it brings, which is decoded first."""
        title = self.page.inner_text("#head-title")
        self.page.keyboard.press(key)
        self.page.locator("#head-title", has_not_text=title).wait_for()  # its policy lets nobody evaluate text in it

    def settle(self) -> None:
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def show(open_page: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Write a page to a file and open it from there. No console error and no request may have come of it."""
    opened: list[Opened] = []

    def show(
        what: Made | str,
        *,
        hash: str = "",
        dark: bool = False,
        size: tuple[int, int] = (1440, 900),
        ready: str = "body[data-ready]",
        before: str = "",
        touch: bool = False,
    ) -> Opened:
        file = tmp_path / f"page{len(opened)}.html"
        text = what if isinstance(what, str) else render(what.build())
        file.write_text(text, encoding="utf-8", newline="")
        scheme = "dark" if dark else "light"
        one = Opened(open_page(size=size, color_scheme=scheme, offline=True, has_touch=touch), [], [])
        opened.append(one)
        if before:
            one.page.add_init_script(before)
        one.page.on("console", lambda said: said.type == "error" and one.complaints.append(said.text))
        one.page.on("pageerror", lambda error: one.complaints.append(str(error)))
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.goto(file.as_uri() + hash)
        one.page.wait_for_selector(ready, timeout=10_000)
        return one

    yield show
    for one in opened:
        one.page.close()
    for one in opened:
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def side_by_side(page: Any, head: str) -> list[Any]:
    """The frames of two pages that have just come to stand beside one another at this head, and follow one another."""
    frames = [page.frame_locator("#beside iframe").nth(n) for n in (0, 1)]
    for frame in frames:
        frame.locator("body[data-ready]").wait_for()
        assert frame.locator("#head-title").inner_text() == head
    for chooses, follows in (frames, frames[::-1]):
        other = chooses.locator("#grid [data-head]:not([aria-selected=true])").first
        name = other.get_attribute("data-head").split(".")
        other.click()
        follows.locator("#head-title", has_text="Layer {} · head {}".format(*name)).wait_for()
    return frames
