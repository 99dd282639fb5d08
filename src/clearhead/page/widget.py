"""The page's connection to a notebook's kernel: the parts that a server answers over HTTP, as messages."""

from __future__ import annotations

import weakref
from typing import Any

from clearhead.errors import RecordingError, ShapeError
from clearhead.page.answers import Answers, UnknownPart
from clearhead.page.shell import outside

try:
    import anywidget
    from traitlets import Unicode
except ImportError as error:
    raise ImportError(f'a live page in a notebook needs {error.name}: pip install "clearhead[notebook]"') from None

__all__ = ["Widget"]


class Widget(anywidget.AnyWidget):  # type: ignore[misc]
    """Answers the pages of one view, in whatever frames they stand.

    It needs no place of its own: the frames that bear its `token` find it. Displayed itself, it shows its `page`.

    Args: answers: what the pages ask. They are not kept alive by the widget, which closes with them: the pages then
    show what a file holds.
    """

    _esm = outside("theme.js") + outside("widget.js")
    token = Unicode().tag(sync=True)
    title = Unicode().tag(sync=True)
    page = Unicode().tag(sync=True)

    def __init__(self, answers: Answers, *, title: str, token: str = "", page: str = "") -> None:
        super().__init__(token=token, title=title, page=page)
        self._answers = weakref.ref(answers)
        weakref.finalize(answers, self.close).atexit = False
        self.on_msg(_answer)


def _answer(widget: Widget, asked: dict[str, Any], buffers: Any) -> None:
    """Send the part that was asked for: its bytes, none where there is no such part, or why not."""
    said, answers = {"id": asked["id"]}, widget._answers()
    try:
        made = [] if answers is None else [answers.part(asked["name"], asked["query"])]
    except UnknownPart:
        made = []
    except (OSError, RecordingError, ShapeError) as error:
        said, made = said | {"error": str(error)}, []
    widget.send(said, made)
