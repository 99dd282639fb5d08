"""What each head does, as a figure: a cell a head, in the colour of its role."""

from __future__ import annotations

from typing import Any

from clearhead import _palette
from clearhead.errors import ShapeError
from clearhead.heads.table import HeadTable

CELL = 0.19  # inches


def roles(table: HeadTable) -> Any:
    """A row a layer, a column a head; the paler, the weaker the score of its role. `plots.roles` is a table."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError('heads.plot() needs matplotlib: pip install "clearhead[plot]"') from error
    if not len(table):
        raise ShapeError("heads.plot(): the table has no heads.")
    layers, most = sorted({head.layer for head in table}), max(head.head for head in table) + 1
    figure = Figure((CELL * most + 2, CELL * len(layers) + 0.8), layout="constrained")
    ax = figure.add_subplot()
    for head in table:
        scale = _palette.role_weights(head.role)
        strength = 1.0 if head.role == "other" else min(1.0, head.strength)
        row = layers.index(head.layer)
        ax.add_patch(_cell(head.head, row, scale[round(255 * strength)], head.label))
    ax.set(xlim=(0, most), ylim=(len(layers), 0), aspect="equal", xlabel="head", ylabel="layer")
    ax.set_xticks([n + 0.5 for n in range(most)], [str(n) for n in range(most)], fontsize=6)
    ax.set_yticks([n + 0.5 for n in range(len(layers))], [str(layer) for layer in layers], fontsize=6)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    present = {role: n for role, n in table.counts().items() if n}
    signs = [Patch(color=_palette.of_role(role), label=f"{role}  {n}") for role, n in present.items()]
    ax.legend(handles=signs, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7)
    return figure


def _cell(head: int, row: int, colour: Any, label: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((head + 0.05, row + 0.05), 0.9, 0.9, color=colour, gid=label)
