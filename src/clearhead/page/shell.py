"""The page without its data: the static files joined into one document."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

__all__ = ["DATA", "MODULES", "live_shell", "outside", "script", "shell", "static"]

DATA = "<!-- data -->"  # where the data elements go

# Every module, each after those that it imports: in this order they are joined.
MODULES = (
    "util.js",
    "roles.js",
    "colour.js",
    "source.js",
    "data.js",
    "state.js",
    "kernel.js",
    "actions.js",
    "pages.js",
    "layout.js",
    "header.js",
    "atlas.js",
    "sheet.js",
    "saving.js",
    "chips.js",
    "words.js",
    "flow.js",
    "ruler.js",
    "find.js",
    "reading.js",
    "text.js",
    "columns.js",
    "maths.js",
    "numbers.js",
    "terms.js",
    "strips.js",
    "ends.js",
    "steps.js",
    "derivation.js",
    "tables.js",
    "port.js",
    "axes.js",
    "tiles.js",
    "zoom.js",
    "matrix.js",
    "help.js",
    "keys.js",
    "beside.js",
    "main.js",
)

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_MAIN = '<script type="module" src="main.js"></script>'
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=((?:async )?function|const|class) (\w+|\$+))", re.MULTILINE)
_COMMENT = re.compile(
    r"^[ \t]*(//[^\n]*|/\*\*(?:(?!\*/).)*\*/)\n|^[ \t]+"
    r"""|[ \t]+//[^\n"'`]*$""",  # at the end of a line: in a string a quote would follow
    re.MULTILINE | re.DOTALL,
)


def static(name: str) -> str:
    """The text of one static file."""
    return (resources.files("clearhead.page") / "static" / name).read_text("utf-8")


def outside(name: str) -> str:
    """The text of one script that works around the page, in a notebook."""
    return (resources.files("clearhead.page") / "outside" / name).read_text("utf-8")


@cache
def shell() -> str:
    """The whole page as one document, with `DATA` where the data elements go."""
    page = static("index.html")
    page = page.replace("<!-- policy -->", f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')
    page = page.replace('<link rel="stylesheet" href="style.css">', f"<style>\n{static('style.css')}</style>")
    return page.replace(_MAIN, f'<script type="module">\n{script()}</script>')


@cache
def live_shell() -> str:
    """The page that asks a server for its script, its style and its numbers."""
    head = '<meta name="source" content="live">\n<link rel="preload" href="part/facts?" as="fetch" crossorigin>'
    page = static("index.html").replace("<!-- policy -->", head)
    return page.replace(_MAIN, '<script type="module" src="page.js"></script>')


@cache
def script() -> str:
    """All modules as one: forty requests, each after the one that names it, take half a second."""
    return "".join(map(_scoped, MODULES))


def _scoped(name: str) -> str:
    """A module as a function of its own that is called at once and returns what the module exports.

    Comments and indentation, a fifth of the bytes, are left out: no string of a module spans lines, which is tested.
    """
    text = _COMMENT.sub("", _IMPORT.sub(r"const {\1} = module_\2;\n", static(name)))
    exported = ", ".join(match[2] for match in _EXPORT.finditer(text))
    return f"const module_{name[:-3]} = (() => {{\n{_EXPORT.sub('', text)}return {{ {exported} }};\n}})();\n"
