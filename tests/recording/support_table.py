"""The page docs/models.md, made of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase

from .architectures import ARCHITECTURES, GROUPS, REASONS, Architecture
from .measuring import Measured

__all__ = ["BOUND", "Results", "render"]

BOUND = 2e-6  # of every error: what rounding allows (`Measured.excess`) where scores are largest, in T5
Results = Mapping[tuple[str, str], Measured]  # by model and implementation

PAGE = """# Which models can be recorded

`clearhead.record(model)` finds attention by how it is computed; no model has to be known to it. These were held to
their own weights: each cell is the largest |recorded weight - the model's own eager weight| over all layers and
heads, at most {bound}. Read are two batches of three sequences, one of whole ones, one with padding on the left and
on the right (images have none; in an encoder-decoder, other sequences of the target than of the source are padded).
*Output* is the largest difference of an output of the recorded call from the unobserved one.

The models are tiny and have random weights: what is tested is the architecture. A `SoftmaxMap` holds q, k and rules, a
`DenseMap` the weights as they were made, where more stands between q·k and the softmax than a scale, a soft-cap, masks
and biases that heads or sequences share.

{tables}

{reasons}

Not recorded, since no dimension of their weights is all keys: Longformer and the encoder of LED (bands in blocks), the
local part of PEGASUS-X. Models whose attention has no softmax (linear attention, hashing, Fourier) have no weights.

Flash attention is read from its arguments in the same way, but needs a GPU and was not run here. Written by
`docs/render_support.py`; the tests measure every cell again.
"""


def render(results: Results) -> str:
    """The page, of a result for each model and each implementation that it runs with."""
    tables = "\n\n".join(_table(group, results) for group in GROUPS)
    reasons = "\n".join(f"- ({_letter(says)}) {means}" for says, means in REASONS.items())
    return PAGE.format(bound=_number(BOUND), tables=tables, reasons=reasons)


def _table(group: str, results: Results) -> str:
    names = [name for name, row in ARCHITECTURES.items() if row.group == group]
    head = [group, "attention", "map", *GROUPS[group], "output"]
    rows = [head, ["---"] * len(head), *(_row(name, ARCHITECTURES[name], results) for name in names)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, row: Architecture, results: Results) -> list[str]:
    found = {one: results[name, one] for one in row.runs}
    cells = [
        _number(found[one].error) if one in found else f"({_letter(row.refused[one])})" for one in GROUPS[row.group]
    ]
    kinds = ", ".join(sorted(frozenset[str]().union(*(one.kinds for one in found.values()))))
    return [name, row.what, kinds, *cells, _number(max(one.difference for one in found.values()))]


def _number(x: float) -> str:
    return f"{x:.0e}".replace("e-0", "e-") if x else "0"


def _letter(says: str) -> str:
    return ascii_lowercase[list(REASONS).index(says)]
