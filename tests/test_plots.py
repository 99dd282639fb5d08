"""Figures: the numbers in them are the map's, read back from what matplotlib holds; and what they say to bad input."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, to_hex
from matplotlib.figure import Figure

import clearhead
from clearhead import DenseMap, DTypeError, ShapeError, SoftmaxMap, View, _palette, masks, plots, reference
from clearhead.heads.roles import ROLES, Head, HeadTable
from clearhead.page import shell
from clearhead.page.texts import Tokens

JOURNEY = ["Your", " journey", " starts", " with", " one", " step"]
ODD = [
    "$x^2$",
    "a_b",
    "\\alpha",
    "%",
    "<b>",
    "&amp;",
    '"',
    "",
    "\n",
    "\x00",
    "\ufffe",
    "שלום",
    " مرحبا",
    "e\u0301",
    "日本",
    "😀",
    "👩‍👩‍👧",
]
SVG = "{http://www.w3.org/2000/svg}"


def some_map(n: int, *, heads: int = 4, groups: int = 2, seed: int = 0, mask: Any = None) -> SoftmaxMap:
    draw = torch.Generator().manual_seed(seed)
    q, k = torch.randn(1, heads, n, 8, generator=draw), torch.randn(1, groups, n, 8, generator=draw)
    return SoftmaxMap(q, k, mask=masks.causal() if mask is None else mask)


def some_view(n: int = 6, *, name: str = "Two") -> View:
    """Layers 3 and 7 of four heads each."""
    maps = [some_map(n, seed=seed) for seed in (0, 1)]
    tokens = JOURNEY if n == 6 else [f" {t}" for t in range(n)]
    return View(list(maps), [3, 7], [Tokens(tokens, torch.arange(n) % 5)], name)


@pytest.fixture(scope="module")
def view() -> View:
    return some_view()


def dense(attn: SoftmaxMap) -> np.ndarray[Any, Any]:
    """The weights by the textbook, float64, NaN where a query may not look."""
    T, S = attn.shape[-2:]
    seen = reference.causal(T, S)
    weights = reference.weights(attn.q.double(), attn.k.double(), mask=seen)
    return weights.where(seen, torch.nan).numpy()


def cells(ax: Axes) -> np.ndarray[Any, Any]:
    """What the image of a panel holds; NaN where it draws nothing."""
    return np.ma.filled(ax.images[0].get_array().astype(float), np.nan)


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


# -- one map


def test_a_panel_holds_the_weights_and_leaves_blank_what_may_not_be_seen(view: View) -> None:
    figure = plots.attention(view.maps[0])
    assert [ax.get_title() for ax in figure.axes] == ["head 0", "head 1", "head 2", "head 3"]
    for ax, expected in zip(figure.axes, dense(view.maps[0])[0], strict=True):
        np.testing.assert_allclose(cells(ax), expected, atol=1e-6)


def test_cells_say_their_weight_where_they_are_large_enough(view: View) -> None:
    (ax,) = plots.attention(view.maps[0][0, 1]).axes
    weights = dense(view.maps[0])[0, 1]
    assert words(ax) == [f"{weight:.2f}" for weight in weights[np.tri(6, dtype=bool)]]
    assert [text.get_position() for text in ax.texts][:3] == [(0, 0), (0, 1), (1, 1)]


def test_every_number_reads_on_the_colour_under_it(view: View) -> None:
    (ax,) = plots.attention(view.maps[0][0, 1]).axes
    for text in ax.texts:
        s, t = text.get_position()
        under, ink = (luminance(colour) for colour in (ax.images[0].to_rgba(cells(ax)[t, s]), text.get_color()))
        assert (max(under, ink) + 0.05) / (min(under, ink) + 0.05) >= 4.5


def luminance(colour: Any) -> float:
    channels = bytes.fromhex(to_hex(colour)[1:])
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (c / 255 for c in channels)]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_tokens_stand_along_both_edges(view: View) -> None:
    (ax,) = plots.attention(view.maps[0][0, 1], tokens=JOURNEY).axes
    names = [token.strip() for token in JOURNEY]
    assert [label.get_text() for label in ax.get_xticklabels()] == names
    assert [label.get_text() for label in ax.get_yticklabels()] == names
    assert (list(ax.get_xticks()), ax.get_xlabel(), ax.get_ylabel()) == ([0, 1, 2, 3, 4, 5], "key", "query")


def test_the_two_sides_of_cross_attention_have_their_own_tokens() -> None:
    german, attn = ["Mein", "Haus", "ist", "nicht", "groß"], SoftmaxMap(torch.randn(2, 8), torch.randn(5, 8))
    (ax,) = plots.attention(attn, tokens=german, queries=["My", "house"]).axes
    assert [label.get_text() for label in ax.get_xticklabels()] == german
    assert [label.get_text() for label in ax.get_yticklabels()] == ["My", "house"]
    (ax,) = plots.attention(attn, tokens=german).axes
    assert all(re.fullmatch(r"[−\d]+", label.get_text()) for label in ax.get_yticklabels())  # nobody said whose


def test_a_long_map_is_pooled_to_its_largest_weights_and_says_so() -> None:
    attn = some_map(700, heads=1, groups=1)
    (ax,) = plots.attention(attn[0, 0]).axes
    drawn = cells(ax)
    assert ax.get_xlabel() == "key (a pixel: the largest of 2 × 2 weights)"
    bins = np.arange(700) * drawn.shape[0] // 700
    expected = np.full(drawn.shape, -1.0)
    np.maximum.at(expected, (bins[:, None], bins[None]), np.nan_to_num(dense(attn)[0, 0], nan=-1.0))
    np.testing.assert_allclose(np.nan_to_num(drawn, nan=-1.0), expected, atol=1e-6)


def test_the_root_of_a_weight_has_its_colour_and_longer_maps_or_callers_choose_otherwise() -> None:
    def t_of_a_quarter(attn: clearhead.AttentionMap, **given: Any) -> float:
        return float(plots.attention(attn, **given).axes[0].images[0].norm(0.25))

    short, long = some_map(6)[0, 0], some_map(1025)[0, 0]
    assert t_of_a_quarter(short) == pytest.approx(0.5)
    assert t_of_a_quarter(long) == pytest.approx(0.25)
    assert t_of_a_quarter(short, norm=LogNorm(1e-4, 1)) == pytest.approx(1 + math.log10(0.25) / 4)
    assert t_of_a_quarter(short, norm=Normalize(0, 0.5)) == pytest.approx(0.5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 1), (1, 1, 1, 1), (1, 40), (40, 1), (2, 1, 3), (3, 2, 2, 5)])
def test_every_shape_is_drawn(shape: tuple[int, ...]) -> None:
    weights = torch.rand(shape)
    figure = plots.attention(DenseMap(weights / weights.sum(-1, keepdim=True)))
    heads = (weights / weights.sum(-1, keepdim=True)).reshape(-1, *shape[-2:])
    assert len(figure.axes) == (shape[-3] if len(shape) > 2 else 1)
    for ax, expected in zip(figure.axes, heads, strict=False):  # of several texts the first
        np.testing.assert_allclose(cells(ax), expected, atol=1e-6)
    figure.draw_without_rendering()


def test_a_row_that_may_see_nothing_is_blank() -> None:
    attn = SoftmaxMap(
        torch.randn(3, 4), torch.randn(3, 4), mask=masks.causal() & masks.padding(torch.tensor([0, 1, 1]))
    )
    (ax,) = plots.attention(attn).axes
    np.testing.assert_array_equal(np.isnan(cells(ax)), [[1, 1, 1], [1, 0, 1], [1, 0, 0]])


def test_draw_is_attention_without_tokens(view: View) -> None:
    for drawn, plotted in zip(view.maps[0].draw().axes, plots.attention(view.maps[0]).axes, strict=True):
        np.testing.assert_array_equal(cells(drawn), cells(plotted))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda attn: plots.attention(attn, tokens=["a"]),
            ShapeError,
            "tokens=….: expected a .* 6 strings, got 1",
        ),
        (lambda attn: plots.attention(attn, tokens="abcdef"), ShapeError, "a list of 6 strings, got a string"),
        (lambda attn: plots.attention(attn, queries=["a"] * 7), ShapeError, "queries=….: expected .* 6 strings, got 7"),
        (lambda attn: plots.attention(attn, axes=[]), ShapeError, "4 heads, one into each Axes; got 0"),
        (lambda attn: plots.attention(attn, axes=Figure()), DTypeError, "expected matplotlib Axes, got"),
        (lambda attn: plots.attention(attn[:, []]), ShapeError, "nothing to draw"),
        (lambda attn: plots.attention(attn[:, :, []]), ShapeError, "nothing to draw"),
    ],
)
def test_what_cannot_be_drawn(view: View, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(view.maps[0])


def test_weights_that_are_not_finite_are_refused() -> None:
    q = torch.tensor([[0.0], [torch.nan]])
    with pytest.raises(ValueError, match="weights that are NaN or infinite"):
        plots.attention(SoftmaxMap(q, torch.ones(2, 1)))


# -- the heads of a view


def test_every_head_is_an_image_of_its_weights_in_the_colour_of_its_role(view: View) -> None:
    (ax,) = plots.heads(view).axes
    assert [image.get_gid() for image in ax.images] == [head.label for head in view.heads()]
    weights = np.concatenate([dense(attn)[0] for attn in view.maps])
    for image, head, expected in zip(ax.images, view.heads(), weights, strict=True):
        found = np.ma.filled(image.get_array(), np.nan)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        assert np.nanmax(np.abs(np.sqrt(found) - np.sqrt(expected))) <= 0.5 / 255 + 1e-6
        assert to_hex(image.cmap(1.0)) == _palette.ROLES[head.role].lower()
        assert image.norm(0.25) == pytest.approx(0.5)


def test_heads_stand_in_their_row_and_column_a_gap_between_groups(view: View) -> None:
    (ax,) = plots.heads(view).axes
    corners = [(image.get_extent()[0], image.get_extent()[3]) for image in ax.images]
    assert [y for _, y in corners] == [0] * 4 + [1] * 4
    steps = np.diff([x for x, _ in corners[:4]])
    assert steps == pytest.approx([1, 1 + plots.GROUP_GAP, 1])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2", "3"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3", "7"]
    middle = [(image.get_extent()[0] + image.get_extent()[1]) / 2 for image in ax.images[:4]]
    assert list(ax.get_xticks()) == pytest.approx(middle)


def test_longer_thumbnails_sum_over_keys_and_average_over_queries() -> None:
    view = some_view(50)
    image = plots.heads(view).axes[0].images[5]
    bins = np.arange(50) * 24 // 50
    expected = np.zeros((24, 24))
    np.add.at(expected, (bins[:, None], bins[None]), np.nan_to_num(dense(view.maps[1])[0, 1]))
    expected /= np.bincount(bins)[:, None]
    found = np.ma.filled(image.get_array(), 0)
    assert np.abs(np.sqrt(found) - np.sqrt(expected * np.tri(24))).max() <= 0.5 / 255 + 1e-6


def test_the_legend_counts_the_roles(view: View) -> None:
    (ax,) = plots.heads(view).axes
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == [f"{role}  {n}" for role, n in view.heads().counts().items() if n]
    assert ax.get_title(loc="left") == "Two, 6 tokens"


def test_one_head_is_named_by_its_label_or_taken_from_the_table(view: View) -> None:
    for which in ("L7H2", view.heads()[6]):
        (ax,) = plots.head(view, which).axes
        np.testing.assert_allclose(cells(ax), dense(view.maps[1])[0, 2], atol=1e-6)
        assert [label.get_text() for label in ax.get_yticklabels()] == [token.strip() for token in JOURNEY]
        assert ax.get_title(loc="left").split()[:2] == ["L7H2", view.heads()[6].role]


def one(layer: int, head: int, role: str, score: float | None, baseline: float | None, entropy: float) -> Head:
    return Head(layer, head, role, {role: score}, {role: baseline}, entropy, 1.0)


TABLE = HeadTable(
    [
        one(0, 0, "sink", 0.9, 0.1, 0.5),
        one(0, 1, "sink", 0.95, 0.1, 0.7),
        one(0, 2, "broad", 0.8, 1.0, 2.5),
        one(4, 0, "induction", 0.625, 0.125, 1.5),
        one(4, 1, "other", None, None, 1.0),
    ]
)


def test_a_title_gives_the_score_beside_the_uniform_heads(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    table = HeadTable([one(3, 0, "induction", 0.625, 0.125, 1.0), one(3, 1, "broad", 0.8, 1.0, 1.0)])
    monkeypatch.setattr(view, "heads", lambda: table)
    titles = [plots.head(view, label).axes[0].get_title(loc="left") for label in ("L3H0", "L3H1")]
    assert titles == ["L3H0  induction 0.62 / 0.12 (uniform head)", "L3H1  broad 0.80"]


def test_entropy_is_a_point_a_head_and_a_line_a_layer() -> None:
    (ax,) = plots.entropy(TABLE).axes
    points = {c.get_label(): c.get_offsets().tolist() for c in ax.collections if c.get_label() in ROLES}
    values = {role: [y for _, y in at] for role, at in points.items()}
    assert values == {"sink": [0.5, 0.7], "broad": [2.5], "induction": [1.5], "other": [1.0]}
    layers = {role: [round(x) for x, _ in at] for role, at in points.items()}
    assert layers == {"sink": [0, 0], "broad": [0], "induction": [4], "other": [4]}
    (median,) = [c for c in ax.collections if c.get_label() == "median"]
    assert [segment[0][1] for segment in median.get_segments()] == pytest.approx([0.7, 1.25])
    assert "uniform head" not in [text.get_text() for text in ax.get_legend().get_texts()]


def test_entropy_of_a_view_stands_below_that_of_a_uniform_head(view: View) -> None:
    (ax,) = plots.entropy(view).axes
    (even,) = [c for c in ax.collections if c.get_label() == "uniform head"]
    most = sum(math.log(t + 1) for t in range(6)) / 6
    assert [segment[0][1] for segment in even.get_segments()] == pytest.approx([most, most])
    assert [segment[:, 0].mean() for segment in even.get_segments()] == pytest.approx([3, 7])
    drawn = sorted(y for c in ax.collections if c.get_label() in ROLES for _, y in c.get_offsets())
    assert drawn == pytest.approx(sorted(head.entropy for head in view.heads()))


def test_the_uniform_head_sees_what_the_mask_leaves_and_empty_rows_do_not_count() -> None:
    rule = masks.causal() & masks.padding(torch.tensor([0, 0, 1, 1, 1, 1]))
    found = plots._uniform_entropy(some_map(6, mask=rule))
    assert found == pytest.approx(sum(math.log(n) for n in (1, 2, 3, 4)) / 4)


def test_influence_is_the_product_of_the_layers_above_each_depth(view: View) -> None:
    (ax,) = plots.influence(view, 4).axes
    shown = cells(ax)
    product, rows = np.eye(6), [np.eye(6)[4]]
    for attn in reversed(view.maps):
        product = product @ (np.nan_to_num(dense(attn))[0].mean(0) + np.eye(6)) / 2
        rows.insert(0, product[4])
    np.testing.assert_allclose(np.nan_to_num(shown), rows, atol=1e-6)
    assert np.isnan(shown[:, 5]).all()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["text", "3", "7"]
    assert ax.get_title("left") == "influence on token 4, 'one'"


def test_influence_is_of_one_text(view: View) -> None:
    two = View(list(view.maps), [3, 7], view.texts * 2, "Two")
    with pytest.raises(ShapeError, match="a view of one text"):
        plots.influence(two)
    with pytest.raises(IndexError, match="6"):
        plots.influence(view, 6)


def test_the_table_counts_the_roles_and_names_the_strongest() -> None:
    (ax,) = plots.roles(TABLE, strongest=1).axes
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([60, 0, 30, 0, 0, 0, 30, 30])
    found = words(ax)
    assert [word for word in found if word in ROLES] == list(ROLES)
    assert [word for word in found if word.isdigit()] == ["2", "0", "1", "0", "0", "0", "1", "1"]
    assert {"L0H1 0.95 / 0.10", "L4H0 0.62 / 0.12", "L0H2 0.80", "L4H1", "of the largest entropy"} <= set(found)
    assert not [word for word in found if word.startswith("L0H0")]
    assert len(words(plots.roles(TABLE, strongest=0).axes[0])) == 3 + 2 * len(ROLES)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda view: plots.heads(view.maps[0]), DTypeError, r"a View, got .*attention\(attn\)"),
        (lambda view: plots.heads(view.heads()), DTypeError, "heads.….: expected a View, got .*HeadTable"),
        (lambda view: plots.head(view.heads(), "L3H0"), DTypeError, "expected a View, got .*HeadTable"),
        (lambda view: plots.head(view, "L5H0"), ValueError, "'L5H0'.*no such head; there are L3H0 to L7H3"),
        (lambda view: plots.entropy(view.maps), DTypeError, "a View or a HeadTable, got"),
        (lambda view: plots.entropy(HeadTable([])), ShapeError, "entropy.….: the table has no heads"),
        (lambda view: plots.roles(HeadTable([])), ShapeError, "roles.….: the table has no heads"),
        (lambda view: plots.roles(view, strongest=-1), ShapeError, "strongest=-1.: expected an integer >= 0"),
        (
            lambda view: plots.heads(view, ax=Figure()),
            DTypeError,
            "heads.…, ax=….: expected one of .* Axes, got Figure",
        ),
        (lambda view: plots.entropy(view, ax=Figure().subplots(2, 2)), DTypeError, "expected one of .* Axes, got"),
        (lambda view: plots.roles(view, ax=0), DTypeError, "expected one of .* Axes, got int"),
        (lambda view: plots.attention(torch.eye(3)), DTypeError, "a map, got a float32 tensor .* clearhead.DenseMap"),
        (lambda view: plots.save(view, "a.svg"), DTypeError, "expected a Figure, got .*View"),
    ],
)
def test_what_is_no_view(view: View, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(view)


# -- as matplotlib's users expect


def test_a_figure_is_drawn_into_the_axes_that_are_given(view: View) -> None:
    canvas = Figure()
    axes = canvas.subplots(2, 2)
    drawn = [
        plots.heads(view, ax=axes[0, 0]),
        plots.head(view, "L3H1", ax=axes[0, 1]),
        plots.entropy(view, ax=axes[1, 0]),
        plots.roles(view, ax=axes[1, 1]),
    ]
    assert all(figure is canvas for figure in drawn)
    assert len(canvas.axes) == 4
    assert all(ax.has_data() for ax in canvas.axes)
    canvas = Figure()
    axes = canvas.subplots(2, 2)
    assert plots.attention(view.maps[0], axes=axes) is canvas
    np.testing.assert_allclose(cells(axes[1, 1]), dense(view.maps[0])[0, 3], atol=1e-6)


def test_smaller_axes_get_fewer_pixels_and_no_labels() -> None:
    attn, (ax,) = some_map(60)[0, 0], Figure((1, 1)).subplots(1, 1, squeeze=False)[0]
    plots.attention(attn, tokens=[str(t) for t in range(60)], axes=ax)
    assert max(cells(ax).shape) < 60
    assert "a pixel: the largest of 2 × 2 weights" in ax.get_xlabel()
    assert len(ax.get_xticks()) < 20


def test_pyplot_is_not_touched(view: View, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # every import of it raises
    for figure in (plots.heads(view), plots.head(view, "L3H0"), plots.entropy(view), plots.roles(view)):
        plots.save(figure, tmp_path / "a.png", dpi=30)


# -- colours


def test_the_colours_are_the_pages() -> None:
    styles = (Path(shell.__file__).parent / "static" / "style.css").read_text()
    light = dict(re.findall(r"--(\w[\w-]*): (#\w{6})", styles.partition("}")[0]))
    assert {role: light[role] for role in _palette.ROLES} == _palette.ROLES
    named = {"paper": _palette.PAPER, "cell": _palette.CELL, "line2": _palette.LINE, "bar": _palette.BAR}
    named |= {"ink": _palette.INK, "ink2": _palette.SOFT_INK}
    assert {name: light[name] for name in named} == named


def test_the_scale_of_weights_is_the_pages() -> None:
    script = (Path(shell.__file__).parent / "static" / "colour.js").read_text()
    light = re.search(r"const LIGHT = \{(.*?)\n\};", script, re.DOTALL)
    assert light
    numbers = [float(x) for x in re.findall(r"\d*\.?\d+", light[1])]
    chroma, hue = (list(map(float, np.ravel(stops))) for stops in (_palette.CHROMA, _palette.HUE))
    assert numbers == [*_palette.LIGHTNESS, *chroma, *hue]
    scale = _palette.weights()
    assert to_hex(scale[0]) == _palette.PAPER.lower()
    bright = [luminance(colour) for colour in scale[1:]]
    assert all(a > b for a, b in zip(bright, bright[4:], strict=False))  # darker all the way: it reads in grey too


def test_every_role_has_a_colour_a_sign_and_a_marker_of_its_own() -> None:
    assert list(_palette.ROLES) == list(_palette.SIGNS) == list(plots.MARKERS) == [*ROLES, "aligned"]
    assert len(set(_palette.ROLES.values())) == len(set(plots.MARKERS.values())) == len(ROLES) + 1
    assert _palette.of_role("unheard of") == _palette.ROLES["other"]


# -- files


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_the_same_input_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        plots.save(plots.head(some_view(), "L3H1"), tmp_path / f"{name}.{kind}")
    first, second = (tmp_path / f"{name}.{kind}" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{kind}", f"b.{kind}"]


def test_text_in_an_svg_stays_text_and_heads_have_their_labels_as_ids(view: View, tmp_path: Path) -> None:
    written = ElementTree.parse(plots.save(plots.head(view, "L3H1"), tmp_path / "head.svg"))
    found = [text.text for text in written.iter(f"{SVG}text")]
    assert {token.strip() for token in JOURNEY} <= set(found)
    written = ElementTree.parse(plots.save(plots.heads(view), tmp_path / "heads.svg"))
    ids = {image.get("id") for image in written.iter() if (image.get("id") or "").startswith("L")}
    assert ids == {head.label for head in view.heads()}


def test_tokens_are_text_and_never_formulas_or_markup(tmp_path: Path) -> None:
    n = len(ODD)
    figure = plots.attention(some_map(n)[0, 0], tokens=ODD)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels[:7] == ODD[:7]
    assert labels[7:12] == ["∅", "⏎", "\ufffd", "\ufffd", "שלום"]
    written = ElementTree.parse(plots.save(figure, tmp_path / "odd.svg"))  # no warning: the reader has the fonts
    texts = [text.text for text in written.iter(f"{SVG}text")]
    assert texts[:n] == labels


def test_a_name_with_a_formula_in_it_is_a_name(tmp_path: Path) -> None:
    figure = plots.heads(some_view(name="$\\frac{"))
    written = ElementTree.parse(plots.save(figure, tmp_path / "a.svg"))
    assert "$\\frac{, 6 tokens" in [text.text for text in written.iter(f"{SVG}text")]


def test_letters_that_the_font_lacks_are_told_once(tmp_path: Path) -> None:
    figure = plots.attention(DenseMap(torch.ones(2, 2) / 2), tokens=["\U0001f46f日", "日"])
    with pytest.warns(UserWarning, match=r"odd.png: the font has no sign for 日 \U0001f46f, drawn as boxes") as told:
        plots.save(figure, tmp_path / "odd.png")
    assert len(told) == 1


def test_long_tokens_are_cut() -> None:
    figure = plots.attention(DenseMap(torch.ones(1, 1)), tokens=["Donaudampfschifffahrt"])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["Donaudampfschif…"]


def test_files_that_cannot_be_written(view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plots.roles(view)
    for name in ("a.jpg", "a", "a.svg.gz"):
        with pytest.raises(ValueError, match=r"expected a name that ends in .svg, .png, .pdf"):
            plots.save(figure, tmp_path / name)
    with pytest.raises(OSError, match="No such file"):
        plots.save(figure, tmp_path / "missing" / "a.svg")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.SVG").write_text("old")

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        plots.save(figure, tmp_path / "a.SVG")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.SVG", "old")]


# -- a real model


def test_the_figures_of_a_real_model(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    view = clearhead.look(*smollm2, "The cat sat on the mat. The cat sat on the", layers=[16, 17, 18])
    (ax,) = plots.head(view, "L17H5").axes
    drawn = torch.from_numpy(np.nan_to_num(cells(ax)))
    torch.testing.assert_close(drawn.float(), view.maps[1][0, 5].to_dense(), atol=1e-6, rtol=0)
    assert [label.get_text() for label in ax.get_xticklabels()][:3] == ["The", "cat", "sat"]
    assert plots.save(plots.heads(view), tmp_path / "heads.svg").stat().st_size < 100_000
