"""What the command line shows: progress on stderr, and a view as tables. Texts and names are never markup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from clearhead._format import size
from clearhead._plain import plain
from clearhead._progress import Progress

if TYPE_CHECKING:
    from clearhead.bench import Bench
    from clearhead.cost import Cost
    from clearhead.view import View
    from clearhead.zoo import Entry

_STAGES = {
    "import": "Starting PyTorch",
    "convert": "Converting the model (once)",
    "load": "Loading the model",
    "model": "Running the model",
    "heads": "Reading the heads",
    "page": "Making the page",
    "recording": "Writing the recording",
    "figure": "Drawing the heads",
    "time": "Measuring time",
    "memory": "Measuring memory",
}
_COUNTED = ("heads", "memory")  # stages that tell how far they are; the others only begin and end
_STRONGEST = 3


def console() -> Console:
    """Where results go: stdout, with nothing in them read as markup, emoji or something to colour."""
    found = Console(markup=False, emoji=False, highlight=False)
    found.width = max(found.width, 40)  # narrower, the numbers themselves would be cut
    return found


@contextmanager
def progress() -> Iterator[Progress]:
    """A function to report ``(stage, done, total)`` to: a moving line on a terminal, a line per stage elsewhere."""
    with _moving() if sys.stderr.isatty() else _lines() as report:
        yield report


class _Counted(ProgressColumn):
    """A column that only stages with a count show."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return self._column(task) if task.fields["counted"] else Text()


@contextmanager
def _moving() -> Iterator[Progress]:
    with _bar(Console(stderr=True)) as bar:
        yield _reporter(bar)


def _bar(out: Console) -> Bar:
    """A spinner with the words of the stage, and a bar where the stage has a count."""
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, TimeElapsedColumn(), _Counted(BarColumn()), _Counted(MofNCompleteColumn()))
    return Bar(*columns, console=out, transient=True)


def _reporter(bar: Bar) -> Progress:
    task = bar.add_task("", total=None, visible=False, counted=False)
    current = ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal current
        if stage != current:
            bar.reset(task, description=_STAGES.get(stage, stage), visible=True, counted=stage in _COUNTED)
        current = stage
        if stage in _COUNTED:
            bar.update(task, completed=done, total=total)

    return report


@contextmanager
def _lines() -> Iterator[Progress]:
    seen: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            print(f"{_STAGES.get(stage, stage)} ...", file=sys.stderr, flush=True)
        seen.add(stage)

    yield report


@contextmanager
def training(done: int, steps: int, out: Console | None = None) -> Iterator[Callable[[int, str], None]]:
    """A function to tell of a step and what is known of it: a bar on a terminal, ten lines elsewhere."""
    out = Console(stderr=True) if out is None else out
    if out.is_terminal:
        words = TextColumn("{task.description}", markup=False)
        with Bar(words, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=out, transient=True) as bar:
            task = bar.add_task("Training", total=steps, completed=done)
            yield lambda step, told: bar.update(task, completed=step, description=told)
        return

    def line(step: int, told: str) -> None:
        if step % max(1, steps // 10) == 0 or step in (done + 1, steps):
            print(f"step {step:,} of {steps:,}: {told}", file=sys.stderr, flush=True)

    yield line


def show_view(view: View) -> None:
    """Print what was looked at and, for each role, its strongest heads beside the uniform head's score."""
    out = console()
    heads = view.maps[0].shape[-3]
    tokens = " + ".join(str(len(text)) for text in view.texts)
    shape = f"{tokens} tokens, {len(view.maps)} layers x {heads} heads"
    out.print(f"{plain(view.name)}: {shape}", soft_wrap=True)
    short = " (a short text: they grow with its square)" if view.dense_nbytes < view.nbytes else ""
    dense = f"the attention matrices would take {size(view.dense_nbytes)}{short}"
    out.print(f"Held: {size(view.nbytes)}; {dense}", soft_wrap=True)
    _print(out, _roles(view))


def _print(out: Console, table: Table) -> None:
    """Print a table without the spaces that fill its last column."""
    for line in out.render_lines(table, pad=False):
        text = Text.assemble(*((part.text, part.style or "") for part in line))
        text.rstrip()
        out.print(text, soft_wrap=True)


def _roles(view: View) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("Role")
    table.add_column("Heads", justify="right")
    table.add_column("Strongest: score / score of a uniform head")
    heads = view.heads()
    counts = heads.counts()
    for role in counts:
        shown = [head.summary for head in heads.strongest(role, _STRONGEST)]
        if shown and role == "broad":
            shown.append("of the largest entropy")
        table.add_row(role, str(counts[role]), Text("   ".join(shown) or "-"))
    return table


def show_models(entries: list[Entry]) -> None:
    """Print the models by name, whether they are here, and what it takes to get the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("Name", "Size", "Here", "What it is; what it takes"):
        table.add_column(heading, justify="right" if heading == "Size" else "left", overflow="fold")
    for entry in entries:
        note = plain(entry.what) + (f"\n-> {entry.how}" if entry.how else "")
        status = "no" if entry.status == "missing" else "yes"
        table.add_row(Text(plain(entry.name)), size(entry.nbytes), status, Text(note))
    out = console()
    _print(out, table)
    out.print("Also: any Hugging Face id, model folder or .gguf file, as --model ID, FOLDER or FILE.", soft_wrap=True)


def show_cost(cost: Cost, name: str | None) -> None:
    """Print time, weights and cache of each way of computing attention, and the projections beside them."""
    out = console()
    heads = f"{_count(cost.layers, 'layer')} x {_count(cost.heads, 'head')} of width {cost.head_dim:,}"
    shared = f", {_count(cost.groups, 'key/value head')}" if cost.groups != cost.heads else ""
    causal = "causal" if cost.causal else "not causal"
    title = f"{plain(name)}: " if name else ""
    out.print(f"{title}{_count(cost.tokens, 'token')}, {heads}{shared}, {cost.dtype}, {causal}", soft_wrap=True)
    _print(out, _prices(cost))
    out.print(f"Weights: of all layers; of one head of one layer, dense, {size(cost.dense_head)}.", soft_wrap=True)
    out.print("Tiled and sparse keep one number a row, from which any weight is computed again.", soft_wrap=True)
    if cost.causal:
        out.print("Cache: what is kept of earlier tokens to generate the next one.", soft_wrap=True)
    from_there = f"{cost.crossover:,.0f}" if cost.crossover < 1e15 else f"{cost.crossover:.1e}"
    beside = f"Projections: {size(cost.projections, 'FLOP')}; dense attention takes longer from"
    out.print(f"{beside} {from_there} tokens on.", soft_wrap=True)


def _prices(cost: Cost) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("", "Time", "Weights", "Cache"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    rows = {
        "dense": cost.dense,
        "tiled": cost.tiled,
        f"sparse, window {cost.window:,}": cost.windowed,
        "linear": cost.linear,
    }
    for kind, price in rows.items():
        if kind[:6] != "sparse" or cost.window < cost.tokens:
            held = [size(nbytes) if nbytes else "-" for nbytes in (price.weights, price.cache)]
            table.add_row(kind, size(price.flops, "FLOP"), *held)
    return table


def show_bench(found: Bench) -> None:
    """Print what each way costs: its time, that beside the first way's, and memory above what was there."""
    out = console()
    out.print(f"{plain(found.what)}, {_count(found.rounds, 'round')}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("", "Time", "Ratio", "Memory"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for name, timing, peak in found.rows:
        held = "-" if peak is None else size(peak)
        table.add_row(name, f"{timing.median * 1e3:,.1f} ms", f"{timing.ratio:.2f}", held)
    _print(out, table)
    for note in found.notes:
        out.print(plain(note), soft_wrap=True)
    out.print(plain(found.machine), soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("s" if number != 1 else "")
