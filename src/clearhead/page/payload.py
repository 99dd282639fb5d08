"""What the page needs, encoded within a budget of bytes (the format is version `FORMAT`).

Always: the text, scores and thumbnail of every head, and every head's strong weights in 8 bits; the threshold
rises until that fits. Then q, k, v and lse in float32 of as many heads as the rest of the budget takes, the
strongest of each role first: for those the page computes the exact weights, α = exp(scale q·k - lse).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clearhead._format import finite, size
from clearhead.errors import ShapeError
from clearhead.page.encode import blob, float_blob, json_element, pack_rows
from clearhead.page.shell import DATA, shell
from clearhead.page.strong import THRESHOLD, StrongWeights, floor_of, level_of
from clearhead.page.texts import Tokens

__all__ = [
    "ENDS",
    "FORMAT",
    "BudgetError",
    "HeadLike",
    "LayerData",
    "Payload",
    "build",
    "default_budget",
    "head_facts",
    "head_rows",
    "layer_facts",
    "least_nbytes",
    "page_facts",
    "text_facts",
    "thumbnails",
    "title_of",
    "together",
]

FORMAT = 2
# Which of the texts are the queries of a side, and which the keys: an encoder-decoder model has source and target.
ENDS = {"": (0, 0), "encoder": (0, 0), "decoder": (1, 1), "cross": (1, 0)}
_OPENING = ("induction", "previous", "duplicate", "local", "self", "broad", "sink", "other")
_SLACK = 2_000  # bytes for the last digits of what is only known at the end: notes, threshold


class BudgetError(ValueError):
    """The budget cannot hold even the page, its text and its thumbnails."""


class HeadLike(Protocol):
    """A head, its role and its scores, as `View.heads()` lists them."""

    @property
    def layer(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def scores(self) -> Mapping[str, float | None]: ...
    @property
    def baselines(self) -> Mapping[str, float | None]: ...
    @property
    def entropy(self) -> float: ...  # nats
    @property
    def distance(self) -> float | None: ...  # tokens


@dataclass(frozen=True)
class LayerData:
    """What the page needs of one layer, batch 0.

    layer: its number. thumbs: (H, P, P) uint8, see `thumbnails`. strong: `Strong().result()`.
    causal: whether no query gives weight to a later key. sinks: keys that collect idle attention. groups: key heads.
    side: "encoder", "decoder" or "cross" of an encoder-decoder model: of its two texts, the first is the source, and
    the decoder's queries are the second.
    q (H, T, D), k (G, S, D), v (G, S, Dv), lse (H, T), scale: give them only where each weight is exactly
    exp(scale q·k - lse) over a plain causal or full mask; the page then shows the exact weight.
    terms: `Terms(...).pack`, which gives a head's part of x W_Q and z W_O, of all queries and keys or of some.
    """

    layer: int
    thumbs: NDArray[np.uint8]
    strong: StrongWeights
    causal: bool
    sinks: Sequence[int] = ()
    groups: int = 1
    side: str = ""
    q: Any = None
    k: Any = None
    v: Any = None
    lse: Any = None
    scale: float | None = None
    terms: Callable[..., bytes] | None = None

    @property
    def texts(self) -> tuple[int, int]:
        """Which of the page's texts are the queries, and which the keys."""
        return ENDS[self.side]

    @property
    def exact(self) -> bool:
        """Whether the page may compute this layer's weights itself."""
        return all(x is not None for x in (self.q, self.k, self.v, self.lse, self.scale))


@dataclass(frozen=True)
class Payload:
    """The page's data, encoded. `nbytes` is the size of the file that `render` will give.

    threshold: no weight below it is in the file. mass_held: the share of all attention that is.
    exact: the (layer, head) whose q, k, v are in the file. notes: what the page says about all this.
    """

    elements: tuple[str, ...]
    nbytes: int
    budget: int
    threshold: float
    mass_held: float
    exact: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Payload({size(self.nbytes)} of {size(self.budget)}, {len(self.exact)} heads exact)"


def thumbnails(mass: Any) -> NDArray[np.uint8]:
    """round(255 √m) of pooled maps (H, P, P): m is the sum over a cell's keys, averaged over its queries."""
    return np.asarray(np.rint(255 * np.sqrt(np.clip(_array(mass), 0, 1))), np.uint8)


def default_budget(n: int) -> int:
    """Bytes: 2, 10 or 25 MB for up to 128, up to 512, or more tokens."""
    return 2_000_000 if n <= 128 else 10_000_000 if n <= 512 else 25_000_000


def least_nbytes() -> int:
    """Bytes of a page about nothing: a budget of no more is refused, whatever the model and the text."""
    return _nbytes(shell()) - len(DATA) + _SLACK


def build(
    layers: Sequence[LayerData],
    texts: Sequence[Tokens],
    heads: Sequence[HeadLike],
    *,
    name: str,
    nbytes: int,
    dense_nbytes: int,
    budget: int | None = None,
    influence: Any = None,
) -> Payload:
    """Encode the page's data so that the file is at most `budget` bytes.

    Args:
        layers: one `LayerData` a layer.
        texts: one, whose tokens are queries and keys; of an encoder-decoder model source and target.
        heads: every head of these layers.
        name: the model's name. nbytes, dense_nbytes: what the maps hold, and what the
            dense float32 matrices would.
        budget: bytes; default 2, 10 or 25 MB for up to 128, up to 512, or more tokens.
        influence: of each token on the last one through all layers, where it is known.
    Raises: ShapeError where sizes disagree; BudgetError where the budget cannot hold even text and thumbnails.
    Cost: gzip of what is kept, about 0.2 s a megabyte of file.
    """
    n = max(map(len, texts), default=0)
    _check(layers, texts, heads)
    limit = default_budget(n) if budget is None else budget
    facts = page_facts(layers, texts, heads, name, nbytes, dense_nbytes)
    thumbs = blob("thumbs", np.concatenate([layer.thumbs.reshape(-1) for layer in layers]).tobytes())
    always = [thumbs]
    if influence is not None:
        facts["influence"] = True
        always.append(blob("influence", _array(influence).tobytes()))
    fixed = least_nbytes() + len(json_element("facts-data", facts)) + sum(map(len, always))
    if fixed >= limit:
        raise BudgetError(
            f"a budget of {size(limit)} for the page: the page itself, its text and its thumbnails take {size(fixed)}; "
            f"give a larger budget, fewer layers or a shorter text"
        )
    level, weights = _fit_level(layers, list(map(len, texts)), limit - fixed)
    exact, vectors = _fill(layers, heads, limit - fixed - sum(map(len, weights)))
    threshold = max(layer.strong.threshold for layer in layers)
    threshold = threshold if level <= level_of(threshold) else floor_of(level)
    held = _mass_held(layers, level)
    notes = _notes(threshold, held, limit, len(exact), len(heads), level > level_of(THRESHOLD))
    blobs = len(always) + len(weights) + len(vectors)
    facts |= {"threshold": threshold, "massHeld": held, "notes": notes, "blobs": blobs, "exact": len(exact)}
    elements = (json_element("facts-data", facts), *always, *weights, *vectors, '<meta name="end">\n')
    total = _nbytes(shell()) - len(DATA) + sum(map(len, elements))
    return Payload(elements, total, limit, threshold, held, tuple(exact), tuple(notes))


def _check(layers: Sequence[LayerData], texts: Sequence[Tokens], heads: Sequence[HeadLike]) -> None:
    sizes = list(map(len, texts))
    if not layers or not all(sizes) or max((n for layer in layers for n in layer.texts), default=0) >= len(sizes):
        raise ShapeError(f"build({len(layers)} layers, texts of {sizes} tokens): a page needs layers, and their texts")
    for layer in layers:
        rows, (queries, keys) = layer.strong.counts.shape[1], (sizes[n] for n in layer.texts)
        if rows > queries or (len(layer.strong.keys) and int(layer.strong.keys.max()) >= keys):
            raise ShapeError(
                f"build(layers, texts): layer {layer.layer} has {rows} queries or keys beyond {queries} × {keys} tokens"
            )
    there = {(layer.layer, h) for layer in layers for h in range(len(layer.thumbs))}
    given = {(head.layer, head.head) for head in heads}
    if there != given:
        raise ShapeError(
            f"build(layers, heads): {len(there)} heads in the layers, {len(given)} with scores; "
            f"they differ in {sorted(there ^ given)[:4]}"
        )


def page_facts(
    layers: Sequence[LayerData],
    texts: Sequence[Tokens],
    heads: Sequence[HeadLike],
    name: str,
    nbytes: int,
    dense_nbytes: int,
) -> dict[str, Any]:
    """What the page knows at once, before any blob is decoded."""
    scores = list(dict.fromkeys(score for head in heads for score in head.scores))
    return {
        "format": FORMAT,
        "name": name,
        "texts": list(map(text_facts, texts)),
        "nbytes": nbytes,
        "denseNbytes": dense_nbytes,
        "layers": [layer_facts(layer) for layer in layers],
        "scores": scores,
        "heads": [head_facts(head, scores) for head in heads],
        "opening": list(_opening(heads)),
    }


def title_of(name: str, tokens: Sequence[str]) -> str:
    """The model and how the text begins.

    >>> title_of("SmolLM2", ["The", " keeper", " of", " the", " lighthouse", " wrote", " one", " line", " in her log"])
    'SmolLM2: The keeper of the lighthouse wrote one l…'
    """
    text = " ".join("".join(tokens[:50]).split())
    return f"{name}: {text[:40].rstrip()}" + ("…" if len(text) > 40 else "")


def together(pages: Sequence[Callable[[int], Payload]], labels: Sequence[str | int], budget: int) -> Payload:
    """Several pages' data in one: `pages` give each within so many bytes.

    The parts of page n are called n.…, of the first as they are; `labels` become what its control shows.
    """
    shell_bytes = _nbytes(shell()) - len(DATA)
    told = json_element("pages-data", list(labels))
    each = shell_bytes + (budget - shell_bytes - len(told)) // len(pages)
    made = [page(each) for page in pages]
    parts = [_numbered(element, n) for n, one in enumerate(made) for element in one.elements[:-1]]
    elements = (told, *parts, made[0].elements[-1]) if len(made) > 1 else made[0].elements
    exact = tuple(head for one in made for head in one.exact)
    return Payload(
        elements,
        shell_bytes + sum(map(len, elements)),
        budget,
        max(one.threshold for one in made),
        sum(one.mass_held for one in made) / len(made),
        exact,
        tuple(dict.fromkeys(note for one in made for note in one.notes)),
    )


def _numbered(element: str, n: int) -> str:
    """A part of page n: its name says so, of all but the first."""
    if not n:
        return element
    return element.replace('data-blob="', f'data-blob="{n}.', 1).replace('id="facts-data"', f'id="facts-data-{n}"', 1)


def text_facts(tokens: Tokens) -> dict[str, Any]:
    """What the page knows of a text, or of an image."""
    facts: dict[str, Any] = {"tokens": tokens.pieces, "name": tokens.name}
    if tokens.prompt is not None:
        facts["prompt"] = tokens.prompt
    if tokens.picture is not None:
        facts["image"] = vars(tokens.picture)
    return facts


def layer_facts(layer: LayerData) -> dict[str, Any]:
    """What the page knows of a layer at once."""
    facts: dict[str, Any] = {
        "layer": layer.layer,
        "heads": len(layer.thumbs),
        "causal": layer.causal,
        "sinks": [int(s) for s in layer.sinks],
        "groups": layer.groups,
        "side": layer.side,
        "queries": layer.texts[0],
        "keys": layer.texts[1],
        "thumb": list(layer.thumbs.shape[1:]),
    }
    if layer.exact and layer.scale is not None:
        facts |= {"scale": float(layer.scale), "d": layer.q.shape[-1]}
    return facts


def head_facts(head: HeadLike, scores: Sequence[str]) -> list[Any]:
    """[layer, head, role, scores, baselines, entropy, distance]; None for what does not apply or is not known yet."""
    return [
        head.layer,
        head.head,
        head.role or None,
        [_number(head.scores.get(score)) for score in scores],
        [_number(head.baselines.get(score)) for score in scores],
        _number(head.entropy),
        _number(head.distance),
    ]


def _number(x: float | None) -> float | None:
    """Four digits, which are more than the page shows."""
    number = finite(x)
    return None if number is None else float(f"{number:.4g}")


def _strength(head: HeadLike) -> float:
    """The score of the head's own role; a head without one counts by its largest score."""
    own = head.scores.get(head.role)
    values = [own] if own is not None else list(head.scores.values())
    return max((x for x in values if x is not None and math.isfinite(x)), default=0.0)


def _by_role(heads: Sequence[HeadLike]) -> dict[str, list[HeadLike]]:
    """The heads of each role, strongest first; roles in the order in which they are worth a look."""
    roles = [*_OPENING, *sorted({head.role for head in heads} - set(_OPENING))]
    return {role: sorted((h for h in heads if h.role == role), key=_strength, reverse=True) for role in roles}


def _opening(heads: Sequence[HeadLike]) -> tuple[int, int]:
    """The head with which the page opens."""
    first = next(group[0] for group in _by_role(heads).values() if group)
    return first.layer, first.head


def _strongest_first(heads: Sequence[HeadLike]) -> Iterator[HeadLike]:
    """The strongest head of each role, then the second of each, and so on."""
    groups = list(_by_role(heads).values())
    for rank in range(max(map(len, groups))):
        yield from (group[rank] for group in groups if rank < len(group))


def _head_blob(layer: LayerData, h: int, level: int, sizes: Sequence[int]) -> str:
    return blob(f"w.{layer.layer}.{h}", head_rows(layer, h, [sizes[n] for n in layer.texts], level))


def head_rows(layer: LayerData, h: int, shape: Sequence[int], level: int) -> bytes:
    """The strong weights of one head (T, S), as `pack_rows` encodes them: none whose byte is below `level`."""
    rows, columns = shape
    counts = np.zeros(rows, np.int64)
    keys: NDArray[Any] = np.zeros(0, np.int64)
    values = np.zeros(0, np.uint8)
    if h < len(layer.strong.counts):
        own, keys, values = layer.strong.head(h)
        keep = values >= level
        row = np.repeat(np.arange(len(own)), own)[keep]
        counts, keys, values = np.bincount(row, minlength=rows), keys[keep], values[keep]
    return pack_rows(counts, keys, values, columns)


def _fit_level(layers: Sequence[LayerData], sizes: Sequence[int], room: int) -> tuple[int, list[str]]:
    """The lowest level whose blobs fit into `room` bytes, and the blobs.

    Bytes for one weight are estimated from a few heads; the histogram of bytes then says at which level
    the whole will fit. Two or three rounds settle it.
    """
    places = [(layer, h) for layer in layers for h in range(len(layer.thumbs))]
    tally = sum(np.bincount(layer.strong.values, minlength=257) for layer in layers)
    at_least = np.cumsum(np.asarray(tally)[::-1])[::-1]
    level = max(layer.strong.level for layer in layers)
    sample = places[:: max(1, len(places) // 12)]
    total = sum(len(_head_blob(layer, h, level, sizes)) for layer, h in sample) * len(places) / len(sample)
    while True:
        if total > room * 1.03:  # surely too large: do not compress it all to find out
            aim = at_least[level] * 0.985 * room / total
            level = min(256, max(level + 1, int(np.searchsorted(-at_least, -aim))))
        blobs = [_head_blob(layer, h, level, sizes) for layer, h in places]
        total = sum(map(len, blobs))
        if total <= room or level == 256:
            return level, blobs
        level += 1
        total = total * at_least[min(level, 256)] / max(1, at_least[level - 1])


def _fill(layers: Sequence[LayerData], heads: Sequence[HeadLike], room: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Blobs of q and lse (a head) and k and v (a group, once) of as many heads as fit, strongest first."""
    by_number = {layer.layer: layer for layer in layers if layer.exact}
    chosen: list[tuple[int, int]] = []
    blobs: dict[str, str] = {}
    for head in _strongest_first(heads):
        layer = by_number.get(head.layer)
        if layer is None or room < _least_bytes(layer, head.head, blobs):
            continue
        new = _vector_blobs(layer, head.head, blobs)
        taken = sum(map(len, new.values()))
        if taken <= room:
            room -= taken
            blobs |= new
            chosen.append((head.layer, head.head))
    return chosen, list(blobs.values())


def _least_bytes(layer: LayerData, h: int, have: Mapping[str, str]) -> int:
    """What a head takes at least: float32 shrinks by less than a fifth in gzip, and base64 adds a third."""
    _, shared = _vector_names(layer, h)
    arrays = [layer.q[h]] if shared in have else [layer.q[h], layer.k[0], layer.v[0]]
    return int(sum(math.prod(array.shape) for array in arrays) * 4 * 0.8 * 4 / 3)


def _vector_names(layer: LayerData, h: int) -> tuple[str, str]:
    return f"q.{layer.layer}.{h}", f"kv.{layer.layer}.{_group(layer, h)}"


def _group(layer: LayerData, h: int) -> int:
    return h // int(layer.q.shape[-3] // layer.k.shape[-3])


def _vector_blobs(layer: LayerData, h: int, have: Mapping[str, str]) -> dict[str, str]:
    (query, shared), group = _vector_names(layer, h), _group(layer, h)
    blobs = {query: float_blob(query, _array(layer.q[h]), _array(layer.lse[h]))}
    if shared not in have:
        blobs[shared] = float_blob(shared, _array(layer.k[group]), _array(layer.v[group]))
    if layer.terms is not None:
        name = f"p.{layer.layer}.{h}"
        blobs[name] = blob(name, layer.terms(h), strategy=zlib.Z_HUFFMAN_ONLY)
    return blobs


def _mass_held(layers: Sequence[LayerData], level: int) -> float:
    """The share of all attention that the kept weights hold; a row that attends to nothing has none."""
    squares = (np.arange(257) / 255.0) ** 2
    squares[:level] = 0
    held = sum(float(np.bincount(layer.strong.values, minlength=257) @ squares) for layer in layers)
    return min(1.0, held / max(1, sum(map(_live_rows, layers))))


def _live_rows(layer: LayerData) -> int:
    return layer.strong.counts.size if layer.lse is None else int(np.isfinite(_array(layer.lse)).sum())


def _notes(threshold: float, held: float, budget: int, exact: int, heads: int, raised: bool) -> list[str]:
    """What the page says about what it shows."""
    if exact == heads:
        return ["Every weight is exact, computed from q and k in float32."]
    subject = f"{exact} of {heads} heads are exact; the others keep" if exact else "Every head keeps"
    kept = f"weights of {_percent(threshold)} and more, in 8 bits: {_percent(held)} of all attention."
    notes = [f"{subject} {kept}"]
    if raised:
        notes.append(f"Weaker weights were left out to keep the file within {size(budget)}.")
    return notes


def _percent(x: float) -> str:
    """Never "100%" for less than all."""
    return "100%" if x >= 1 else f"{min(100 * x, 99.9):.2g}%" if x < 0.1 else f"{min(100 * x, 99.9):.3g}%"


def _nbytes(text: str) -> int:
    return len(text.encode("utf-8"))


def _array(x: Any) -> NDArray[np.float32]:
    """A float32 array of a tensor on any device, or of an array."""
    return np.asarray(x.detach().float().cpu().numpy() if hasattr(x, "detach") else x, np.float32)
