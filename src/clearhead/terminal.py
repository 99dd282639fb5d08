"""What the command line shows: progress on stderr, and a view as tables. Texts and names are never markup."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
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
    from clearhead.heads import Effect, HeadLoss, Importance
    from clearhead.heads.losses import Measured
    from clearhead.view import View
    from clearhead.zoo import Entry

_STAGES = {
    "import": "Starting PyTorch",
    "convert": "Converting the model (once)",
    "load": "Loading the model",
    "model": "Running the model",
    "heads": "Reading the heads",
    "texts": "Reading the texts",
    "skip": "Finding the place where it ended",
    "atlas": "Reading the corpus",
    "page": "Making the page",
    "recording": "Writing the recording",
    "figure": "Drawing the heads",
    "time": "Measuring time",
    "memory": "Measuring memory",
    "importance": "Knocking out each head",
    "random": "Knocking out some together",
}
_SECONDS = 20  # between two lines on how far a stage is, where there is no moving bar
# Stages that tell how far they are, by number or as a share of the whole; the others only begin and end.
_SHOWN = dict.fromkeys(("heads", "texts", "memory", "importance", "random"), "count")
_SHOWN |= dict.fromkeys(("skip", "atlas"), "share")
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


class _Only(ProgressColumn):
    """A column that only stages show that tell how far they are in one of these ways."""

    def __init__(self, column: ProgressColumn, *ways: str) -> None:
        super().__init__()
        self._column, self._ways = column, ways

    def render(self, task: Task) -> RenderableType:
        return self._column(task) if task.fields["way"] in self._ways else Text()


@contextmanager
def _moving() -> Iterator[Progress]:
    with _bar(Console(stderr=True)) as bar:
        yield _reporter(bar)


def _bar(out: Console) -> Bar:
    """A spinner with the words of the stage, and a bar where the stage tells how far it is."""
    words = TextColumn("{task.description}", markup=False)
    number = (_Only(MofNCompleteColumn(), "count"), _Only(TaskProgressColumn(), "share"))
    left = TimeRemainingColumn(elapsed_when_finished=True)
    shown = (_Only(BarColumn(), "count", "share"), *number, _Only(left, "count", "share"))
    return Bar(SpinnerColumn(), words, TimeElapsedColumn(), *shown, console=out, transient=True)


def _reporter(bar: Bar) -> Progress:
    task = bar.add_task("", total=None, visible=False, way="")
    current = ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal current
        way = _SHOWN.get(stage, "")
        if stage != current:  # what was done before says nothing of how long the rest will take
            begun = done if way == "share" else 0
            bar.reset(task, completed=begun, description=_STAGES.get(stage, stage), visible=True, way=way)
        current = stage
        if way:
            bar.update(task, completed=done, total=total or None)

    return report


@contextmanager
def _lines() -> Iterator[Progress]:
    begun: dict[str, tuple[float, int]] = {}
    told = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        start, before = begun.setdefault(stage, (now, done))
        if now == start:
            print(f"{_STAGES.get(stage, stage)} ...", file=sys.stderr, flush=True)
        elif stage in _SHOWN and before < done < total and now >= told + _SECONDS:
            left = (now - start) / (done - before) * (total - done)
            print(f"  {done} of {total}, about {_duration(left)} left", file=sys.stderr, flush=True)
        else:
            return
        told = now

    yield report


def _duration(seconds: float) -> str:
    """Roughly.

    >>> _duration(42), _duration(170), _duration(7300)
    ('42 s', '3 min', '2 h 2 min')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


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
    print_table(out, _roles(view))


def print_table(out: Console, table: Table) -> None:
    """Print a table without the spaces that fill its last column."""
    for line in out.render_lines(table, pad=False):
        text = Text.assemble(*((part.text, part.style or "") for part in line))
        text.rstrip()
        out.print(text, soft_wrap=True)


def table_of(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Container[str]) -> Table:
    """Rows below headings, numbers at the right; columns in which nothing stands are left out, the last may wrap."""
    told = [n for n in range(len(headings)) if any(row[n] not in ("", "-") for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for n in told:
        table.add_column(headings[n], justify="left" if headings[n] in left else "right", no_wrap=n != told[-1])
    for row in rows:
        table.add_row(*(row[n] for n in told))
    return table


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
    print_table(out, table)
    out.print("Also: any Hugging Face id, model folder or .gguf file, as --model ID, FOLDER or FILE.", soft_wrap=True)


def show_cost(cost: Cost, name: str | None) -> None:
    """Print time, weights and cache of each way of computing attention, and the projections beside them."""
    out = console()
    heads = f"{_count(cost.layers, 'layer')} x {_count(cost.heads, 'head')} of width {cost.head_dim:,}"
    shared = f", {_count(cost.groups, 'key/value head')}" if cost.groups != cost.heads else ""
    causal = "causal" if cost.causal else "not causal"
    title = f"{plain(name)}: " if name else ""
    out.print(f"{title}{_count(cost.tokens, 'token')}, {heads}{shared}, {cost.dtype}, {causal}", soft_wrap=True)
    print_table(out, _prices(cost))
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
    print_table(out, table)
    for note in found.notes:
        out.print(plain(note), soft_wrap=True)
    out.print(plain(found.machine), soft_wrap=True)


def show_importance(every: Importance | None, together: Effect, top: int) -> None:
    """Print what the model loses without its heads, and without some together beside as many at random."""
    out = console()
    whole = together.whole
    rows = [["no head", f"{whole.loss:.4f}", "", "", _signed(whole.icl)]]
    for head in [] if every is None else every.strongest(top):
        rows.append([head.label, *_losses(head)])
    rows.append([f"{_count(len(together.heads), 'head')} together", *_losses(together.without)])
    if together.random:
        loss = f"{whole.loss + together.random_mean:.4f}"
        scores = [one.icl for one in together.random if one.icl is not None]
        score = _signed(sum(scores) / len(scores) if scores else None)
        rows.append(["as many at random", loss, f"{together.random_mean:+.4f}", "", score])
    print_table(out, table_of(("Without", "Loss", "More", "Error", "In context"), rows, left=("Without",)))
    if every is not None:
        out.print(f"Any one head: {every.mean:+.4f} ± {every.std:.4f}, over all {len(every)}.", soft_wrap=True)
    heads = ", ".join(f"L{layer}H{head}" for layer, head in together.heads)
    drawn = f"; at random ± {together.random_std:.4f} over {len(together.random)} draws" if together.random else ""
    out.print(f"Together: {heads}{drawn}.", soft_wrap=True)


def _losses(found: Measured | HeadLoss) -> list[str]:
    error = "-" if found.error is None else f"{found.error:.4f}"
    return [f"{found.loss:.4f}", f"{found.change:+.4f}", error, _signed(found.icl)]


def _signed(number: float | None) -> str:
    return "-" if number is None else f"{number:+.3f}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("s" if number != 1 else "")
