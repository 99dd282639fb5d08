"""What a benchmark found, printed as it goes and written into its own section of RESULTS.md.

    with Report(__file__, "What looking costs") as report:
        report.say("a sentence")
        report.table(["", "ms", "ratio"], [["ours", "1.0", "0.5"]])
        report.plot(figure, "growth", "what it shows")

The section begins with the script's docstring and the machine; a script that ends in an error leaves it as it was.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from clearhead._measuring import Timing, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS, PLOTS = HERE / "RESULTS.md", HERE / "plots"
HEAD = """# Results

Written by `make bench`, a section by each script in this folder; ratios are within one run, on the machine named.
Time is the median of rounds that take turns; "least" compares the two shortest times, which other work on the machine
touches least; memory is the peak of a fresh process above what was there before the call, unless a section says
otherwise.
"""


class Report:
    """The section of one script."""

    def __init__(self, script: str, title: str) -> None:
        self._name, self._start = Path(script).stem, time.perf_counter()
        doc = ast.get_docstring(ast.parse(Path(script).read_text())) or ""
        self._parts = [f"## {title}", doc, f"*{machine()}. {time.strftime('%Y-%m-%d')}.*"]
        print(f"\n{title}\n")

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            _put(self._name, "\n\n".join(self._parts))
            print(f"\n{time.perf_counter() - self._start:.0f} s; written into {RESULTS.relative_to(HERE.parent)}")

    def say(self, text: str) -> None:
        """A paragraph."""
        self._add(text, text)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A row each; the first column is text, the others are numbers."""
        lines = [list(headings), *map(list, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [
            [line[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(line[1:], widths[1:], strict=True))]
            for line in lines
        ]
        rule = ["-" * widths[0], *("-" * (n - 1) + ":" for n in widths[1:])]
        markdown = "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))
        self._add(markdown, "\n".join("  ".join(line).rstrip() for line in padded))

    def plot(self, figure: Figure, name: str, caption: str) -> None:
        """A picture, as plots/<script>-<name>.svg."""
        PLOTS.mkdir(exist_ok=True)
        path = PLOTS / f"{self._name}-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        self._add(f"![{caption}](plots/{path.name})", f"{caption}: {path.relative_to(HERE.parent)}")

    def _add(self, markdown: str, text: str) -> None:
        self._parts.append(markdown)
        print(text, end="\n\n", flush=True)


def row(name: str, timing: Timing, peak: int | None) -> list[str]:
    """Name, milliseconds, ratio, ratio of the shortest times, megabytes: the cells of `COLUMNS`."""
    megabytes = "-" if peak is None else f"{peak / 1e6:,.0f}"
    return [name, f"{timing.median * 1e3:,.1f}", f"{timing.ratio:.2f}", f"{timing.least:.2f}", megabytes]


COLUMNS = ["", "ms", "ratio", "least", "MB"]


def _put(name: str, section: str) -> None:
    """Replace the section in the file, or add it; sections are in the order of their names."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    marker = r"^<!-- (\w+)\.py -->\n"
    _, *parts = re.split(marker, text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True)) | {name: section.strip()}
    whole = [f"<!-- {name}.py -->\n{sections[name]}\n" for name in sorted(sections)]
    RESULTS.write_text("\n".join([HEAD, *whole]))
