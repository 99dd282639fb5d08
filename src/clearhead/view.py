"""`look`: run a model on a text, keep the attention of every layer, and show it.

view = clearhead.look(model, tokenizer, "The cat sat on the mat.")
view.heads().strongest("induction")     # what the heads do, beside the uniform baseline
view.maps[17][0, 5, -1]                 # any weight, computed from q, k and one log-sum-exp per row
view.save("cat.html")                   # one file, no network
"""

from __future__ import annotations

import inspect
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from clearhead._checks import describe
from clearhead._files import write_whole
from clearhead._progress import Progress, silent
from clearhead.errors import ModelError, ShapeError
from clearhead.heads.roles import ROLES, Head, HeadTable, LayerScores, score_layer
from clearhead.kernels.tiles import Reducer
from clearhead.maps import reductions as reduce
from clearhead.maps.base import AttentionMap
from clearhead.maps.composed import OneSequence
from clearhead.maps.softmax import SoftmaxMap
from clearhead.masks import Coverage, causal
from clearhead.page.answers import Answers, LiveLayer
from clearhead.page.html import render
from clearhead.page.notebook import cell
from clearhead.page.payload import LayerData, Payload, build, page_facts, thumbnails
from clearhead.page.peaks import Peaks, peaks_side
from clearhead.page.strong import THRESHOLD, Strong, StrongWeights, level_of
from clearhead.page.terms import Terms
from clearhead.projections import Projection, Watch, find, is_sequence, rows_of
from clearhead.recording import record
from clearhead.saving import load_folder, save_folder
from clearhead.tokens import encode
from clearhead.zoo import context_length

if TYPE_CHECKING:
    from clearhead.page.widget import Widget

__all__ = ["View", "look"]

THUMB = 24  # pixels a side
Find: TypeAlias = Callable[[SoftmaxMap], Projection]
STRONG_WEIGHTS = 20_000_000  # that all layers together may keep for the page: 25 MB hold about 17 million
PEAKS = 64_000_000  # bytes that the peaks of all maps may take, or a quarter of what the maps do


@overload
def look(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    layers: Iterable[int] | None = None,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> View: ...
@overload
def look(
    model: nn.Module,
    x: Tensor,
    /,
    *,
    tokens: Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> View: ...
def look(
    model: nn.Module,
    tokenizer: Any,
    text: str | None = None,
    *,
    tokens: Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    name: str | None = None,
    on_progress: Progress | None = None,
) -> View:
    """Look at the attention of a model on a text, or of a layer of your own on its input.

    Args:
        model: a Hugging Face model with its `tokenizer` and a `text`; or a module with its input `x` (T, d) or
            (1, T, d) and, if you like, the `tokens` that the T rows stand for. Such a module is called with `x` alone
            (record others yourself); it computes softmax(q @ k.T) @ v or calls PyTorch's attention function. Or it has
            a method `attend(x)` that returns (output, map), as every layer of `clearhead.nn` does: the map may be
            (T, T), (H, T, T) or (1, H, T, T).
        layers: the layers to keep, by number; all by default.
        name: what the page calls the model.
        on_progress: called as (stage, done, total), with stages "model" and "heads".

    The model runs once, as it is (its own kernels, no gradients, evaluation mode if it is in it); its output is thrown
    away. Raises ModelError, RecordingError, ShapeError.
    Cost: one forward pass; memory: q, k, v of the kept layers, never a T×S matrix.
    """
    report = on_progress or silent
    if not isinstance(model, nn.Module):
        raise ModelError(f"look(model, …): expected a PyTorch module first, got {describe(model)}; see zoo.load.")
    if isinstance(tokenizer, Tensor) and text is None:
        tokens = _spaced(tokenizer, tokens)
        if hasattr(model, "attend"):
            attn, finder = _attended(model, model.attend, tokenizer)
            return View([attn], [0], tokens, _same_word_ids(tokens), name or _name(model), report, [finder])
        args, kwargs, ids = [tokenizer], dict[str, Tensor](), _same_word_ids(tokens)
    else:
        _check_call(tokenizer, text, tokens)
        _check_kind(model, name or _name(model))
        kwargs, tokens = encode(tokenizer, text)
        _check_length(model, len(tokens), name or _name(model))
        args, ids = [], kwargs["input_ids"][0]
        _check_ids(model, ids, name or _name(model))
    report("model", 0, 1)
    with record(model, layers=layers) as recording, Watch(model, len(tokens)) as watch, torch.no_grad():
        there = next(model.parameters(), [*args, *kwargs.values()][0]).device
        moved = {name: tensor.to(there) for name, tensor in kwargs.items()}
        model(*(tensor.to(there) for tensor in args), **moved, **_frugal(model))
    report("model", 1, 1)
    maps = [_one_sequence(attn, len(tokens)) for attn in recording]
    watch.keep_only(recording.paths)
    finders = [partial(find, model=model, watch=watch, path=path) for path in recording.paths]
    return View(maps, list(recording.layers), list(tokens), ids.cpu(), name or _name(model), report, finders)


class View:
    """The attention of one model on one text: maps, heads, and the page.

    Attributes: maps (one a layer, (1, H, T, T)), layers (their numbers), tokens (pieces of the text), name.

    A view keeps the model, and up to 150 MB of its layers' inputs: the page shows how q comes of them.
    In a notebook it shows itself: live as long as kernel and view are there, then as the file that was saved.
    """

    def __init__(
        self,
        maps: list[AttentionMap],
        layers: list[int],
        tokens: list[str],
        ids: Tensor,
        name: str,
        on_progress: Progress = silent,
        finders: Sequence[Find] = (),
    ) -> None:
        self.maps, self.layers, self.tokens, self.name = maps, layers, tokens, name
        self._ids, self._report = ids, on_progress
        self._finders, self._terms = finders, dict[int, Terms]()
        self._scores: list[LayerScores] = []
        self._pictures: list[Any] = []
        self._strong: list[StrongWeights] = []
        self._peaks: list[Any] = []
        self._side = 0  # queries and keys a block of the peaks, once there are any
        self._asked: Answers | None = None
        self._live = WeakSet[Answers]()
        self._reading, self._telling = threading.RLock(), threading.Lock()

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
        facts = {"name": self.name, "tokens": self.tokens, "ids": self._ids, "layers": self.layers, "side": self._side}
        save_folder(target, facts, [self._saved(n) for n in range(len(self.maps))])
        return target

    def _saved(self, n: int) -> dict[str, Any]:
        known = {"scores": self._scores[n], "strong": self._strong[n]}
        pictures = {"thumbnails": self._pictures[n], "peaks": self._peaks[n]}
        return {"map": self.maps[n], **{name: vars(one) for name, one in known.items()}, **pictures}

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> View:
        """The view that `save_recording` has written. Its maps are read from the disk when they are asked for.

        Raises RecordingError where the folder is not there, cut short, damaged, or of another version.
        """
        facts, layers = load_folder(Path(folder).expanduser())
        maps = [layer["map"] for layer in layers]
        view = cls(maps, facts["layers"], facts["tokens"], facts["ids"], facts["name"])
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
            facts = page_facts([layer.data for layer in live], self.tokens, heads, **self._about())
            answers = Answers(facts | told, live)
            self._live.add(answers)
        return answers

    def _about(self) -> dict[str, Any]:
        sizes = {"nbytes": self.nbytes, "dense_nbytes": self.dense_nbytes}
        return {"name": self.name, "kv_heads": _kv_heads(self.maps[0]), **sizes}

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
        return build(layers, self.tokens, heads, budget=budget, **self._about())

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
        best = {role: ", ".join(head.summary for head in heads.strongest(role, 3)) for role in ROLES}
        return [f"{n:5} {role:9}  {best[role]}" for role, n in heads.counts().items() if n]

    def __repr__(self) -> str:
        heads = _head_count(self.maps)
        return f"View({self.name}: {len(self.tokens)} tokens, {len(self.maps)} layers, {heads} heads)"

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
        peaks = Peaks(H, T, S, self._side)
        more: tuple[Reducer, ...] = (picture, strong, peaks)
        scores = score_layer(heads, self._ids.to(heads.device), *more)
        self._check_finite(scores)
        self._pictures[n:] = [thumbnails(_mean_over_queries(picture.result, T))]  # whatever a run before left there
        self._strong[n:], self._peaks[n:] = [strong.result()], [peaks.result()]
        return scores

    def _check_finite(self, scores: LayerScores) -> None:
        bad = [head.label for head in scores.heads(self.layers[len(self._scores)]) if not math.isfinite(head.entropy)]
        if bad:
            raise ModelError(
                f"the attention of {bad[0]} and {len(bad) - 1} more heads of its layer is not finite: weights or inputs"
                " of the model hold NaN or infinity, or its scores overflow. Find where with torch.isfinite."
            )

    def _layer_data(self, n: int) -> LayerData:
        attn, exact = self.maps[n], {}
        if isinstance(attn, SoftmaxMap) and _is_plain(attn):
            one = attn[0]
            exact = {"q": one.q, "k": one.k, "v": one.v, "scale": attn.scale}
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


def _check_call(tokenizer: object, text: object, tokens: object) -> None:
    if text is None:
        raise ModelError(
            f"look(model, {describe(tokenizer)}): the text is missing: look(model, tokenizer, text). The input of a"
            " layer of your own is one tensor, look(layer, x)."
        )
    if tokens is not None:
        raise ModelError("look(model, tokenizer, text, tokens=…): a tokenizer makes the tokens; leave tokens out.")


def _check_ids(model: nn.Module, ids: Tensor, name: str) -> None:
    table = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(table, "num_embeddings", None)
    if size is not None and int(ids.max()) >= size:
        raise ModelError(f"token {int(ids.max())} is beyond the {size} that {name} knows: is this its own tokenizer?")
    if next(model.parameters(), ids).is_meta:
        raise ModelError(f"{name} has no weights: it is on PyTorch's meta device. Load it onto a real one.")


def _spaced(x: Tensor, tokens: Sequence[str] | None) -> list[str]:
    """The words that the rows of x stand for, their numbers where none are given, as a text would have them."""
    if x.ndim not in (2, 3) or (x.ndim == 3 and x.shape[0] != 1) or x.shape[-2] == 0:
        raise ShapeError(f"look(layer, x): expected one sequence, x (T, d) or (1, T, d), got {describe(x)}.")
    tokens = [str(n) for n in range(x.shape[-2])] if tokens is None else [str(token) for token in tokens]
    if len(tokens) != x.shape[-2]:
        raise ShapeError(f"look(layer, x, tokens=…): x has {x.shape[-2]} rows, but there are {len(tokens)} tokens.")
    return [token if n == 0 or token[:1].isspace() else f" {token}" for n, token in enumerate(tokens)]


def _attended(layer: nn.Module, attend: Any, x: Tensor) -> tuple[AttentionMap, Find]:
    """The map of a layer that hands it out itself, as (1, H, T, T), and how to find its matrices."""
    call = f"look({type(layer).__name__}, x): attend(x)"
    with Watch(layer, x.shape[-2]) as watch, torch.no_grad():
        result = attend(x.to(next(layer.parameters(), x).device))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], AttentionMap)):
        raise ModelError(
            f"{call} returned {describe(result)}: expected (output, map), the map for example"
            " clearhead.SoftmaxMap(q, k, v=v, mask=…) of your queries and keys, or clearhead.DenseMap(weights)."
        )
    attn = _as_heads(result[1])
    if attn.shape[0] != 1 or attn.shape[-2:] != (x.shape[-2], x.shape[-2]):
        raise ModelError(f"{call} returned {result[1]!r}: expected the weights of {x.shape[-2]} queries and keys.")
    given, out = x.detach().reshape(x.shape[-2:]), result[0]
    returned = rows_of(out.reshape(out.shape[-2:])) if is_sequence(out, len(given)) else None
    return attn, partial(find, model=layer, watch=watch, path="", x=given, out=returned)


def _as_heads(attn: AttentionMap) -> AttentionMap:
    """(T, S) and (H, T, S), the map of one sequence, as (1, H, T, S)."""
    if len(attn.shape) == 4:
        return attn
    if not (isinstance(attn, SoftmaxMap) and _is_plain(attn)):
        return OneSequence(attn)
    q, k, v = (None if t is None else t.reshape(1, -1, *t.shape[-2:]) for t in (attn.q, attn.k, attn.v))
    return SoftmaxMap(q, k, v=v, mask=attn.mask, scale=attn.scale)  # type: ignore[arg-type]  # the page derives it


def _same_word_ids(tokens: Sequence[str]) -> Tensor:
    """A number per word, equal for equal words: what relations between tokens need."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(token.strip(), len(numbers)) for token in tokens])


def _check_kind(model: nn.Module, name: str) -> None:
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:  # the config of its encoder says the same
        raise ModelError(
            f"{name} is an encoder-decoder model: it reads one text and writes another, which look does not show yet."
            " Look at its encoder, look(model.get_encoder(), tokenizer, text), or record a run with clearhead.record."
        )


def _check_length(model: nn.Module, tokens: int, name: str) -> None:
    limit = context_length(model)
    if limit is not None and tokens > limit:
        raise ModelError(f"the text has {tokens:,} tokens, and {name} reads at most {limit:,}. Shorten the text.")


def _frugal(model: nn.Module) -> dict[str, Any]:
    """Arguments that leave out what nobody looks at: the logits (1.4 GB at 8,192 tokens) and a KV cache."""
    accepted = inspect.signature(model.forward).parameters
    wanted = {"logits_to_keep": 1, "use_cache": False}
    return {name: value for name, value in wanted.items() if name in accepted}


def _one_sequence(attn: AttentionMap, tokens: int) -> AttentionMap:
    if len(attn.shape) != 4 or attn.shape[0] != 1 or attn.shape[-2:] != (tokens, tokens):
        raise ModelError(
            f"a call with {attn!r} is not the self-attention of the {tokens} tokens (other calls are recorded"
            " with clearhead.record, and not shown by look yet)."
        )
    return attn


def _mean_over_queries(mass: Tensor, T: int) -> Tensor:
    """Pooled sums (H, R, C) as means over the queries of each row of pixels."""
    rows = torch.bincount(torch.arange(T) * mass.shape[-2] // T, minlength=mass.shape[-2])
    return mass / rows.to(mass)[:, None]


def _is_causal(attn: AttentionMap) -> bool:
    """Whether no query gives weight to a later key: the rule tells beside the diagonal, the weights along it."""
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


def _is_plain(attn: SoftmaxMap) -> bool:
    """Whether each weight is exp(scale·q·k - lse) under a plain causal or full mask, as the page computes it."""
    return attn.mask in (None, causal()) and attn.bias is None and attn.softcap is None and attn.sinks is None


def _kv_heads(attn: AttentionMap) -> int:
    return attn.k.shape[1] if isinstance(attn, SoftmaxMap) else attn.shape[1]


def _name(model: nn.Module) -> str:
    path = getattr(getattr(model, "config", None), "name_or_path", "")
    return Path(path).name if path else type(model).__name__
