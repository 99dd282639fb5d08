"""The page of a real model, opened from a file: what it shows is what Python has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import clearhead
from clearhead import View

TEXT = (
    "The keeper of the lighthouse wrote one line in her log every evening. The storm had not come, she wrote, and the"
    " lamp was lit. When the storm came at last, the keeper of the lighthouse wrote nothing. Mara Quill climbed the"
    " stair, counted the ships, and lit the lamp again. In the morning Mara Quill opened the log: the storm had come."
)


@pytest.fixture(scope="module")
def view(smollm2: tuple[Any, Any]) -> View:
    return clearhead.look(*smollm2, TEXT)


def _opened(browser: Any, path: Path) -> tuple[Any, list[str]]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    page.wait_for_selector("#looks tr[data-i]")
    return page, heard


def _rows(page: Any) -> dict[int, float]:
    """The table "looks at": key -> weight, to the digits shown."""
    rows = page.locator("#looks tr[data-i]")
    shown = {}
    for n in range(rows.count()):
        found = re.search(r"([\d.]+)%\s*$", rows.nth(n).inner_text())
        assert found
        if "<" not in rows.nth(n).inner_text():
            shown[int(rows.nth(n).get_attribute("data-i"))] = float(found[1]) / 100
    return shown


@pytest.mark.browser
@pytest.mark.parametrize(("layer", "head"), [(17, 5), (3, 7), (29, 0)])
def test_numbers_of_a_selected_head_and_query_equal_pythons(
    view: View, browser: Any, tmp_path: Path, layer: int, head: int
) -> None:
    exact = (layer, head) in view.page().exact
    page, heard = _opened(browser, view.save(tmp_path / "page.html"))
    page.click(f"[data-head='{layer}.{head}']")
    page.locator("#head-title", has_text=f"Layer {layer} · head {head}").wait_for()
    for query in (len(view.tokens) - 3, 40):
        page.click(f"#t{query}")
        shown, row = _rows(page), view.maps[layer][0, head, query]
        assert shown
        within = 6e-4 if exact else 0.004 + 0.005  # a tenth of a percent; 8 bits, and shown as whole percents
        for key, weight in shown.items():
            assert weight == pytest.approx(float(row[key]), abs=within)
        assert max(shown, key=lambda key: shown[key]) == int(row.argmax())
    assert heard == []
    page.close()


@pytest.mark.browser
def test_all_270_heads_can_be_chosen(view: View, browser: Any, tmp_path: Path) -> None:
    page, heard = _opened(browser, view.save(tmp_path / "page.html"))
    assert page.locator("[data-head]").count() == 270
    page.click("#t50")
    for layer, head in ((0, 0), (9, 8), (20, 4), (29, 8)):
        page.click(f"[data-head='{layer}.{head}']")
        page.locator("#head-title", has_text=f"Layer {layer} · head {head}").wait_for()
        assert _rows(page)
    assert heard == []
    page.close()
