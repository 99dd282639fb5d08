"""The page by the rules of WCAG 2.2, level AA, as far as axe-core can check them: contrast, names, roles, states.

axe-core is installed by `make lint` and `make test` where npm is; without it these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead
from clearhead.nn import MultiHeadAttention
from clearhead.page import render

from .conftest import Made, Opened

pytestmark = pytest.mark.browser
Show = Callable[..., Opened]
AXE = Path(__file__).parents[2] / ".venv" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
RULES = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
CONTRAST = {"type": "rule", "values": ["color-contrast"]}  # all that the theme changes
RUN = """async (runOnly) => {
    const { violations } = await axe.run(document, { runOnly, resultTypes: ["violations"] });
    return violations.flatMap((rule) => rule.nodes.map((node) => `${rule.id}: ${node.target} ${node.failureSummary}`));
}"""
GO = """(hash) => new Promise((done) => {  // until the page has followed: a key pressed earlier would be lost
    addEventListener("hashchange", () => requestAnimationFrame(() => setTimeout(done)), { once: true });
    location.hash = hash;
})"""
VIEWS = {  # what the address asks for, keys to press, and what is then to be seen
    "text": ("", [], "#text [aria-selected=true]"),
    "lines, to": ("dir=to&lines=1&fade=1", [], "#line-layer path"),
    "columns": ("mode=columns", [], "#columns .is-query"),
    "contact sheet": ("sheet=1", [], "#sheet canvas"),
    "large matrix": ("wide=1", [], "#enlarge[aria-pressed=true]"),
    "filter": ("roles=sink", [], "#legend [data-role=sink][aria-pressed=true]"),
    "card": ("", ["1"], "[data-head]:focus"),
    "help": ("", ["?"], "#help[open]"),
}


def violations(page: Any, rules: dict[str, Any] = RULES) -> list[Any]:
    if not AXE.exists():
        pytest.skip("needs axe-core: npm ci in tests/page's package.json, as `make test` does where npm is")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text("utf-8"))
    return page.evaluate(RUN, rules)


@pytest.mark.parametrize("dark", [False, True])
def test_every_view_of_the_page(short: Made, quantised: Made, show: Show, dark: bool) -> None:
    """One page that goes from view to view: opening it anew takes three times as long as looking at it."""
    page, rules = show(short, hash="#h=6.2&q=30&k=4", dark=dark).page, CONTRAST if dark else RULES
    for name, (asked, keys, seen) in VIEWS.items():
        page.evaluate(GO, f"#h=6.2&q=30&k=4&view={name}&{asked}")
        for key in keys:
            page.keyboard.press(key)
        page.locator(seen).first.wait_for()
        assert violations(page, rules) == [], name
    assert violations(show(quantised, hash="#h=6.2&q=30&k=4", dark=dark).page, rules) == []


@pytest.mark.parametrize("size", [(1024, 768), (900, 640)])
def test_smaller_pages(short: Made, show: Show, size: tuple[int, int]) -> None:
    opened = show(short, size=size)
    assert violations(opened.page) == []
    opened.page.keyboard.press("3")
    assert violations(opened.page) == []


def test_everything_written_out(show: Show) -> None:
    torch.manual_seed(123)
    view = clearhead.look(MultiHeadAttention(3, 4, 6, 0.0, 2), torch.rand(6, 3), tokens=list("abcdef"))
    assert violations(show(render(view.page())).page) == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_without_numbers(short: Made, show: Show, dark: bool) -> None:
    text = render(short.build())
    broken = text[: text.index('<script type="application/json"')]
    assert violations(show(broken, ready="body.failed", dark=dark).page) == []
