"""A quick look at a map in matplotlib: one panel a head."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.maps.base import AttentionMap

PIXELS = 256


def figure(attn: AttentionMap) -> Any:
    """Every head of the first batch entry: rows are queries, columns keys, colour grows with the weight's root."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('attn.draw() needs matplotlib: pip install "clearhead[plot]"') from error
    heads = attn
    while heads._lead_names() not in ((), ("H",)):
        heads = heads[0]
    T, S = heads.shape[-2:]
    size = (min(T, PIXELS), min(S, PIXELS))
    pictures = heads.pool_max(size).detach().sqrt().cpu().reshape(-1, *size)
    across = min(len(pictures), 6)
    down = ceil(len(pictures) / across)
    canvas = Figure(figsize=(2.2 * across, 2.2 * down), layout="constrained")
    for n, picture in enumerate(pictures):
        axes = canvas.add_subplot(down, across, n + 1)
        look: dict[str, Any] = {"vmin": 0, "vmax": 1, "cmap": "Blues", "interpolation": "nearest", "aspect": "auto"}
        axes.imshow(picture.numpy(), extent=(0, S, T, 0), **look)
        axes.set_title(f"head {n}" if len(pictures) > 1 else "", fontsize=8)
        axes.tick_params(labelsize=6)
    return canvas
