"""Run every lesson as a notebook, and keep it with its outputs as .ipynb and as .html: what `make lessons` does.

A page needs no network: its formulas are MathML, and the scripts that nbconvert would load for them are left out.
"""

from __future__ import annotations

import re
import sys
import time
from copy import deepcopy
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbconvert import HTMLExporter

from clearhead.learn import Lesson, all_lessons

LIMIT = 900  # seconds for a cell; trainings take up to two minutes, and much longer where others run
CODE = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.DOTALL)
STYLE = """<style>
.jp-RenderedMarkdown > * { max-width: 84ch; }  /* about 80 characters */
.jp-RenderedMarkdown code { white-space: nowrap; }
.highlight pre { white-space: pre-wrap; }  /* code that is wider than the window */
.jp-OutputArea-output pre { word-break: normal; overflow-wrap: anywhere; }
mrow:has(> mfrac) > mo[fence] { font-size: 2em; }  /* without a font for formulas brackets do not grow by themselves */
:root { color-scheme: light dark; }
@media (prefers-color-scheme: dark) { %s }
</style></head>"""
OUTSIDE = re.compile(r'<script[^>]*\ssrc="http[^>]*>\s*</script>')


def main(folder: Path) -> int:
    """Render all lessons into the folder; 1 if one of them fails."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = [lesson.number for lesson in all_lessons() if not render(lesson, folder)]
    print(f"Failed: {failed}" if failed else f"The lessons are in {folder}", file=sys.stderr if failed else sys.stdout)
    return 1 if failed else 0


def render(lesson: Lesson, folder: Path) -> bool:
    """Run one lesson and write it; whether it ran to its end."""
    print(f"Lesson {lesson.number}: {lesson.title} ...", end=" ", flush=True)
    start = time.perf_counter()
    notebook = nbformat.reads(lesson.notebook(), as_version=4)
    try:
        quiet, where = ["--log-level=40"], {"metadata": {"path": str(folder)}}
        # Printed lines are one output, however far apart in time they came.
        how = {"timeout": LIMIT, "extra_arguments": quiet, "resources": where, "coalesce_streams": True}
        NotebookClient(notebook, **how).execute()
    except (CellExecutionError, CellTimeoutError) as error:
        print(f"failed\n{error}")
        return False
    target = folder / lesson.path.stem
    nbformat.write(notebook, target.with_suffix(".ipynb"))
    target.with_suffix(".html").write_text(page(notebook, lesson.title), encoding="utf-8")
    print(f"{time.perf_counter() - start:.0f} s")
    return True


def page(notebook: nbformat.NotebookNode, title: str) -> str:
    """The notebook as one HTML document."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts = CODE.split(cell.source)  # text and code in turn
            parts[::2] = [FORMULA.sub(formula, text) for text in parts[::2]]
            cell.source = "".join(parts)
    exporter = HTMLExporter()
    html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": title}})
    dark, *_ = exporter.environment.loader.get_source(exporter.environment, "static/theme-dark.css")
    return OUTSIDE.sub("", html).replace("</head>", STYLE % dark, 1)


def formula(found: re.Match[str]) -> str:
    """LaTeX as MathML, which browsers draw by themselves."""
    return convert(found[1] or found[2], display="block" if found[1] else "inline")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
