"""The page of a real model, opened from a file: what it shows is what Python has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import clearhead
from clearhead import View
from clearhead.page import Payload, render

from .derived import check

TEXT = (
    "The keeper of the lighthouse wrote one line in her log every evening. The storm had not come, she wrote, and the"
    " lamp was lit. When the storm came at last, the keeper of the lighthouse wrote nothing. Mara Quill climbed the"
    " stair, counted the ships, and lit the lamp again. In the morning Mara Quill opened the log: the storm had come."
)


@pytest.fixture(scope="module")
def view(smollm2: tuple[Any, Any]) -> View:
    return clearhead.look(*smollm2, TEXT)


@pytest.fixture(scope="module")
def saved(view: View, tmp_path_factory: pytest.TempPathFactory) -> tuple[Payload, Path]:
    """The page, encoded once, and its file."""
    page, path = view.page(), tmp_path_factory.mktemp("real") / "page.html"
    path.write_text(render(page), "utf-8", newline="")
    return page, path


def _opened(open_page: Any, path: Path) -> tuple[Any, list[str]]:
    page = open_page()
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
        found = re.search(r"(<?)([\d.]+)%", rows.nth(n).inner_text())  # the first is the weight
        assert found
        if not found[1]:
            shown[int(rows.nth(n).get_attribute("data-i"))] = float(found[2]) / 100
    return shown


@pytest.mark.browser
@pytest.mark.parametrize(("layer", "head"), [(17, 5), (3, 7), (29, 0)])
def test_numbers_of_a_selected_head_and_query_equal_pythons(
    view: View, saved: tuple[Payload, Path], open_page: Any, layer: int, head: int
) -> None:
    exact = (layer, head) in saved[0].exact
    page, heard = _opened(open_page, saved[1])
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
def test_the_derivation_of_an_exact_head_is_pythons_and_another_head_names_the_call(
    view: View, saved: tuple[Payload, Path], open_page: Any
) -> None:
    page, heard = _opened(open_page, saved[1])
    layer, head = saved[0].exact[0]
    attn = view.maps[layer][0]
    page.click(f"[data-head='{layer}.{head}']")
    page.locator("#head-title", has_text=f"Layer {layer} · head {head}").wait_for()
    group = head // (attn.q.shape[0] // attn.k.shape[0])
    q, k, v = attn.q[head].numpy(), attn.k[group].numpy(), attn.v[group].numpy()
    for query in (67, 40, 6):
        page.click(f"#t{query}")
        for key in {0, query // 2, query}:
            page.click(f"#t{key}", modifiers=["Shift"])
            assert float(page.inner_text("#pair > b").strip("%<")) == pytest.approx(
                100 * float(view.maps[layer][0, head, query, key]), abs=0.11
            )
            seen = slice(query + 1)
            check(page, q[query], k[seen], v[seen], float(attn.scale), query, key)
    left_out = next(h for h in view.heads() if (h.layer, h.head) not in saved[0].exact)
    page.click(f"[data-head='{left_out.layer}.{left_out.head}']")
    page.locator("#steps", has_text="needs q and k of this head").wait_for()
    budget = int(re.search(r"budget=([\d_]+)", page.inner_text("#steps"))[1])
    assert len(view.page(budget=budget).exact) == 270
    assert heard == []
    page.close()


@pytest.mark.browser
def test_all_270_heads_can_be_chosen(saved: tuple[Payload, Path], open_page: Any) -> None:
    page, heard = _opened(open_page, saved[1])
    assert page.locator("[data-head]").count() == 270
    page.click("#t50")
    for layer, head in ((0, 0), (9, 8), (20, 4), (29, 8)):
        page.click(f"[data-head='{layer}.{head}']")
        page.locator("#head-title", has_text=f"Layer {layer} · head {head}").wait_for()
        assert _rows(page)
    assert heard == []
    page.close()
