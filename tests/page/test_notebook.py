"""A page in a notebook's cell, without a notebook: its output, and a stand-in for the widget's model."""

from __future__ import annotations

import base64
import gc
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from clearhead import View, Views, masks, scores
from clearhead.page import render

from .conftest import side_by_side
from .test_answers import looked_at
from .test_browser import shares
from .test_live import until

N = 60
THEME = "document.documentElement.dataset.theme"
HEAD_1 = "[data-head='0.1']"


@pytest.fixture(scope="module")
def biased() -> View:
    """Weights that do not follow from q and k alone: of a file they have 8 bits, of a kernel all."""
    return looked_at(N, mask=masks.causal(), bias=scores.alibi(4))


class _Frame(HTMLParser):
    """The attributes of the frames, and the tags beside them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.frames: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "iframe":
            self.frames.append(dict(attrs))


# --- what is saved ------------------------------------------------------------------------------------------------


def test_the_output_of_a_cell_is_a_frame_around_the_file_and_lines_for_where_no_frame_is_shown(biased: View):
    shown = biased._repr_html_()
    output = _Frame(shown)
    assert output.tags[:3] == ["iframe", "pre", "script"]
    frame = output.frames[0]
    assert frame["srcdoc"] == render(biased.page())
    assert "allow-same-origin" not in str(frame["sandbox"])  # what stands in the page is out of the notebook's reach
    assert f"{biased!r}\n" in shown
    for head in biased.heads().strongest("sink", 1) + biased.heads().strongest("broad", 1):
        assert head.summary in shown


def test_two_outputs_have_nothing_by_which_one_could_be_taken_for_the_other(biased: View):
    first, second = (_Frame(biased._repr_html_()).frames[0] for _ in range(2))
    assert first["data-clearhead"] != second["data-clearhead"]
    assert "id" not in first
    assert "name" not in first


def test_without_anywidget_the_file_is_shown_and_it_is_said(biased: View, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "clearhead.page.widget", raising=False)
    shown = biased._repr_html_()
    assert _Frame(shown).frames[0]["srcdoc"] == render(biased.page())
    assert "a live page in a notebook needs anywidget: pip install &quot;clearhead[notebook]&quot;" in shown
    with pytest.raises(ImportError, match=r"needs anywidget: pip install"):
        biased.widget()


# --- what the kernel answers --------------------------------------------------------------------------------------


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every widget that is made, and nothing of it left behind."""
    pytest.importorskip("anywidget", reason='needs anywidget: pip install "clearhead[notebook]"')
    from clearhead.page import widget as module

    made: list[Any] = []

    class Seen(module.Widget):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sent: list[tuple[Any, list[bytes]]] = []
            made.append(self)

        def send(self, content: Any, buffers: Any = None) -> None:
            self.sent.append((content, [bytes(one) for one in buffers or []]))

    monkeypatch.setattr(module, "Widget", Seen)
    yield made
    for one in made:
        one.close()


def said(widget: Any, name: str, **query: str) -> tuple[Any, list[bytes]]:
    """What comes back, as the kernel has it from a notebook."""
    message = {"data": {"method": "custom", "content": {"id": "a.1", "name": name, "query": query}}}
    widget._handle_msg({"content": message, "buffers": []})
    return widget.sent[-1]


def test_a_part_is_the_part_that_a_server_answers(biased: View, widgets: list[Any]):
    biased._repr_html_()
    row = biased.answers().part("row.0.1", {"query": "30"})
    assert said(widgets[0], "row.0.1", query="30") == ({"id": "a.1"}, [row])
    assert said(widgets[0], "facts")[1] == [biased.answers().part("facts")]


def test_what_is_not_there_has_no_bytes_and_what_is_too_much_says_why(biased: View, widgets: list[Any]):
    biased._repr_html_()
    assert said(widgets[0], "q.0.1") == ({"id": "a.1"}, [])
    answer, parts = said(widgets[0], "row.0.1", query="60")
    assert parts == []
    assert answer == {"id": "a.1", "error": "query='60': expected a whole number below 60"}


def test_a_widget_keeps_no_view_and_closes_with_it(widgets: list[Any]):
    view = looked_at(8, mask=masks.causal())
    view._repr_html_()
    closed = []
    widgets[0].comm.on_close(lambda message: closed.append(message))
    assert widgets[0].comm is not None
    del view
    gc.collect()
    assert widgets[0].comm is None


# --- the page beside it, in a browser -----------------------------------------------------------------------------

# The model of a widget, as anywidget hands it to its module; answers come by another way, `answer`.
MODEL = """async ([module, traits]) => {
    const widget = (await import(URL.createObjectURL(new Blob([module], { type: "text/javascript" })))).default;
    const heard = {};
    const model = {
        get: (name) => traits[name],
        on: (name, then) => (heard[name] ||= new Set()).add(then),
        off: (name, then) => heard[name].delete(then),
        tell: (name, ...what) => heard[name].forEach((then) => then(...what)),
        async send(asked) {
            if (window.silent) return;
            const [said, parts] = await window.ask(traits.token, asked);
            const bytes = parts.map((part) => new DataView(Uint8Array.from(atob(part), (c) => c.charCodeAt(0)).buffer));
            model.tell("msg:custom", said, bytes);
        },
    };
    (window.models ||= []).push(model);
    (window.leave ||= []).push(widget.initialize({ model }));
}"""


class Cells:
    """A document with the outputs of some cells in it, and a kernel behind them."""

    def __init__(self, open_page: Callable[..., Any], widgets: list[Any], *views: View | Views) -> None:
        self.page = open_page(size=(1000, 700 * len(views)))
        self.complaints: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.expose_function("ask", self._ask)
        outputs = "".join(f"<div>{view._repr_html_()}</div>" for view in views)
        self.widgets = {widget.token: widget for widget in widgets}
        self.page.set_content(f"<body style='background: white'>{outputs}</body>")
        self.frames = [handle.content_frame() for handle in self.page.query_selector_all("iframe")]
        for frame in self.frames:
            frame.wait_for_selector("body[data-ready]")

    def _ask(self, token: str, asked: dict[str, Any]) -> Any:
        self.asked.append((token, asked["name"]))
        content, parts = said(self.widgets[token], asked["name"], **asked["query"])
        return {**content, "id": asked["id"]}, [base64.b64encode(part).decode() for part in parts]

    def connect(self) -> None:
        """What a notebook does when the kernel has opened the widgets."""
        for widget in self.widgets.values():
            self.page.evaluate(MODEL, [widget._esm, {"token": widget.token, "title": widget.title}])

    def live(self) -> None:
        for frame in self.frames:
            until(lambda frame=frame: "live" in frame.inner_text("#facts"))


@pytest.fixture
def cells(open_page: Any, widgets: list[Any]) -> Iterator[Callable[..., Cells]]:
    opened: list[Cells] = []

    def cells(*views: View | Views) -> Cells:
        opened.append(Cells(open_page, widgets, *views))
        return opened[-1]

    yield cells
    for one in opened:
        assert one.complaints == []
        one.page.close()


def chosen(frame: Any, name: str) -> int:
    """The token that is the query or the key."""
    return int(frame.locator(f"#text .is-{name}").get_attribute("id")[1:])


@pytest.mark.browser
def test_a_page_turns_live_where_it_stands(biased: View, cells: Callable[..., Cells]):
    shown = cells(biased)
    frame = shown.frames[0]
    assert not shown.page.is_visible("pre")
    frame.click(HEAD_1)
    until(lambda: frame.inner_text("#head-title") == "Layer 0 · head 1")
    frame.click("#t30")
    frame.click("#tabs [data-v=matrix]")
    assert "8 bits" in frame.text_content("#note")
    shown.connect()
    shown.live()
    shown.page.evaluate("models[0].tell('msg:custom', { id: 'a.1', error: 'for another window' }, [])")
    assert frame.inner_text("#head-title") == "Layer 0 · head 1"  # as it was left
    until(lambda: "Every weight is exact" in frame.text_content("#note"))
    weights = biased.maps[0][0, 1, 30]
    assert (chosen(frame, "query"), chosen(frame, "key")) == (30, int(weights.argmax()))
    until(lambda: shares(frame.inner_text("#pair > b"))[0] == pytest.approx(float(weights.max()), abs=6e-5))
    until(lambda: "tile.0.1" in {name for _, name in shown.asked})  # the matrix is drawn anew


@pytest.mark.browser
def test_pages_beside_one_another_share_nothing(biased: View, cells: Callable[..., Cells]):
    other = looked_at(N, mask=masks.causal())
    shown = cells(biased, biased, other)
    shown.connect()
    shown.live()
    tokens = [frame.frame_element().get_attribute("data-clearhead") for frame in shown.frames]
    before = [frame.inner_text("#head-title") for frame in shown.frames]
    head = next(h for h in range(4) if f"Layer 0 · head {h}" not in before)
    shown.frames[1].click(f"[data-head='0.{head}']")
    until(lambda: shown.frames[1].inner_text("#head-title") == f"Layer 0 · head {head}")
    shown.frames[1].press("body", "t")
    assert [shown.frames[n].inner_text("#head-title") for n in (0, 2)] == [before[0], before[2]]
    assert shown.frames[0].get_attribute("#direction [data-v=from]", "aria-checked") == "true"
    assert {token for token, name in shown.asked if name == f"w.0.{head}"} == {tokens[1]}


@pytest.mark.browser
def test_several_views_in_one_cell_are_live_all_of_them(biased: View, cells: Callable[..., Cells]):
    other = looked_at(N, mask=masks.causal(), bias=scores.alibi(4), softcap=3.0)
    both = Views([biased, other], labels=["one", "two"])
    shown = cells(both)
    frame = shown.frames[0]
    frame.select_option("#pages", "1")  # read from the file, before there is a kernel
    frame.wait_for_selector("#t30")
    shown.connect()
    shown.live()
    for n, view in ((1, other), (0, biased), (1, other)):
        frame.select_option("#pages", str(n))
        frame.click("[data-head='0.2']")
        frame.click("#t30")
        strongest = float(view.maps[0][0, 2, 30].max())
        until(lambda most=strongest: shares(frame.inner_text("#pair > b"))[0] == pytest.approx(most, abs=6e-5))
    frame.click("#two-pages")
    for inner in side_by_side(frame, frame.inner_text("#head-title")):
        until(lambda inner=inner: "live" in inner.locator("#facts").inner_text())


@pytest.mark.browser
def test_light_and_dark_follow_what_is_around_until_somebody_chooses(biased: View, cells: Callable[..., Cells]):
    shown = cells(biased)
    frame = shown.frames[0]
    assert frame.evaluate(THEME) == "light"
    shown.page.evaluate("document.body.style.background = 'rgb(17, 17, 17)'")
    until(lambda: frame.evaluate(THEME) == "dark")
    shown.page.emulate_media(color_scheme="dark")
    shown.page.evaluate("document.body.style.background = 'white'")
    until(lambda: frame.evaluate(THEME) == "light")
    shown.page.emulate_media(color_scheme="light")
    frame.click("#theme")
    assert frame.evaluate(THEME) == "dark"
    shown.page.evaluate("document.body.style.background = '#fefefe'")
    frame.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert frame.evaluate(THEME) == "dark"


@pytest.mark.browser
def test_the_kernel_comes_and_goes_and_the_file_is_always_there(biased: View, cells: Callable[..., Cells]):
    shown = cells(biased)
    frame = shown.frames[0]

    def is_live() -> bool:
        exact = "8 bits" not in frame.text_content("#note")
        return exact and "live" in frame.inner_text("#facts")

    def can_be_used() -> None:
        other = 1 if frame.inner_text("#head-title").endswith("2") else 2
        frame.click(f"[data-head='0.{other}']")
        until(lambda: frame.inner_text("#head-title") == f"Layer 0 · head {other}")

    shown.page.evaluate("window.silent = true")  # a notebook that is opened again has the widget, and nobody behind it
    shown.connect()
    can_be_used()
    assert not is_live()
    shown.page.evaluate("() => { window.silent = false; models[0].tell('comm_live_update'); }")
    until(is_live)
    shown.page.evaluate("() => { sends = models[0].send; models[0].send = () => { throw new Error('Cannot send'); }; }")
    can_be_used()
    assert not is_live()
    shown.page.evaluate("() => { models[0].send = sends; models[0].tell('comm_live_update'); }")
    until(is_live)
    shown.page.evaluate("leave[0]()")  # the view was let go of
    until(lambda: not is_live())
    can_be_used()


@pytest.mark.browser
def test_a_frame_that_is_moved_is_live_again(biased: View, cells: Callable[..., Cells]):
    """A notebook that moves a cell takes its frame out of the document: the page begins anew."""
    shown = cells(biased)
    shown.connect()
    shown.live()
    shown.page.evaluate("document.body.prepend(document.querySelector('iframe').parentElement.cloneNode(false))")
    shown.page.evaluate("document.body.firstChild.append(document.querySelector('iframe'))")
    shown.frames = [shown.page.query_selector("iframe").content_frame()]
    shown.live()


@pytest.mark.browser
def test_a_widget_on_display_has_a_page_of_its_own(biased: View, open_page: Any, widgets: list[Any]):
    page = open_page()
    widget = biased.widget()
    page.set_content("<body style='background: #111'><div id=el></div></body>")
    shown = """async ([module, traits]) => {
        const widget = (await import(URL.createObjectURL(new Blob([module], { type: "text/javascript" })))).default;
        widget.render({ model: { get: (name) => traits[name], on() {}, off() {}, async send() {} }, el });
    }"""
    page.evaluate(shown, [widget._esm, {"title": widget.title, "page": widget.page}])
    frame = page.query_selector("iframe").content_frame()
    frame.wait_for_selector("body[data-ready]")
    until(lambda: frame.evaluate(THEME) == "dark")
    page.close()
