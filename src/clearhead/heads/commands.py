"""What `clearhead heads` does and prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from clearhead import terminal, zoo
from clearhead._files import write_whole
from clearhead._format import finite
from clearhead._plain import plain
from clearhead._version import __version__
from clearhead.arguments import check_file, stop, text_of, texts_of
from clearhead.heads.probing import probe
from clearhead.heads.table import Head, HeadTable

__all__ = ["show_heads"]


def show_heads(model: str, files: Sequence[Path], *, as_json: Path | None, strongest: int) -> None:
    """Run the probes on a model, print the heads of each role, strongest first, and write all of them as JSON."""
    texts = texts_of(files) or [text_of(None, None)]
    check_file("--json", as_json)
    with terminal.progress() as report:
        loaded, tokenizer = zoo.load(model, on_progress=report)
        heads = probe(loaded, tokenizer, texts, on_progress=report)
    _print(heads, model, len(texts), strongest)
    if as_json is not None:
        try:
            write_whole(as_json, json.dumps(facts(heads, model), allow_nan=False).encode())
        except OSError as error:
            stop(f"cannot write {as_json}: {error.strerror or error}")
        print(f"Wrote {plain(str(as_json))}")


def facts(heads: HeadTable, model: str) -> dict[str, Any]:
    """All heads as JSON holds them."""
    return {"clearhead": __version__, "model": model, "heads": [_fact(head) for head in heads]}


def _fact(head: Head) -> dict[str, Any]:
    tables = {"scores": head.scores, "baselines": head.baselines, "details": head.details, "probe": head.probe}
    return {
        "layer": head.layer,
        "head": head.head,
        "role": head.role,
        "detail": head.detail,
        "confidence": finite(head.confidence),
        **{name: {score: finite(value) for score, value in table.items()} for name, table in tables.items()},
        "entropy": finite(head.entropy),
        "distance": finite(head.distance),
    }


def _print(heads: HeadTable, model: str, texts: int, strongest: int) -> None:
    out = terminal.console()
    layers = len({head.layer for head in heads})
    what = "1 text" if texts == 1 else f"{texts} texts"
    out.print(f"{plain(model)}: {layers} layers, {len(heads)} heads, on {what}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("Role", "Heads", "Head", "Score", "Uniform", "Clear", "Entropy", "Repeats", "More exactly"):
        table.add_column(heading, justify="left" if heading in ("Role", "Head", "More exactly") else "right")
    for role, count in heads.counts().items():
        shown = heads.strongest(role, strongest)
        for n, head in enumerate(shown):
            table.add_row(*(("", "") if n else (role, str(count))), *_columns(head))
        if not shown:
            table.add_row(role, str(count))
    terminal.print_table(out, table)
    out.print("Clear: 0 at the edge to another role, 1 far from it. Entropy in nats.", soft_wrap=True)
    out.print("Repeats: induction score on repeated random tokens.", soft_wrap=True)


def _columns(head: Head) -> list[Text]:
    own = (head.scores.get(head.role), head.baselines.get(head.role))
    numbers = [*own, head.confidence, head.entropy, head.probe.get("induction")]
    shown = (Text("-" if value is None else f"{value:.2f}") for value in numbers)
    return [Text(head.label), *shown, Text(head.detail)]
