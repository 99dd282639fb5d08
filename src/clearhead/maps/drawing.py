"""A map in matplotlib: one panel a head, with tokens along the edges and numbers in the cells where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clearhead import _palette
from clearhead._checks import describe
from clearhead._plain import shown
from clearhead.errors import DTypeError, ShapeError

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, Normalize, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError('attn.draw() needs matplotlib: pip install "clearhead[plot]"') from error

if TYPE_CHECKING:
    from clearhead.maps.base import AttentionMap

__all__ = ["INCH", "PLAIN", "SMALL", "TINY", "attention", "clean", "colour_map", "room"]

INCH = 72  # points, in which all sizes here are
LARGEST_CELL, LEAST_SIDE = 30.0, 12.0
ALONE, AMONG = 504.0, 144.0  # the longer side of a map alone, and of one of many
LABELLED, NUMBERED = 5.0, 20.0  # cells of this size have their token beside them, their weight in them
SMALL, TINY = 8.0, 6.0  # type
LETTER = 0.62  # width of a letter over its size, about
LONGEST = 16  # letters of a token that are shown
ROOT_UP_TO = 1024  # keys; weights on more keys are so small that their roots show noise
RAW: dict[str, Any] = {"interpolation": "none"}  # in SVG and PDF each weight is a pixel of the picture
PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}  # no "$" or "_" of a token is a formula


@dataclass(frozen=True)
class _Names:
    """What stands along the edges: a token for each query and for each key, or None for their numbers."""

    queries: list[str] | None
    keys: list[str] | None


def attention(
    attn: AttentionMap,
    *,
    tokens: Sequence[str] | None = None,
    queries: Sequence[str] | None = None,
    norm: Normalize | None = None,
    axes: Any = None,
) -> Figure:
    """Draw the weights of every head: rows are queries, columns keys; what no query may see stays blank.

    Args:
        attn: a map (T, S), (H, T, S) or (B, H, T, S), of which the first batch entry is drawn.
        tokens: a string for each of the S keys.
        queries: a string for each of the T queries; the tokens where T = S.
        norm: matplotlib's, from weights to colours, such as LogNorm(1e-4, 1); the root of the weight by default, the
            weight itself for more than 1,024 keys.
        axes: the matplotlib Axes to draw into, one a head; those of a new figure by default.

    Tokens and numbers are written where they fit. Of more queries or keys than there are points of room, each pixel
    is the largest weight under it, and a line says so. ``axes[0].images[0].get_array()`` has the weights.

    Returns the figure; pyplot does not know of a new one. Raises ShapeError, DTypeError; ValueError for weights that
    are not finite. Cost: two passes over the map.
    """
    if not hasattr(attn, "_lead_names"):
        raise DTypeError(
            f"attention(…): expected a map, got {describe(attn)}; of weights, clearhead.DenseMap makes one."
        )
    heads = attn
    while heads._lead_names() not in ((), ("H",)):
        heads = heads[0]
    T, S = heads.shape[-2:]
    names = _names(attn, tokens, queries)
    count = heads.shape[0] if len(heads.shape) == 3 else 1
    if not (count and T and S):
        raise ShapeError(f"attention({attn!r}): there is nothing to draw; expected a head, a query and a key at least.")
    panels, (width, height) = _canvas(count, T, S, names) if axes is None else _given(attn, count, axes)
    size = (min(T, max(int(height), 1)), min(S, max(int(width), 1)))
    norm = norm or (PowerNorm(0.5, 0, 1) if S <= ROOT_UP_TO else Normalize(0, 1))
    for ax, cells in zip(panels, _pictures(heads, size), strict=True):
        ax.imshow(cells, extent=(-0.5, S - 0.5, T - 0.5, -0.5), norm=norm, cmap=colour_map("weights"), **RAW)
        ax.set_aspect("equal" if max(T, S) <= 8 * min(T, S) else "auto")
        _edges(ax, (width / S, height / T), names)
        if size == (T, S) and min(width / S, height / T) >= NUMBERED:
            _numbers(ax, cells)
    key = "key" if size == (T, S) else f"key (a pixel: the largest of {_under(size, (T, S))} weights)"
    _title(panels, key, height, new=axes is None)
    return panels[0].figure  # type: ignore[return-value]


def colour_map(name: str) -> ListedColormap:
    """The page's scale of weights ("weights"), or that of a role's thumbnails."""
    colours = _palette.weights() if name == "weights" else _palette.role_weights(name)
    return ListedColormap(colours, f"clearhead {name}")  # a cell without a number is not drawn, matplotlib's default


def clean(text: str) -> str:
    """The text without the two characters that no SVG may hold and `shown` does not replace."""
    return text.translate({0xFFFE: 0xFFFD, 0xFFFF: 0xFFFD})


def _names(attn: AttentionMap, tokens: Sequence[str] | None, queries: Sequence[str] | None) -> _Names:
    T, S = attn.shape[-2:]
    queries = tokens if queries is None and T == S else queries
    for what, given, n in (("tokens", tokens, S), ("queries", queries, T)):
        if isinstance(given, str) or (given is not None and len(given) != n):
            got = "a string" if isinstance(given, str) else f"{len(given)}"
            raise ShapeError(f"attention({attn!r}, {what}=…): expected a list of {n} strings, got {got}.")
    return _Names(*(None if given is None else [_label(token) for token in given] for given in (queries, tokens)))


def _label(token: str) -> str:
    whole = clean(shown(str(token)))
    return whole if len(whole) <= LONGEST else whole[: LONGEST - 1] + "…"


def _given(attn: AttentionMap, count: int, axes: Any) -> tuple[list[Axes], tuple[float, float]]:
    """The caller's axes, one a head, and the room (width, height) of the smallest."""
    panels = list(np.asarray(axes, dtype=object).reshape(-1))
    for ax in panels:
        if not isinstance(ax, Axes):
            raise DTypeError(f"attention(…, axes=…): expected matplotlib Axes, got {describe(ax)}.")
    if len(panels) != count:
        raise ShapeError(f"attention({attn!r}, axes=…): it draws {count} heads, one into each Axes; got {len(panels)}.")
    widths, heights = zip(*map(room, panels), strict=True)
    return panels, (min(widths), min(heights))


def room(ax: Axes) -> tuple[float, float]:
    """Width and height of axes in points; before their figure is laid out, about."""
    box, points = ax.get_window_extent(), INCH / ax.figure.dpi
    return box.width * points, box.height * points


def _canvas(count: int, T: int, S: int, names: _Names) -> tuple[list[Axes], tuple[float, float]]:
    """The axes of a new figure, and the room of each: cells are squares, but for maps of very few rows or columns."""
    cell = min(LARGEST_CELL, (ALONE if count == 1 else AMONG) / max(T, S))
    width, height = max(S * cell, LEAST_SIDE), max(T * cell, LEAST_SIDE)
    across = ceil(sqrt(count))
    down = ceil(count / across)
    beside, above = (_length(labels, cell) for labels in (names.queries, names.keys))
    inches = (across * (width + beside + 20) + 60) / INCH, (down * (height + above + 30) + 30) / INCH
    figure = Figure(figsize=inches, layout="constrained")
    return [figure.add_subplot(down, across, n + 1) for n in range(count)], (width, height)


def _type(cell: float) -> float:
    return min(SMALL, 0.85 * cell)


def _length(labels: list[str] | None, cell: float) -> float:
    """How long the labels are, in points: of tokens, where they fit, or of numbers."""
    return 20 if labels is None or cell < LABELLED else LETTER * _type(cell) * max(map(len, labels))


def _pictures(heads: AttentionMap, size: tuple[int, int]) -> list[Any]:
    """The largest weight under each pixel, an array (R, C) a head; NaN where no key may be seen."""
    weights = heads.pool_max(size).detach()
    if not bool(torch.isfinite(weights).all()):
        raise ValueError(f"attention({heads!r}): it holds weights that are NaN or infinite; see torch.isfinite.")
    alike = heads[:1] if len(heads.shape) == 3 and heads.heads_alike else heads
    seen: Tensor = alike.uniform().pool_max(size).detach() > 0
    return list(weights.where(seen, torch.nan).reshape(-1, *size).cpu().numpy())


def _edges(ax: Axes, cell: tuple[float, float], names: _Names) -> None:
    """Tokens where cells are large enough for them, numbers elsewhere; keys above the map, as the text runs."""
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.tick_params(labelsize=TINY, length=2, width=0.4, pad=1)
    ax.spines[:].set_linewidth(0.4)
    ax.spines[:].set_color(_palette.LINE)
    for axis, labels, side in ((ax.xaxis, names.keys, cell[0]), (ax.yaxis, names.queries, cell[1])):
        if labels is None or side < LABELLED:
            axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
            continue
        wide = LETTER * _type(side) * max(map(len, labels)) > side
        turned: dict[str, Any] = {"rotation": 90} if axis is ax.xaxis and wide else {}
        axis.set_ticks(range(len(labels)), labels, fontsize=_type(side), **turned, **PLAIN)


def _under(size: tuple[int, int], shape: tuple[int, int]) -> str:
    return " × ".join(str(ceil(n / pixels)) for n, pixels in zip(shape, size, strict=True))


def _numbers(ax: Axes, cells: Any) -> None:
    """Each weight, written into its cell in black or white."""
    image = ax.images[-1]
    for (t, s), weight in np.ndenumerate(cells):
        if not np.isnan(weight):
            ink = _palette.ink_on(tuple(image.to_rgba(weight)[:3]))
            ax.text(s, t, f"{weight:.2f}", ha="center", va="center", fontsize=SMALL - 1, color=ink)


def _title(panels: list[Axes], key: str, height: float, *, new: bool) -> None:
    """Say what the axes are and, in a figure of its own, which head is which or what the colours mean."""
    for n, ax in enumerate(panels):
        if new and len(panels) > 1:
            ax.set_title(f"head {n}", fontsize=SMALL)
        else:
            ax.set_xlabel(key, fontsize=SMALL)
            ax.set_ylabel("query", fontsize=SMALL)
    if new and len(panels) > 1:
        panels[0].figure.supxlabel(key, fontsize=SMALL)
        panels[0].figure.supylabel("query", fontsize=SMALL)
    elif new:
        _colour_bar(panels[0], min(1.0, 130 / height))


def _colour_bar(ax: Axes, share: float) -> None:
    beside = ax.inset_axes((1.04, 1 - share, 0.03, share))
    bar = ax.figure.colorbar(ax.images[0], cax=beside)
    bar.outline.set(linewidth=0.4, edgecolor=_palette.LINE)
    bar.set_label("weight", fontsize=TINY)
    beside.tick_params(labelsize=TINY, length=2, width=0.4, pad=1)
