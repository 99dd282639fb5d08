"""What the site has beyond docs/: the lessons with their outputs, and pages that stand elsewhere in the repository.

A lesson is taken from build/lessons, where `make lessons` leaves it, with what it printed and drew; where that is
missing or older than the lesson, the page shows the lesson alone and says so.
"""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path
from typing import Any

import jupytext
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from clearhead.learn import Lesson, all_lessons

ROOT = Path(__file__).parents[1]
RENDERED = ROOT / "build" / "lessons"
ELSEWHERE = {"notation.md": "src/clearhead/notation.md", "results.md": "benchmarks/RESULTS.md"}
ELSEWHERE |= {"changelog.md": "CHANGELOG.md"}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
NOT_RUN = '!!! note "Without its outputs"\n    This site was built without running the lesson: `make lessons` does.\n\n'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every lesson into the navigation."""
    for section in config.nav or []:
        if "Lessons" in section:
            section["Lessons"] += [{f"{one.number}. {one.title}": page_of(one)} for one in all_lessons()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for name, path in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text("utf-8")))
    for plot in (ROOT / "benchmarks" / "plots").glob("*.svg"):  # which the results show
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    for lesson in all_lessons():
        for name, content in pages(lesson).items():
            files.append(File.generated(config, name, content=content))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves."""
    return FORMULA.sub(_formula, content)


def _formula(found: re.Match[str]) -> str:
    return convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline")


def page_of(lesson: Lesson) -> str:
    """Where its page is."""
    return f"lessons/{lesson.path.stem}.md"


def pages(lesson: Lesson) -> dict[str, str | bytes]:
    """The lesson's page, its figures and the page that it saves, by name."""
    ran = RENDERED / f"{lesson.path.stem}.ipynb"
    has_run = ran.exists() and ran.stat().st_mtime >= lesson.path.stat().st_mtime
    cells = jupytext.reads(ran.read_text("utf-8") if has_run else lesson.notebook(), fmt="ipynb").cells
    made: dict[str, str | bytes] = {}
    parts = [_cell(cell, lesson, made) for cell in cells]
    title, _, rest = "\n\n".join(parts).partition("\n")
    made[page_of(lesson)] = f"{title}\n\n{'' if has_run else NOT_RUN}{_start(lesson)}{rest}"
    return made


def _start(lesson: Lesson) -> str:
    return f"`clearhead learn {lesson.number}` puts this lesson on your computer, with its exercises.\n\n"


def _cell(cell: Any, lesson: Lesson, made: dict[str, str | bytes]) -> str:
    if cell.cell_type == "markdown":
        return str(cell.source)
    outputs = [_output(output, lesson, made) for output in cell.get("outputs", [])]
    return "\n\n".join([f"```python\n{cell.source}\n```", *filter(None, outputs)])


def _output(output: Any, lesson: Lesson, made: dict[str, str | bytes]) -> str:
    """What a cell printed, drew or showed, in Markdown."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```"
    data = output.get("data", {})
    if "image/png" in data:
        name = f"{lesson.path.stem}-{len(made)}.png"
        made[f"lessons/{name}"] = base64.b64decode(data["image/png"])
        return f"![A figure of this cell]({name})"
    saved = RENDERED / f"lesson{lesson.number}.html"
    if "text/html" in data and saved.exists():
        name = f"lesson{lesson.number}-page.html"
        made[f"lessons/{name}"] = saved.read_bytes()
        frame = f'<iframe class="view" title="The page" src="{name}" loading="lazy"></iframe>'
        return f"{frame}\n\n[The page alone]({name})"
    return ""
