"""Figures for papers, in matplotlib: every head of a view, one head, any map, entropy, influence, roles.

view = clearhead.look(model, tokenizer, "The cat sat on the mat. The cat sat on the")
plots.save(plots.heads(view), "heads.svg")     # every head, in the colour of its role
plots.head(view, "L17H5")                      # one head: every token on every token
plots.attention(recording[17][0, 5])           # any map
plots.entropy(view)                            # how far each head spreads, layer by layer
plots.influence(view)                          # what the last token was made of, down the layers
plots.roles(view)                              # how many heads have each role, and the strongest

Each returns a Figure of which pyplot does not know; with `ax=` it draws into Axes of yours and returns their figure.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.path import Path as Outline
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError('clearhead.plots needs matplotlib: pip install "clearhead[plot]"') from error

from clearhead import _palette
from clearhead._checks import check_count, describe
from clearhead._files import FIGURES, write_whole
from clearhead.errors import DTypeError, ShapeError
from clearhead.heads.roles import ROLES, Head, HeadTable
from clearhead.maps.across import rollout
from clearhead.maps.base import AttentionMap
from clearhead.maps.dense import DenseMap
from clearhead.maps.drawing import INCH, PLAIN, SMALL, TINY, attention, clean, colour_map, room
from clearhead.maps.softmax import SoftmaxMap
from clearhead.page.payload import ENDS
from clearhead.view import View

__all__ = ["attention", "entropy", "head", "heads", "influence", "roles", "save"]

CELL, GAP, GROUP_GAP = 19.2, 0.1, 0.18  # of a thumbnail: its pitch in points; parts of it that stay free
MARKERS = dict(zip((*ROLES, "aligned"), "os^vDPXdp", strict=True))  # hue is never alone
NO_DATES: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
TEXT_AS_TEXT: dict[Any, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "clearhead"}


def heads(view: View, *, ax: Axes | None = None) -> Figure:
    """Draw every head of a view as a thumbnail: a row a layer, the colour that of its role, which the legend counts.

    A thumbnail is an image whose numbers are weights, summed over the keys and averaged over the queries under each
    pixel, kept in 8 bits of their root as on the page. Its ``get_gid()``, in SVG the id, is the head's label.
    """
    _expect(view, "heads(…)", View)
    _expect_axes(ax, "heads(…, ax=…)")
    table = view.heads()
    ax = ax or _axes(CELL * max(attn.shape[1] for attn in view.maps) + 130, CELL * len(view.maps) + 60)
    norm, colours = PowerNorm(0.5, 0, 1), {role: colour_map(role) for role in {head.role for head in table}}
    width = 0.0
    for row, (layer, thumbs, causal) in enumerate(_thumbnails(view)):
        group = _group(view.maps[row])
        for one, thumb in zip((head for head in table if head.layer == layer), thumbs, strict=True):
            left = one.head + (one.head // group * GROUP_GAP if group else 0)
            width = max(width, left + 1)
            shown = np.where(np.triu(np.ones(thumb.shape, bool), 1) & causal, np.nan, thumb)
            extent = (left, left + 1 - GAP, row + 1 - GAP, row)
            image = ax.imshow(shown, cmap=colours[one.role], norm=norm, extent=extent, interpolation="none")
            image.set_gid(one.label)
    _frame(ax, view, width)
    _legend(ax, table)
    return ax.figure  # type: ignore[return-value]


def head(view: View, which: Head | str, *, norm: Normalize | None = None, ax: Axes | None = None) -> Figure:
    """Draw one head of a view, each token on each: a `Head` of ``view.heads()``, or its label, "L17H5".

    As `attention`, with the view's tokens and a title that says what the head does.
    """
    _expect(view, "head(…, which)", View)
    label = which.label if isinstance(which, Head) else which
    found = next((one for one in view.heads() if one.label == label), None)
    if found is None:
        labels = [one.label for one in view.heads()]
        raise ValueError(f"head({view!r}, {label!r}): there is no such head; there are {labels[0]} to {labels[-1]}.")
    n = view.layers.index(found.layer)
    queries, keys = (view.texts[end].pieces for end in ENDS[view.sides[n]])
    figure = attention(view.maps[n][0, found.head], tokens=keys, queries=queries, norm=norm, axes=ax)
    name, _, scores = found.summary.partition(" ")
    title = f"{name}  {found.role} {scores}" + (" (uniform head)" if "/" in scores else "")
    (ax or figure.axes[0]).set_title(title, fontsize=SMALL, loc="left")
    return figure


def entropy(heads: View | HeadTable, *, ax: Axes | None = None) -> Figure:
    """Draw the entropy of every head in nats over its layer, and each layer's median.

    Of a view, whose maps are at hand, also the entropy of a head that spreads evenly over what it may see: the most
    there can be. Cost of that: one pass a layer over a uniform map.
    """
    table = _table(heads, "entropy(…)")
    _expect_axes(ax, "entropy(…, ax=…)")
    layers = sorted({head.layer for head in table})
    ax = ax or _axes(26 * min(len(layers), 14) + 180, 220)
    most = max(head.head for head in table) + 1
    for role in _present(table):
        own = [head for head in table if head.role == role]
        at = [head.layer + 0.7 * ((head.head + 0.5) / most - 0.5) for head in own]
        look: dict[str, Any] = {"marker": MARKERS[role], "facecolors": _palette.of_role(role), "edgecolors": "white"}
        ax.scatter(at, [head.entropy for head in own], s=22, linewidths=0.4, clip_on=False, label=role, **look)
    middle = [median(head.entropy for head in table if head.layer == layer) for layer in layers]
    _steps(ax, layers, middle, color=_palette.INK, linewidth=1.1, label="median")
    if isinstance(heads, View):
        even = [_uniform_entropy(attn) for attn in heads.maps]
        _steps(ax, heads.layers, even, color=_palette.BAR, linewidth=0.9, linestyle=":", label="uniform head")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    ax.tick_params(labelsize=TINY, length=2, width=0.4)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("layer", fontsize=SMALL)
    ax.set_ylabel("entropy of a head, nats", fontsize=SMALL)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=SMALL)
    return ax.figure  # type: ignore[return-value]


def influence(view: View, token: int = -1, *, norm: Normalize | None = None, ax: Axes | None = None) -> Figure:
    """Draw how much of a token's last vector comes from each token, at every depth; of the last token by default.

    A row a depth, as `heads.rollout(…).trace` gives it, of the view's layers: the uppermost is the influence of the
    tokens themselves, each one below that of what stands at them after one more layer, the lowest the token alone.
    Weights and residuals are looked at, values and MLPs are not. Raises ShapeError for a view of two texts.
    Cost: one pass over every layer.
    """
    _expect(view, "influence(…)", View)
    _expect_axes(ax, "influence(…, ax=…)")
    if len(view.texts) > 1:
        raise ShapeError(
            f"influence({view!r}): expected a view of one text; rollout(recording.encoder).trace is of one."
        )
    with torch.no_grad():
        trace = rollout(attn[0] for attn in view.maps).trace(token)
    names = ["text", *map(str, view.layers)]
    figure = attention(DenseMap(trace), tokens=view.tokens, queries=names, norm=norm, axes=ax)
    own = ax or figure.axes[0]
    own.set_ylabel("after layer", fontsize=SMALL)
    n = token % len(view.tokens)
    own.set_title(clean(f"influence on token {n}, {view.tokens[n].strip()!r}"), fontsize=SMALL, loc="left", **PLAIN)
    return figure


def roles(heads: View | HeadTable, *, strongest: int = 3, ax: Axes | None = None) -> Figure:
    """Draw a table: how many heads have each role, and the strongest of them beside the score of a uniform head."""
    table = _table(heads, "roles(…)")
    _expect_axes(ax, "roles(…, ax=…)")
    check_count("roles", "strongest", strongest, at_least=0)
    first = 180.0  # where the strongest heads begin, in points from the left
    counts = table.counts()
    width, height = first + max(strongest, 1) * 96 + 40, 20.0 * (len(counts) + 1)
    scale = 1 if ax is None else min(1.0, room(ax)[0] / width)
    ax = ax or _axes(width + 8, height + 8)
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.set_axis_off()
    write = partial(ax.text, fontsize=SMALL * scale, va="center")
    write(0, 10, "role", color=_palette.SOFT_INK)
    write(92, 10, "heads", ha="right", color=_palette.SOFT_INK)
    write(first, 10, "strongest: score / that of a uniform head", color=_palette.SOFT_INK)
    for n, role in enumerate(counts):
        y = 20.0 * n + 30
        for part in _signs(role, scale):
            part.set_data([7], [y])
            ax.add_line(part)
        write(18, y, role)
        write(92, y, str(counts[role]), ha="right")
        ax.barh(y, 60 * counts[role] / max(counts.values()), 8, left=98, color=_palette.of_role(role))
        shown = table.strongest(role, strongest)
        for i, one in enumerate(shown):
            write(first + 96 * i, y, one.summary)
        if shown and role == "broad":
            write(first + 96 * len(shown) - 44, y, "of the largest entropy", fontsize=TINY * scale)
    return ax.figure  # type: ignore[return-value]


def save(figure: Figure, path: str | os.PathLike[str], *, dpi: float = 200) -> Path:
    """Write a figure as .svg, .png or .pdf; the file appears whole or not at all. Equal figures give equal bytes.

    Text stays text in .svg and .pdf; `dpi` is for .png. Characters that the font lacks are boxes in .png and .pdf, and
    a warning names them; an .svg is shown with the fonts of whoever opens it. Raises ValueError for another ending,
    DTypeError, OSError.
    """
    _expect(figure, "save(…, path)", Figure)
    target = Path(path).expanduser()
    kind = target.suffix.lower()
    if kind not in FIGURES:
        raise ValueError(f"save(figure, {str(target)!r}): expected a name that ends in {', '.join(FIGURES)}.")
    content = io.BytesIO()
    with rc_context(TEXT_AS_TEXT), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        figure.savefig(content, format=kind[1:], dpi=dpi, metadata=NO_DATES[kind])
    missing = [re.match(r"Glyph (\d+) ", str(one.message)) for one in told]
    for one, glyph in zip(told, missing, strict=True):
        if not glyph:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    _tell_missing(sorted({int(glyph[1]) for glyph in missing if glyph}), target)
    write_whole(target, content.getvalue())
    return target


def _tell_missing(letters: list[int], target: Path) -> None:
    if letters and target.suffix.lower() != ".svg":
        some = " ".join(map(chr, letters[:8])) + (" …" if len(letters) > 8 else "")
        warnings.warn(
            f"{target.name}: the font has no sign for {some}, drawn as boxes. Save as .svg, or name a font that has"
            ' them in matplotlib.rcParams["font.family"].',
            stacklevel=3,
        )


def _expect(given: object, call: str, *kinds: type) -> None:
    if not isinstance(given, kinds):
        names = " or a ".join(kind.__name__ for kind in kinds)
        also = "; a map is drawn by attention(attn)" if isinstance(given, AttentionMap) else ""
        raise DTypeError(f"{call}: expected a {names}, got {describe(given)}{also}.")


def _expect_axes(ax: object, call: str) -> None:
    if ax is not None and not isinstance(ax, Axes):
        raise DTypeError(f"{call}: expected one of matplotlib's Axes, got {describe(ax)}.")


def _table(heads: View | HeadTable, call: str) -> HeadTable:
    _expect(heads, call, View, HeadTable)
    table = heads.heads() if isinstance(heads, View) else heads
    if not len(table):
        raise ShapeError(f"{call}: the table has no heads.")
    return table


def _axes(width: float, height: float) -> Axes:
    """The axes of a new figure of so many points."""
    return Figure(figsize=(width / INCH, height / INCH), layout="constrained").add_subplot()


def _thumbnails(view: View) -> Any:
    """(number, weights (H, P, P), whether no query sees a later key) of each layer."""
    for n in range(len(view.maps)):
        data = view._layer_data(n)
        yield data.layer, (data.thumbs / 255.0) ** 2, data.causal


def _group(attn: AttentionMap) -> int:
    """How many heads share keys and values; 0 where none do, or all."""
    shared, count = (attn.k.shape[1], attn.shape[1]) if isinstance(attn, SoftmaxMap) else (1, 1)
    return count // shared if 1 < shared < count else 0


def _frame(ax: Axes, view: View, width: float) -> None:
    """The numbers of heads above and of layers beside the thumbnails."""
    rows, most = len(view.maps), max(range(len(view.maps)), key=lambda n: view.maps[n].shape[1])
    group, count = _group(view.maps[most]), view.maps[most].shape[1]
    at = [h + (h // group * GROUP_GAP if group else 0) + (1 - GAP) / 2 for h in range(count)]
    ax.set(xlim=(-GAP, width), ylim=(rows, -GAP), aspect="equal")
    ax.set_xticks(at, [str(h) for h in range(count)])
    ax.set_yticks([n + (1 - GAP) / 2 for n in range(rows)], [str(layer) for layer in view.layers])
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.tick_params(length=0, labelsize=TINY, pad=1, colors=_palette.SOFT_INK)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("head", fontsize=SMALL)
    ax.set_ylabel("layer", fontsize=SMALL)
    ax.set_title(clean(f"{view.name}, {len(view.tokens):,} tokens"), fontsize=SMALL, loc="left", **PLAIN)


def _legend(ax: Axes, table: HeadTable) -> None:
    """The roles that there are, with their signs and counts."""
    counts = table.counts()
    present = _present(table)
    words = [f"{role}  {counts[role]}" for role in present]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
    ax.legend([_signs(role) for role in present], words, fontsize=SMALL, handlelength=1, **place)


def _present(table: HeadTable) -> list[str]:
    return [role for role, count in table.counts().items() if count]


def _signs(role: str, scale: float = 1) -> tuple[Line2D, Line2D]:
    """The page's sign of a role: a faint causal map, and on it the pattern in the role's colour."""
    look: dict[str, Any] = {
        "linestyle": "",
        "markersize": 11 * scale,
        "markeredgewidth": 0,
        "color": _palette.of_role(role),
    }
    ground, pattern = _outline([_palette.GROUND]), _outline(_palette.SIGNS[role])
    return Line2D([], [], marker=ground, alpha=0.16, **look), Line2D([], [], marker=pattern, **look)


def _outline(polygons: list[list[_palette.Point]]) -> Outline:
    """Polygons in a box of 14 as a marker: the first point draws nothing, it keeps all markers to one scale."""
    closed = [Outline([(x - 7, 7 - y) for x, y in [*points, points[0]]], closed=True) for points in polygons]
    return Outline.make_compound_path(Outline([(7, 7)], [Outline.MOVETO]), *closed)


def _steps(ax: Axes, layers: list[int], values: list[float], **look: Any) -> None:
    """A short level line at each layer."""
    ax.hlines(values, [layer - 0.42 for layer in layers], [layer + 0.42 for layer in layers], **look)


def _uniform_entropy(attn: AttentionMap) -> float:
    """The mean entropy of uniform weights over the queries that may see anything."""
    even = (attn[0][:1] if attn.heads_alike else attn[0]).uniform()
    with torch.no_grad():
        attends = even @ even.like.new_ones(even.shape[-1], 1)
        return float(even.entropy().double().sum() / attends.double().sum().clamp(min=1))
