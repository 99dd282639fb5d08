"""View: the maps of one run of a model, what their heads do, and the page on which a person sees them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from clearhead._files import write_whole
from clearhead._progress import Progress, silent
from clearhead.errors import ModelError
from clearhead.heads.pairs import near_patches
from clearhead.heads.roles import Head, HeadTable, LayerScores, Scorer, score_cross
from clearhead.kernels.tiles import Reducer
from clearhead.maps import reductions as reduce
from clearhead.maps.across import rollout
from clearhead.maps.base import AttentionMap
from clearhead.maps.softmax import SoftmaxMap
from clearhead.masks import Coverage, causal
from clearhead.page.answers import Answers, LiveLayer
from clearhead.page.html import render
from clearhead.page.notebook import cell
from clearhead.page.payload import ENDS, LayerData, Payload, build, page_facts, thumbnails, title_of
from clearhead.page.peaks import encoded, peaks_side
from clearhead.page.strong import THRESHOLD, Strong, StrongWeights, level_of
from clearhead.page.terms import Terms
from clearhead.page.texts import Picture, Tokens
from clearhead.projections import Projection
from clearhead.saving import fitting, load_folder, save_folder

if TYPE_CHECKING:
    from clearhead.page.widget import Widget

__all__ = ["Find", "View", "is_plain"]

THUMB = 24  # pixels a side
Find: TypeAlias = Callable[[SoftmaxMap], Projection]
STRONG_WEIGHTS = 20_000_000  # that all layers together may keep for the page: 25 MB hold about 17 million
INFLUENCE = 2048  # tokens up to which a file holds their influence on the last one: a pass over every layer
PEAKS = 64_000_000  # bytes that the peaks of all maps may take, or a quarter of what the maps do


class View:
    """The attention of one model on one text: maps, heads, and the page.

    Attributes: maps (one a layer, (1, H, T, S)), layers (their numbers), texts (one; of an encoder-decoder model source
    and target), sides (of such a model "encoder", "decoder" or "cross", a layer each; else ""), name.

    A view keeps the model, and up to 150 MB of its layers' inputs: the page shows how q comes of them.
    In a notebook it shows itself: live as long as kernel and view are there, then as the file that was saved.
    """

    def __init__(
        self,
        maps: list[AttentionMap],
        layers: list[int],
        texts: Sequence[Tokens],
        name: str,
        on_progress: Progress = silent,
        finders: Sequence[Find] = (),
        sides: Sequence[str] = (),
    ) -> None:
        self.maps, self.layers, self.texts, self.name = maps, layers, list(texts), name
        self.sides = list(sides) or [""] * len(maps)
        self._report = on_progress
        self._finders, self._terms = finders, dict[int, Terms]()
        self._scorers: dict[int, Scorer] = {}  # by text
        self._scores: list[LayerScores] = []
        self._pictures: list[Any] = []
        self._strong: list[StrongWeights] = []
        self._peaks: list[Any] = []
        self._side = 0  # queries and keys a block of the peaks, once there are any
        self._asked: Answers | None = None
        self._live = WeakSet[Answers]()
        self._reading, self._telling = threading.RLock(), threading.Lock()

    @property
    def title(self) -> str:
        """The model and how the text begins, to choose a view by."""
        return title_of(self.name, self.tokens)

    @property
    def tokens(self) -> list[str]:
        """The pieces of the text; of the source, of an encoder-decoder model."""
        return self.texts[0].pieces

    @property
    def nbytes(self) -> int:
        """Bytes held: q, k, v and one log-sum-exp per row."""
        return sum(attn.nbytes for attn in self.maps)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the attention matrices, were they stored."""
        return sum(attn.dense_nbytes for attn in self.maps)

    def heads(self) -> HeadTable:
        """Every head with its role and scores. One pass over all maps, the first time."""
        self._look_through()
        pairs = zip(self.layers, self._scores, strict=True)
        return HeadTable([head for layer, scores in pairs for head in scores.heads(layer)])

    def save_recording(self, folder: str | os.PathLike[str]) -> Path:
        """Write the recording to a new folder: text, maps and heads, to be opened later and without the model.

        The folder appears whole or not at all. Raises RecordingError, OSError.
        Cost: what the maps hold, on the disk.
        """
        self._look_through()
        target = Path(folder).expanduser()
        texts = [vars(text) | {"picture": text.picture and vars(text.picture)} for text in self.texts]
        facts = {"name": self.name, "texts": texts, "layers": self.layers, "sides": self.sides, "side": self._side}
        save_folder(target, facts, [self._saved(n) for n in range(len(self.maps))])
        return target

    def _saved(self, n: int) -> dict[str, Any]:
        known = {"scores": self._scores[n], "strong": self._strong[n]}
        pictures = {"thumbnails": self._pictures[n], "peaks": self._peaks[n]}
        return {"map": self.maps[n], **{name: vars(one) for name, one in known.items()}, **pictures}

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, check: bool | None = None) -> View:
        """The view that `save_recording` has written. Its maps are read from the disk when they are asked for.

        Args: check: whether all numbers are compared with checksums first, which takes 0.3 s a gigabyte and reading it;
            by default up to 1 GB is.
        Raises RecordingError where the folder is not there, cut short, damaged, or of another version.
        """
        place = Path(folder).expanduser()
        facts, layers = load_folder(place, check=check)
        with fitting(place):
            view = cls._of(facts, layers)
        return view

    @classmethod
    def _of(cls, facts: dict[str, Any], layers: list[dict[str, Any]]) -> View:
        maps = [layer["map"] for layer in layers]
        if len(maps) != len(facts["layers"]) or not all(isinstance(attn, AttentionMap) for attn in maps):
            raise ValueError(f"{len(facts['layers'])} layers, {len(maps)} maps")
        view = cls(maps, facts["layers"], list(map(_text, facts["texts"])), facts["name"], sides=facts["sides"])
        view._scores = [LayerScores(**layer["scores"]) for layer in layers]
        view._strong = [StrongWeights(**layer["strong"]) for layer in layers]
        view._pictures = [layer["thumbnails"] for layer in layers]
        view._peaks, view._side = [layer["peaks"] for layer in layers], facts["side"]
        return view

    def answers(self) -> Answers:
        """What a live page asks for. Layers that are not read yet follow as `heads()` reads them."""
        numbers = range(len(self.maps))
        with self._telling:  # a layer that is read meanwhile is told of, or in it
            live = [self._live_layer(n) for n in numbers]
            heads = [head for n in numbers for head in self._heads_of(n)]
            notes = ["Every weight is exact, computed when it is asked for."]
            told = {"threshold": THRESHOLD, "massHeld": 1.0, "notes": notes, "exact": len(heads)}
            facts = page_facts([layer.data for layer in live], self.texts, heads, **self._about())
            of_all = partial(_influence, self.maps) if self._flows else None
            answers = Answers(facts | told | {"influence": self._flows}, live, of_all)
            self._live.add(answers)
        return answers

    def _about(self) -> dict[str, Any]:
        return {"name": self.name, "nbytes": self.nbytes, "dense_nbytes": self.dense_nbytes}

    def _live_layer(self, n: int) -> LiveLayer:
        peaks, side = (self._peaks[n], self._side) if n < len(self._scores) else (None, 1)
        return LiveLayer(self._layer_data(n), self.maps[n][0], peaks, side)

    def _heads_of(self, n: int) -> list[Head]:
        """The heads of a layer; before it is read, nothing is known of them."""
        if n < len(self._scores):
            return self._scores[n].heads(self.layers[n])
        return [Head(self.layers[n], h, "", {}, {}, math.nan, math.nan) for h in range(self.maps[n].shape[1])]

    def page(self, *, budget: int | None = None) -> Payload:
        """The page's data, encoded to fit `budget` bytes (2, 10 or 25 MB up to 128, 512 or more tokens)."""
        heads = self.heads()
        layers = [self._layer_data(n) for n in range(len(self.maps))]
        of_all = _influence(self.maps) if self._flows and len(self.tokens) <= INFLUENCE else None
        return build(layers, self.texts, heads, budget=budget, influence=of_all, **self._about())

    @property
    def _flows(self) -> bool:
        """Whether tokens have an influence on the last one through all layers: those of one text, and no patches."""
        return len(self.texts) == 1 and self.texts[0].picture is None

    def save(self, path: str | os.PathLike[str], *, budget: int | None = None) -> Path:
        """Write the page as one HTML file that needs no network; the file appears whole or not at all."""
        target = Path(path).expanduser()
        write_whole(target, render(self.page(budget=budget)))
        return target

    def widget(self) -> Widget:
        """The page as a widget: for layouts of widgets, and for notebooks in which only widgets reach the kernel.

        JupyterLab and Notebook need it not: there the view itself is live. Raises ImportError without anywidget.
        """
        from clearhead.page.widget import Widget

        page = render(self.page())
        return Widget(self._own_answers(), title=self.name, page=page)

    def _repr_html_(self) -> str:
        page = render(self.page())
        return cell(page, self.name, self._own_answers(), [repr(self), "", *self._summary()])

    def _own_answers(self) -> Answers:
        """What pages in a notebook ask: they are live as long as the view is there, and do not keep it."""
        self._asked = self._asked or self.answers()
        return self._asked

    def _summary(self) -> list[str]:
        """A line for each role that there is."""
        heads = self.heads()
        best = {role: ", ".join(head.summary for head in heads.strongest(role, 3)) for role in heads.counts()}
        return [f"{n:5} {role:9}  {best[role]}" for role, n in heads.counts().items() if n]

    def __repr__(self) -> str:
        heads = _head_count(self.maps)
        tokens = " + ".join(str(len(text)) for text in self.texts)
        return f"View({self.name}: {tokens} tokens, {len(self.maps)} layers, {heads} heads)"

    def _look_through(self) -> None:
        """One pass over each map that has not been looked through: scores, thumbnail and strong weights together."""
        total = len(self.maps)
        with self._reading:
            if not self._scores:
                self._report("heads", 0, total)
            for n in range(len(self._scores), total):
                try:
                    scores = self._read(n)
                except Exception as error:
                    with self._telling:
                        for answers in self._live:
                            answers.fail(str(error) or repr(error))
                    raise
                with self._telling:
                    self._scores.append(scores)  # last: whoever finds its scores finds all of a layer
                    for answers in self._live:
                        answers.learn(self._live_layer(n), self._heads_of(n))
                self._report("heads", n + 1, total)

    def _read(self, n: int) -> LayerScores:
        heads = self.maps[n][0]
        H, T, S = heads.shape
        self._side = self._side or peaks_side(T, S, _head_count(self.maps), max(PEAKS, self.nbytes // 4))
        picture = reduce.Pool((H,), T, S, (min(T, THUMB), min(S, THUMB)), heads.like, maximum=False)
        strong = Strong(limit=STRONG_WEIGHTS // len(self.maps))
        peaks = reduce.Blocks((H,), T, S, self._side, heads.like)
        more: tuple[Reducer, ...] = (picture, strong, peaks)
        scores = self._score(n, heads, *more)
        self._check_finite(scores)
        self._pictures[n:] = [thumbnails(_mean_over_queries(picture.result, T))]  # whatever a run before left there
        self._strong[n:], self._peaks[n:] = [strong.result()], [encoded(peaks.result)]
        return scores

    def _score(self, n: int, heads: AttentionMap, *more: Reducer) -> LayerScores:
        """The scores that make sense between these queries and keys."""
        if self.sides[n] == "cross":
            return score_cross(heads, *more)
        which = ENDS[self.sides[n]][1]
        if which not in self._scorers:
            text = self.texts[which]
            place = text.picture
            near = near_patches(place.first, place.rows, place.columns, len(text)) if place else None
            self._scorers[which] = Scorer(text.ids, pieces=text.pieces, near=near)
        return self._scorers[which](heads, *more)

    def _check_finite(self, scores: LayerScores) -> None:
        bad = [head.label for head in scores.heads(self.layers[len(self._scores)]) if not math.isfinite(head.entropy)]
        if bad:
            raise ModelError(
                f"the attention of {bad[0]} and {len(bad) - 1} more heads of its layer is not finite: weights or inputs"
                " of the model hold NaN or infinity, or its scores overflow. Find where with torch.isfinite."
            )

    def _layer_data(self, n: int) -> LayerData:
        attn = self.maps[n]
        exact: dict[str, Any] = {"groups": _kv_heads(attn), "side": self.sides[n]}
        if isinstance(attn, SoftmaxMap) and is_plain(attn):
            one = attn[0]
            exact |= {"q": one.q, "k": one.k, "v": one.v, "scale": attn.scale}
            exact["lse"] = one.lse if n < len(self._scores) else _LseOfHeads(one)
            exact["terms"] = lambda *at: self._terms_of(n, attn).pack(*at)
        if n >= len(self._scores):
            return LayerData(self.layers[n], *_nothing_read(attn), _is_causal(attn), [0], **exact)
        strong, sinks = self._strong[n], self._scores[n].sinks
        return LayerData(self.layers[n], self._pictures[n], strong, _is_causal(attn), sinks, **exact)

    def _terms_of(self, n: int, attn: SoftmaxMap) -> Terms:
        """The products behind the heads of a layer, searched for when they are asked for."""
        if n not in self._terms:
            known = self._finders[n](attn) if self._finders else Projection(why="the layer itself is not at hand")
            self._terms[n] = Terms(attn, known)
        return self._terms[n]


def _text(held: dict[str, Any]) -> Tokens:
    picture = held["picture"]
    return Tokens(**held | {"picture": picture and Picture(**picture)})


@torch.no_grad()
def _influence(maps: list[AttentionMap]) -> Tensor:
    """Of each token on the last one (T,), through all these layers."""
    influence: Tensor = rollout(maps)[0, -1]
    return influence


def _mean_over_queries(mass: Tensor, T: int) -> Tensor:
    """Pooled sums (H, R, C) as means over the queries of each row of pixels."""
    rows = torch.bincount(torch.arange(T) * mass.shape[-2] // T, minlength=mass.shape[-2])
    return mass / rows.to(mass)[:, None]


def _is_causal(attn: AttentionMap) -> bool:
    """Whether no query gives weight to a later key: the rule tells beside the diagonal, the weights along it."""
    if attn.shape[-2] != attn.shape[-1]:
        return False  # of another text
    if isinstance(attn, SoftmaxMap) and attn.mask == causal():
        return True
    T = attn.shape[-1]
    near = [slice(t, min(t + 128, T)) for t in range(0, T, 128)]  # 128: the blocks of a BlockMask
    beside = all(attn.block(rows, slice(rows.stop, T)) is Coverage.EMPTY for rows in near)
    return beside and not any(attn.tile(rows, rows).triu(1).any() for rows in near)


class _LseOfHeads:
    """lse of a map (H, T, S) that was not read yet, a head at a time: of all heads it takes as long as reading."""

    def __init__(self, attn: SoftmaxMap) -> None:
        self._attn = attn

    def __getitem__(self, h: int) -> Tensor:
        lse: Tensor = self._attn[h].lse
        return lse


def _nothing_read(attn: AttentionMap) -> tuple[Any, StrongWeights]:
    """The thumbnails and the strong weights of a layer that was not read yet: none."""
    _, H, T, S = attn.shape
    nothing = np.zeros(0, np.uint8)
    strong = StrongWeights(np.zeros((H, T), np.int32), nothing, nothing, level_of(THRESHOLD), THRESHOLD)
    return np.zeros((H, min(T, THUMB), min(S, THUMB)), np.uint8), strong


def _head_count(maps: list[AttentionMap]) -> int:
    return sum(attn.shape[1] for attn in maps)


def is_plain(attn: SoftmaxMap) -> bool:
    """Whether each weight is exp(scale·q·k - lse) under a plain causal or full mask, as the page computes it."""
    hides = attn.mask is not None and not (attn.shape[-2] == attn.shape[-1] and attn.mask == causal())
    return not hides and attn.bias is None and attn.softcap is None and attn.sinks is None


def _kv_heads(attn: AttentionMap) -> int:
    return attn.k.shape[1] if isinstance(attn, SoftmaxMap) else attn.shape[1]
