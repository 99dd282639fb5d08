"""How docstrings reach the site: doctests and columns as code, and the words before a colon in bold. For griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

COLUMNS = re.compile(r"\S {3,}\S")
SHOWN = ("__getitem__", "__matmul__")  # of the special methods
LEADS = re.compile(r"(?<![\w`])(Args|Attributes|Cost|Gradients|Raises|Returns|Shapes|Source): (?=\S)")


class Docstrings(griffe.Extension):
    """Rewrites each docstring in memory."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.name.startswith("__") and obj.name not in SHOWN:
            obj.public = False
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(rewritten, obj.docstring.value.split("\n\n")))


def rewritten(paragraph: str) -> str:
    """One paragraph of a docstring in Markdown."""
    lines = paragraph.strip("\n").splitlines()
    if paragraph.startswith(">>>"):
        return f"```pycon\n{paragraph.rstrip()}\n```"
    if sum(bool(COLUMNS.search(line)) for line in lines) * 2 >= max(2, len(lines)) and not paragraph.startswith(" "):
        return f"```text\n{paragraph.rstrip()}\n```"
    return LEADS.sub(r"**\1:** ", paragraph)
