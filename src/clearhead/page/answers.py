"""What a live page asks for, part by part: the parts that a file holds, and those for which a file has no room.

    answers.part("tile.17.5", {"rows": "0-4096", "keys": "0-4096", "side": "16", "of": "max"})   # bytes

Nothing here knows of the web: a server and a notebook hand on the same names. Numbers are little-endian float32.

    n.…                    the part … of the n-th of the pages that stand beside this one
    facts, thumbs, influence, w.L.H, q.L.H, kv.L.G, p.L.H   as in a file, see `payload`
    heads                  JSON: what has become known since `have` layers were
    tile.L.H               a picture of the queries `rows` on the `keys`: the `max` or the `sum` of side × side weights
    row.L.H, column.L.H    the weights of a `query`, or on a `key`
    p.L.H                  as in a file; with a `query` and a `key`, of these alone
    derive.L.H             JSON: all that stands between the vectors of a `query` and a `key`, and their weight
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead._format import finite
from clearhead.errors import ShapeError
from clearhead.maps.base import AttentionMap
from clearhead.maps.pictures import block_picture
from clearhead.maps.softmax import SoftmaxMap
from clearhead.page.encode import float_planes
from clearhead.page.payload import HeadLike, LayerData, head_facts, head_rows, layer_facts, title_of
from clearhead.page.peaks import picture_of

__all__ = ["Answers", "LiveLayer", "UnknownPart"]

PIXELS = 512 * 512  # that one picture may have
WEIGHTS = 1 << 26  # that one picture may look at: 0.1 s on one core, and all of 8,192 tokens
CACHE = 64_000_000  # bytes of answers that are kept
SMALLEST = 10_000  # bytes that an answer counts at least: its question is kept too

Query: TypeAlias = Mapping[str, str]


class UnknownPart(LookupError):
    """There is no part of this name."""


@dataclass(frozen=True)
class LiveLayer:
    """What is told of one layer.

    data: what a file would hold; thumbnails and strong weights are empty until it was read. attn: its map (H, T, S).
    peaks: (H, ⌈T/side⌉, ⌈S/side⌉) uint8, see `peaks.encoded`; None until it was read.
    """

    data: LayerData
    attn: AttentionMap
    peaks: NDArray[np.uint8] | None = None
    side: int = 1


class Answers:
    """The parts of one view; several threads may ask.

    Args:
        facts: what the page knows at once, see `page_facts`.
        layers: one a layer, read or not read yet.
        influence: gives that of each token on the last one, through all layers; None where that means nothing.

    Cost: nothing before it is asked for; up to `CACHE` bytes of answers are kept.
    """

    def __init__(
        self, facts: Mapping[str, Any], layers: Sequence[LiveLayer], influence: Callable[[], Tensor] | None = None
    ) -> None:
        self._influence = influence
        self._facts, self._layers = facts, {layer.data.layer: layer for layer in layers}
        self._unread = sum(layer.peaks is None for layer in layers)
        self._news: list[dict[str, Any]] = []
        self._failed: str | None = None
        self._beside: tuple[Sequence[Answers], int] = (), 0
        self._labels: Sequence[str | int] | None = None
        self._kept = _Kept(CACHE)

    def learn(self, layer: LiveLayer, heads: Sequence[HeadLike]) -> None:
        """A layer has been read: its heads have roles now, its map thumbnails and peaks."""
        self._layers[layer.data.layer] = layer
        scores = list(heads[0].scores)
        self._news.append(
            {
                "layer": layer_facts(layer.data),
                "scores": scores,
                "heads": [head_facts(head, scores) for head in heads],
                "thumbs": base64.b64encode(layer.data.thumbs.tobytes()).decode("ascii"),
            }
        )

    def fail(self, sentence: str) -> None:
        """The layers that are left cannot be read; the page says why."""
        self._failed = sentence

    @property
    def title(self) -> str:
        """The model and how the text begins, to choose a page by."""
        return title_of(self._facts["name"], self._facts["texts"][0]["tokens"])

    def stand_beside(self, pages: Sequence[Answers], n: int, labels: Sequence[str | int] | None = None) -> None:
        """It is the n-th of these pages, which lead to one another; by default they are called by their titles."""
        self._beside, self._labels = (pages, n), labels

    def part(self, name: str, query: Query | None = None) -> bytes:
        """The bytes of a part. Raises UnknownPart; ShapeError for a query that asks for what is not there, or too much.

        >>> Answers({"format": 1}, []).part("facts")
        b'{"format": 1, "live": true, "reading": 0}'
        """
        page = re.match(r"(\d{1,4})\.", name, re.ASCII)
        if page is not None and int(page[1]) < len(self._beside[0]):
            return self._beside[0][int(page[1])]._part(name[page.end() :], {} if query is None else query)
        return self._part(name, {} if query is None else query)

    def _part(self, name: str, given: Query) -> bytes:
        kind, *numbers = name.split(".")
        if not numbers and kind in _WHOLE:
            return _WHOLE[kind](self, given)
        if kind not in _OF_HEAD or len(numbers) != 2 or not all(re.fullmatch(r"\d{1,5}", n) for n in numbers):
            raise UnknownPart(f"there is no part {name[:40]!r}")
        layer, h = self._layers.get(int(numbers[0])), int(numbers[1])
        if layer is None or h >= (layer.data.k.shape[-3] if kind == "kv" and layer.data.exact else layer.attn.shape[0]):
            raise UnknownPart(f"there is no head {'.'.join(numbers)}")
        key = (name, layer.peaks is None, *sorted(given.items()))
        return self._kept.get(key, lambda: _OF_HEAD[kind](layer, h, given))

    def _tell_facts(self, query: Query) -> bytes:
        pages, n = self._beside
        labels = self._labels if self._labels is not None else [page.title for page in pages]
        beside = {"pages": list(labels), "page": n} if len(pages) > 1 else {}
        return _json({**self._facts, "live": True, "reading": self._unread, **beside})

    def _tell_thumbs(self, query: Query) -> bytes:
        return b"".join(layer.data.thumbs.tobytes() for layer in self._layers.values())

    def _tell_influence(self, query: Query) -> bytes:
        of_all = self._influence
        if of_all is None:
            raise UnknownPart("tokens have an influence on the last one where one text is read")
        return self._kept.get("influence", lambda: _bytes(of_all()))

    def _tell_heads(self, query: Query) -> bytes:
        have = _number(query, "have", len(self._layers) + 1)
        news = self._news[have:]
        return _json({"reading": self._unread - have - len(news), "news": news, "failed": self._failed})


class _Kept:
    """The latest answers, as many as fit into `room` bytes."""

    def __init__(self, room: int) -> None:
        self._room, self._held, self._lock = room, 0, threading.Lock()
        self._answers: OrderedDict[Any, bytes] = OrderedDict()

    def get(self, key: Any, make: Callable[[], bytes]) -> bytes:
        """The answer, made where it is not kept. Answers are made outside of the lock, by several threads at once."""
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        made = make()
        with self._lock:
            if key not in self._answers and len(made) <= self._room // 8:
                self._answers[key] = made
                self._held += max(SMALLEST, len(made))
            while self._held > self._room:
                self._held -= max(SMALLEST, len(self._answers.popitem(last=False)[1]))
        return made


# --- the parts of a head ------------------------------------------------------------------------------------------


def _strong(layer: LiveLayer, h: int, query: Query) -> bytes:
    return head_rows(layer.data, h, layer.attn.shape[-2:], layer.data.strong.level)


def _query_vectors(layer: LiveLayer, h: int, query: Query) -> bytes:
    data = _exact(layer)
    return float_planes(_floats(data.q[h]), _floats(data.lse[h]))


def _key_vectors(layer: LiveLayer, group: int, query: Query) -> bytes:
    data = _exact(layer)
    return float_planes(_floats(data.k[group]), _floats(data.v[group]))


def _terms(layer: LiveLayer, h: int, query: Query) -> bytes:
    data = _exact(layer)
    if data.terms is None:
        raise UnknownPart(f"the matrices of layer {data.layer} are not at hand")
    if "query" not in query:
        return data.terms(h)
    T, S = layer.attn.shape[-2:]
    return data.terms(h, torch.tensor([_number(query, "query", T)]), torch.tensor([_number(query, "key", S)]))


def _exact(layer: LiveLayer) -> LayerData:
    if not layer.data.exact:
        raise UnknownPart(f"the weights of layer {layer.data.layer} do not follow from q and k alone")
    return layer.data


def _tile(layer: LiveLayer, h: int, query: Query) -> bytes:
    """From the peaks where they are fine enough, else from the map."""
    T, S = layer.attn.shape[-2:]
    rows, keys = _range(query, "rows", T), _range(query, "keys", S)
    side, of = _number(query, "side", 1 << 20), query.get("of", "max")
    if side < 1 or of not in ("max", "sum"):
        raise ShapeError(f"a picture with side={side}, of={of[:9]!r}: expected a side from 1 on, of max or sum")
    height, width = (part.stop - part.start for part in (rows, keys))
    pixels = -(-height // side) * -(-width // side)
    if pixels > PIXELS:
        raise ShapeError(f"a picture of {pixels:,} pixels: at most {PIXELS:,} at a time")
    if layer.peaks is not None and of == "max" and _on_peaks(layer, rows, keys, side):
        down, across = (slice(part.start // layer.side, -(-part.stop // layer.side)) for part in (rows, keys))
        return _bytes(picture_of(layer.peaks[h], down, across, side // layer.side))
    if height * width > WEIGHTS:
        raise ShapeError(f"a picture of {height * width:,} weights: at most {WEIGHTS:,} at a time, ask for less")
    return _bytes(block_picture(layer.attn[h], rows, keys, side, maximum=of == "max"))


def _on_peaks(layer: LiveLayer, rows: slice, keys: slice, side: int) -> bool:
    """Whether every pixel is made of whole blocks of peaks."""
    T, S = layer.attn.shape[-2:]
    edges = [side, rows.start, keys.start, rows.stop % T, keys.stop % S]  # the last block may be smaller
    return not any(n % layer.side for n in edges)


def _row(layer: LiveLayer, h: int, query: Query) -> bytes:
    return _bytes(layer.attn[h, _number(query, "query", layer.attn.shape[-2])])


def _column(layer: LiveLayer, h: int, query: Query) -> bytes:
    return _bytes(layer.attn[h, :, _number(query, "key", layer.attn.shape[-1])])


@torch.no_grad()
def _derive(layer: LiveLayer, h: int, query: Query) -> bytes:
    attn = layer.attn[h]
    t, s = (_number(query, name, n) for name, n in zip(("query", "key"), attn.shape, strict=True))
    weight = attn.pick(t, s)
    told: dict[str, Any] = {"query": t, "key": s, "weight": finite(float(weight))}
    if isinstance(attn, SoftmaxMap):
        told |= _steps(attn, t, s)
    return _json(told)


def _steps(attn: SoftmaxMap, t: int, s: int) -> dict[str, Any]:
    """The numbers of one weight of a map (T, S), from the vectors on; None for what is not finite."""
    q, k = attn.q[t].to(attn.dtype), attn.k[s].to(attn.dtype)
    dot, lse = float(q @ k), float(attn[t : t + 1].lse)
    score = float(attn._scores(slice(t, t + 1), torch.tensor([s], device=attn.device)))
    capped = attn.scale * dot if attn.softcap is None else attn.softcap * np.tanh(attn.scale * dot / attn.softcap)
    steps = {"dot": dot, "scale": attn.scale, "capped": float(capped), "score": score, "lse": lse}
    vectors = {"q": q, "k": k}
    if attn.v is not None:
        v = attn.v.to(attn.dtype)
        vectors |= {"v": v[s], "z": attn[t] @ v}
    return {name: finite(x) for name, x in steps.items()} | {name: x.tolist() for name, x in vectors.items()}


_WHOLE: dict[str, Callable[[Answers, Query], bytes]] = {
    "facts": Answers._tell_facts,
    "heads": Answers._tell_heads,
    "influence": Answers._tell_influence,
    "thumbs": Answers._tell_thumbs,
}
_OF_HEAD: dict[str, Callable[[LiveLayer, int, Query], bytes]] = {
    "column": _column,
    "derive": _derive,
    "kv": _key_vectors,
    "p": _terms,
    "q": _query_vectors,
    "row": _row,
    "tile": _tile,
    "w": _strong,
}


# --- reading a query, writing an answer ---------------------------------------------------------------------------


def _number(query: Query, name: str, end: int) -> int:
    text = query.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text) or int(text) >= end:
        raise ShapeError(f"{name}={text[:20]!r}: expected a whole number below {end}")
    return int(text)


def _range(query: Query, name: str, end: int) -> slice:
    text = query.get(name, "")
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    if found is None or not int(found[1]) < int(found[2]) <= end:
        raise ShapeError(f"{name}={text[:20]!r}: expected two numbers, first-end, within 0-{end}")
    return slice(int(found[1]), int(found[2]))


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode("ascii")


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().numpy()


def _bytes(values: Tensor | NDArray[np.float32]) -> bytes:
    array = _floats(values) if isinstance(values, Tensor) else values
    return np.ascontiguousarray(array, np.dtype("<f4")).tobytes()
