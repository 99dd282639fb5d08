"""The page's colours for figures: one scale for weights, and a colour and a sign for each role.

They are those of page/static (colour.js, style.css, roles.js), light theme; tests compare the two.
"""

from __future__ import annotations

from bisect import bisect
from math import cos, hypot, pi, radians, sin

PAPER, CELL, LINE, INK, SOFT_INK, BAR = "#FBFBF9", "#EFEEE9", "#C9C6BE", "#1B1D21", "#474B52", "#888E97"
ROLES = {
    "sink": "#677281",
    "previous": "#1A2C9C",
    "induction": "#B43207",
    "duplicate": "#AA7300",
    "self": "#05614A",
    "local": "#1E98CC",
    "broad": "#641E69",
    "other": "#9C8F84",
    "aligned": "#2E7D32",
}
LIGHTNESS = (0.987, 0.3)
CHROMA = ((0, 0), (0.2, 0.045), (0.5, 0.115), (0.75, 0.145), (1, 0.11))
HUE = ((0, 215), (0.5, 246), (1, 272))

RGB = tuple[float, float, float]  # 0 to 1
Point = tuple[float, float]


def weights(n: int = 256) -> list[RGB]:
    """The scale of weights, from paper to the darkest blue, lightness linear (OKLCH)."""
    low, high = LIGHTNESS
    steps = [i / (n - 1) for i in range(n)]
    return [channels(PAPER), *(oklch(low + (high - low) * t, _at(t, CHROMA), _at(t, HUE)) for t in steps[1:])]


def role_weights(role: str, n: int = 256) -> list[RGB]:
    """The scale of a role's thumbnails, from the grey of a cell to the role's colour."""
    cell, full = channels(CELL), channels(of_role(role))
    steps = [0.13 + 0.87 * (i / (n - 1)) ** 0.85 for i in range(n)]
    return [tuple(a + (b - a) * t for a, b in zip(cell, full, strict=True)) for t in steps]


def of_role(role: str) -> str:
    """The colour of a role; that of "other" for one without its own."""
    return ROLES.get(role, ROLES["other"])


def channels(colour: str) -> RGB:
    """Red, green and blue of "#RRGGBB", 0 to 1."""
    red, green, blue = bytes.fromhex(colour[1:])
    return red / 255, green / 255, blue / 255


def ink_on(colour: RGB) -> str:
    """Black or white, whichever reads better on the colour (WCAG's relative luminance)."""
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in colour)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def oklch(lightness: float, chroma: float, hue: float) -> RGB:
    """A colour of OKLCH in sRGB, in 255 steps; what sRGB lacks is clipped. Source: Ottosson 2020.

    >>> [round(255 * x) for x in oklch(0.628, 0.2577, 29.23)]  # red
    [255, 0, 0]
    """
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    mid = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3
    red = _gamma(4.0767416621 * long - 3.3077115913 * mid + 0.2309699292 * short)
    green = _gamma(-1.2684380046 * long + 2.6097574011 * mid - 0.3413193965 * short)
    blue = _gamma(-0.0041960863 * long - 0.7034186147 * mid + 1.707614701 * short)
    return red, green, blue


def _gamma(x: float) -> float:
    x = min(max(x, 0.0), 1.0)
    return round(255 * (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055)) / 255


def _at(t: float, stops: tuple[tuple[float, float], ...]) -> float:
    """Linear between stops (t, value)."""
    i = min(bisect([at for at, _ in stops], t), len(stops) - 1)
    (a, x), (b, y) = stops[i - 1], stops[i]
    return x + (y - x) * (t - a) / (b - a)


def _stroke(x0: float, y0: float, x1: float, y1: float, width: float) -> list[Point]:
    length = hypot(x1 - x0, y1 - y0)
    dx, dy = (y0 - y1) * width / length / 2, (x1 - x0) * width / length / 2
    return [(x0 + dx, y0 + dy), (x1 + dx, y1 + dy), (x1 - dx, y1 - dy), (x0 - dx, y0 - dy)]


def _dot(x: float, y: float, radius: float) -> list[Point]:
    return [(x + radius * cos(pi * n / 8), y + radius * sin(pi * n / 8)) for n in range(16)]


# Polygons in a box of 14, y downward: the pattern that the role makes in a causal map.
GROUND: list[Point] = [(1, 1), (1, 13), (13, 13)]
SIGNS: dict[str, list[list[Point]]] = {
    "sink": [_stroke(2, 2.6, 2, 13, 2.2)],
    "previous": [_stroke(1, 4.2, 9.8, 13, 1.9)],
    "induction": [_stroke(1, 8, 6, 13, 2.2)],
    "duplicate": [_dot(3.2, 8.2, 1.4), _dot(6.6, 11.4, 1.4), _dot(2.8, 12, 1.1)],
    "self": [_stroke(1, 1, 13, 13, 2)],
    "local": [[(1, 3.2), (10.8, 13), (6, 13), (1, 8)]],
    "broad": [GROUND],
    "other": [_dot(5.6, 10, 1.2), _dot(2.8, 6, 1), _dot(9.4, 11.6, 1)],
    "aligned": [_stroke(1, 1, 13, 13, 2)],
}
