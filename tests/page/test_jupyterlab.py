"""A view in a real JupyterLab, and in notebooks that were run and saved without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead
from clearhead import View, nn

from .lab import Notebook, environment, is_live, running, until, write
from .test_browser import shares

pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install -c constraints.txt -e '.[lab]'")
pytest.importorskip("anywidget")
pytestmark = [pytest.mark.full, pytest.mark.browser]

MADE = """
torch.manual_seed(0)
layer = nn.Attention(32, 32, 512, num_heads=4, window=16)
words = ("the keeper lit the lamp and wrote in the log that night " * 5).split()
view = clearhead.look(layer, torch.randn(50, 32), tokens=words[:50], name="a layer")
"""
CELLS = [f"import clearhead, torch\nfrom clearhead import nn\n{MADE}view", "view", "view.widget()"]
WITHOUT = "import sys\nsys.modules['anywidget'] = None\nsys.modules.pop('clearhead.page.widget', None)\nview"
THEME = "document.documentElement.dataset.theme"


@pytest.fixture(scope="module")
def view() -> View:
    """What the notebook looks at."""
    known: dict[str, Any] = {"clearhead": clearhead, "nn": nn, "torch": torch}
    exec(MADE, known)
    return known["view"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("lab")
    with running(folder) as address:
        yield folder, address


@pytest.fixture
def opened(lab: tuple[Path, str], browser: Any) -> Iterator[Notebook]:
    """A notebook that was run, with all of its pages live. Nothing complained."""
    folder, address = lab
    write(folder / "view.ipynb", CELLS)
    page = browser.new_page(viewport={"width": 1300, "height": 2600})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    notebook = Notebook(page, address, "view.ipynb")
    notebook.command("notebook:run-all-cells")
    for frame in notebook.frames(3):
        until(lambda frame=frame: is_live(frame))
    yield notebook
    notebook.context("shutdown()")
    page.close()
    assert [said for said in complaints if "Canceled future" not in said] == []  # JupyterLab's own, when a kernel ends


def share_of_head_1(frame: Any) -> tuple[int, float]:
    """Choose a head and a query; its strongest key, and the share that the page tells."""
    frame.click("[data-head='0.1']")
    until(lambda: frame.inner_text("#head-title") == "Layer 0 · head 1")
    frame.click("#t30")
    until(lambda: frame.locator("#t30.is-query").count())
    key = int(frame.locator("#text .is-key").get_attribute("id")[1:])
    return key, shares(frame.inner_text("#pair > b"))[0]


def test_a_view_is_live_and_follows_theme_and_kernel(opened: Notebook, view: View):
    weights = view.maps[0][0, 1, 30]
    first, second, widget = opened.frames(3)
    other = second.inner_text("#head-title")
    for frame in (first, widget):  # every weight of the kernel's, where the file has eight bits of each
        key, share = share_of_head_1(frame)
        assert key == int(weights.argmax())
        assert share == pytest.approx(float(weights.max()), abs=6e-5)
    assert second.inner_text("#head-title") == other  # the same view beside it stays as it is
    for name in ("Dark", "Light"):
        opened.command("apputils:change-theme", theme=f"JupyterLab {name}")
        for frame in (first, second, widget):
            until(lambda frame=frame, name=name: frame.evaluate(THEME) == name.lower())
    opened.context("session.kernel.restart()")
    for frame in (first, second, widget):
        until(lambda frame=frame: not is_live(frame))
    _, share = share_of_head_1(second)
    assert share == pytest.approx(float(weights.max()), abs=9e-3)  # 8 bits, shown to 1%


def test_a_notebook_opened_again_is_live_with_its_kernel_and_shows_the_file_without_it(opened: Notebook):
    opened.command("docmanager:save")
    opened.open()
    frames = opened.frames(2)
    for frame in frames[:2]:
        until(lambda frame=frame: is_live(frame))
    opened.context("shutdown()")
    opened.open()
    for frame in opened.frames(2)[:2]:
        assert not is_live(frame)
        assert "8 bits" in frame.text_content("#note")
        share_of_head_1(frame)


def test_a_notebook_that_was_run_by_nbclient_shows_its_pages(
    lab: tuple[Path, str], browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    exporting = pytest.importorskip("nbconvert")
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    folder, address = lab
    path = write(folder / "run.ipynb", [CELLS[0], WITHOUT])
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=120).execute()
    nbformat.write(notebook, path)
    for theme in ("light", "dark"):
        text, _ = exporting.HTMLExporter(theme=theme).from_notebook_node(notebook)
        (tmp_path / "run.html").write_text(text, "utf-8")
        context = browser.new_context(viewport={"width": 1300, "height": 1900}, offline=True)
        page = context.new_page()
        page.goto((tmp_path / "run.html").as_uri())
        for handle in page.query_selector_all("iframe"):
            frame = handle.content_frame()
            until(lambda frame=frame: frame.evaluate("document.body.dataset.ready") == "1")
            assert frame.evaluate(THEME) == theme
            assert not is_live(frame)
        assert page.locator("iframe").count() == 2
        assert not page.is_visible("pre:has-text('View(a layer')")
        assert page.is_visible("text=a live page in a notebook needs anywidget")
        context.close()
    page = browser.new_page()
    untrusted = Notebook(page, address, "run.ipynb")
    assert page.is_visible("pre:has-text('View(a layer: 50 tokens')")
    assert page.locator("iframe").count() == 0
    untrusted.context("shutdown()")
    page.close()
