"""What `clearhead heads` does and prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead import terminal, zoo
from clearhead._files import write_whole
from clearhead._format import finite
from clearhead._plain import plain
from clearhead._version import __version__
from clearhead.arguments import check_file, stop, text_of, texts_of
from clearhead.heads.probing import probe
from clearhead.heads.table import Head, HeadTable

__all__ = ["show_heads"]

_HEADINGS = ("Role", "Heads", "Head", "Score", "Uniform", "Clear", "Entropy", "Repeats", "More exactly")


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
    rows: list[list[str]] = []
    for role, count in heads.counts().items():
        shown = [_columns(head) for head in heads.strongest(role, strongest)] or [[""] * (len(_HEADINGS) - 2)]
        rows += [[*(("", "") if n else (role, str(count))), *columns] for n, columns in enumerate(shown)]
    terminal.print_table(out, terminal.table_of(_HEADINGS, rows, left=("Role", "Head", "More exactly")))
    out.print("Clear: 0 at the edge to another role, 1 far from it. Entropy in nats.", soft_wrap=True)
    out.print("Repeats: induction score on repeated random tokens.", soft_wrap=True)


def _columns(head: Head) -> list[str]:
    own = (head.scores.get(head.role), head.baselines.get(head.role))
    numbers = [*own, head.confidence, head.entropy, head.probe.get("induction")]
    return [head.label, *("-" if value is None else f"{value:.2f}" for value in numbers), head.detail]
