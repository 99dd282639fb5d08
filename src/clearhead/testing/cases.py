"""Inputs that break attention code: every mask and bias, unequal lengths, grouped heads, awkward layouts.

Each kind has a name, so that a failing test says which it was. Next to each rule stands its dense form, made by
the textbook (`clearhead.reference`) or by broadcasting, and never by the rule itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from clearhead import masks, reference, scores
from clearhead.masks import MaskRule
from clearhead.scores import Bias

WIDTH = 8  # D

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
HEADS = {"2/2": (2, 2), "4/2": (4, 2), "3/1": (3, 1)}  # H / G
SIZES = {
    f"{T}x{S}": (T, S)
    for T, S in [
        (0, 5),
        (5, 0),
        (1, 1),
        (1, 33),
        (33, 33),
        (33, 127),
        (127, 33),
        (129, 127),
        (127, 129),
        (129, 129),
        (33, 1025),
        (1025, 33),
        (1025, 1025),
    ]
}
TILES: dict[str, Callable[[int, int], tuple[int, int] | None]] = {
    "default": lambda T, S: None,
    "third": lambda T, S: (T // 3 + 1, S // 3 + 1),  # divides neither
    "wide": lambda T, S: (T // 5 + 2, S + 7),
}


@dataclass(frozen=True)
class Case:
    """The arguments of one attention, and what the textbook needs to know about them."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    mask: MaskRule | Tensor | None
    seen: Tensor  # (B, H, T, S) bool: the mask, dense
    bias: Bias | Tensor | None = None
    added: Tensor | None = None  # (B, H, T, S) float64: the bias, dense, -inf where it hides
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    tile: tuple[int, int] | None = None
    names: dict[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, S)."""
        B, H, T, _ = self.q.shape
        return B, H, T, self.k.shape[2]

    @property
    def terms(self) -> int:
        """How many numbers are added up behind one weight: D for the score, S for the normaliser."""
        return self.q.shape[-1] + self.k.shape[2]

    def exact(self) -> Tensor:
        """The weights by the textbook in float64."""
        return self._weights(torch.float64, flip=False)

    def plain(self) -> Tensor:
        """The textbook's weights in the dtype of statistics, keys last to first: how wrong a plain path is."""
        return self._weights(torch.promote_types(self.q.dtype, torch.float32), flip=True)

    def largest_score(self) -> float:
        """The largest |score| of a visible pair: rounded by eps, it changes its weight by eps · |score|."""
        bias = None if self.added is None else self.added.masked_fill(self.added == -math.inf, 0)
        scored = reference.scores(self.q.double(), self.k.double(), scale=self.scale, softcap=self.softcap, bias=bias)[
            self.seen
        ]
        return float(scored.abs().max()) if scored.numel() else 0.0

    def _weights(self, dtype: torch.dtype, *, flip: bool) -> Tensor:
        q, k, seen, bias = self.q.to(dtype), self.k.to(dtype), self.seen, None
        if self.added is not None:
            seen = seen & (self.added > -math.inf)
            bias = self.added.masked_fill(self.added == -math.inf, 0).to(dtype)
        if flip:
            k, seen, bias = k.flip(-2), seen.flip(-1), None if bias is None else bias.flip(-1)
        weights = reference.weights(
            q, k, mask=seen, scale=self.scale, softcap=self.softcap, bias=bias, sinks=self.sinks
        )
        return weights.flip(-1) if flip else weights


def build_case(names: dict[str, str], *, seed: int = 0) -> Case:
    """The case that these names describe: one each of dtype, mask, bias, size, heads, layout, tile."""
    generator = torch.Generator().manual_seed(seed)
    (T, S), (H, G) = SIZES[names["size"]], HEADS[names["heads"]]
    if names["mask"] in NEEDS_KEYS and T > S:
        T, S = S, T
    B, dtype = 2, DTYPES[names["dtype"]]
    q, k = LAYOUTS[names["layout"]](B, H, G, T, S, generator)
    mask, seen = MASKS[names["mask"]](B, H, T, S, generator)
    extra = BIASES[names["bias"]](B, H, T, S, dtype, generator)
    seen = seen.expand(B, H, T, S)
    return Case(_to(q, dtype), _to(k, dtype), mask, seen, tile=TILES[names["tile"]](T, S), names=names, **extra)


# --- memory layouts ----------------------------------------------------------------------------------------


def _contiguous(B: int, H: int, G: int, T: int, S: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, T, WIDTH, generator=g), torch.randn(B, G, S, WIDTH, generator=g)


def _tokens_first(B: int, H: int, G: int, T: int, S: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """What view(B, T, H, D).transpose(1, 2) gives."""
    q, k = torch.randn(B, T, H, WIDTH, generator=g), torch.randn(B, S, G, WIDTH, generator=g)
    return q.transpose(1, 2), k.transpose(1, 2)


def _stride_0(B: int, H: int, G: int, T: int, S: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """One batch of queries for all, one key for all positions."""
    q, k = torch.randn(1, H, T, WIDTH, generator=g), torch.randn(B, G, 1, WIDTH, generator=g)
    return q.expand(B, -1, -1, -1), k.expand(-1, -1, S, -1)


def _every_other(B: int, H: int, G: int, T: int, S: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    q, k = _contiguous(B, H, G, T, S, g)
    return q.repeat_interleave(2, -1)[..., ::2], k.repeat_interleave(2, -2)[..., ::2, :]


LAYOUTS = {
    "contiguous": _contiguous,
    "tokens first": _tokens_first,
    "stride 0": _stride_0,
    "every other": _every_other,
}


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Another dtype with the same strides, stride 0 included."""
    if tensor.dtype == dtype:
        return tensor
    small = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())] if tensor.numel() else tensor
    return small.to(dtype).expand(tensor.shape)


# --- masks: a rule or a tensor, and (B or 1, H or 1, T, S) bool by the textbook ----------------------------

Made = tuple["MaskRule | Tensor | None", Tensor]
_causal = lru_cache(64)(reference.causal)
_upper_left = lru_cache(64)(reference.causal_upper_left)
_window = lru_cache(64)(reference.sliding_window)


def _real(B: int, n: int, g: torch.Generator) -> Tensor:
    """Left padding in the first batch entry, none in the second, scattered padding in the others."""
    real = torch.rand(B, n, generator=g) > 0.3
    real[0] = torch.arange(n) >= n // 3
    real[1:2] = True
    return real


def _padding_keys(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    real = _real(B, S, g)
    return masks.causal() & masks.padding(keys=real), _causal(T, S) & real[:, None, None]


def _padding_both(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    keys, queries = _real(B, S, g), _real(B, T, g)
    rule = masks.padding(keys=keys.long(), queries=queries)
    return rule, (keys[:, None, :] & queries[:, :, None])[:, None]


def _documents(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    ids = torch.randint(0, 3, (S,), generator=g).sort().values
    return masks.documents(ids), reference.documents(T, S, ids.tolist())


def _documents_per_batch(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    ids = torch.randint(0, 3, (B, S), generator=g)  # unsorted: documents that come back
    seen = torch.stack([reference.documents(T, S, row.tolist()) for row in ids])[:, None]
    return masks.documents(ids) & masks.causal(), seen & _causal(T, S)


def _prefix(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    lengths = torch.randint(0, S + 1, (B,), generator=g)
    return masks.prefix(lengths), _causal(T, S) | (torch.arange(S) < lengths[:, None, None, None])


def _sinks_and_window(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    """StreamingLLM: the first four tokens and a rolling window."""
    rule = masks.first_tokens(4) & masks.causal() | masks.sliding_window(4)
    return rule, (torch.arange(S) < 4) & _causal(T, S) | _window(T, S, 4)


def _outside(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    """A negation, that leaves the first rows nothing."""
    return masks.causal() & ~masks.sliding_window(3), _causal(T, S) & ~_window(T, S, 3)


def _symmetric(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    apart = (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()
    return masks.symmetric_window(5), apart <= 2


def _strided(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    """Sparse Transformer: every seventh key, and the nearest ones."""
    rule = masks.strided(7) & masks.causal() | masks.sliding_window(7)
    return rule, reference.strided(T, S, 7) & _causal(T, S) | _window(T, S, 7)


def _block_sparse(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    """Another layout for each head; the last block is cut off by the end."""
    n = S // 10 + 1
    layout = torch.rand(1, H, n, n, generator=g) > 0.6
    seen = [reference.block_sparse(T, S, of_head.tolist(), 10) for of_head in layout[0]]
    return masks.block_sparse(layout.long(), 10), torch.stack(seen)[None]


def _global_tokens(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
    """Longformer, causal: two tokens see and are seen from afar, beside a window."""
    rule = (masks.global_tokens([0, 20]) | masks.symmetric_window(5)) & masks.causal()
    return rule, (reference.global_tokens(T, S, [0, 20]) | _window(T, S, 3)) & _causal(T, S)


def _dense(*which: int) -> Callable[[int, int, int, int, torch.Generator], Made]:
    def make(B: int, H: int, T: int, S: int, g: torch.Generator) -> Made:
        sizes = (*tuple(n if keep else 1 for n, keep in zip((B, H), which, strict=False)), T, S)
        mask = torch.rand(sizes, generator=g) > 0.5
        mask[..., : T // 4, :] = False  # rows with nothing to attend to
        return mask, mask

    return make


MASKS: dict[str, Callable[[int, int, int, int, torch.Generator], Made]] = {
    "none": lambda B, H, T, S, g: (None, torch.ones(T, S, dtype=torch.bool)),
    "causal": lambda B, H, T, S, g: (masks.causal(), _causal(T, S)),
    "upper-left": lambda B, H, T, S, g: (masks.causal_upper_left(), _upper_left(T, S)),
    "window": lambda B, H, T, S, g: (masks.sliding_window(5), _window(T, S, 5)),
    "symmetric": _symmetric,
    "causal + padded keys": _padding_keys,
    "padded keys and queries": _padding_both,
    "documents": _documents,
    "documents per batch": _documents_per_batch,
    "prefix": _prefix,
    "sinks + window": _sinks_and_window,
    "strided": _strided,
    "block sparse": _block_sparse,
    "global + window": _global_tokens,
    "outside a window": _outside,
    "dense (T, S)": _dense(),
    "dense (B, 1, T, S)": _dense(1, 0),
    "dense (B, H, T, S)": _dense(1, 1),
    "nothing visible": lambda B, H, T, S, g: (
        masks.first_tokens(0),
        torch.zeros(T, S, dtype=torch.bool),
    ),
}
NEEDS_KEYS = {"documents", "documents per batch", "block sparse"}  # where every query is one of the keys


# --- what else stands between q·k and the softmax ----------------------------------------------------------

Extra = dict[str, Any]


def _dense_bias(hidden: Callable[[torch.dtype], float]) -> Callable[..., Extra]:
    def make(B: int, H: int, T: int, S: int, dtype: torch.dtype, g: torch.Generator) -> Extra:
        bias = torch.randn(B, 1, T, S, generator=g).to(dtype)
        hide = torch.rand(B, 1, T, S, generator=g) > 0.7
        added = bias.double().masked_fill(hide, -math.inf)
        return {"bias": bias.masked_fill(hide, hidden(dtype)), "added": added.expand(B, H, T, S)}

    return make


def _alibi(B: int, H: int, T: int, S: int, dtype: torch.dtype, g: torch.Generator) -> Extra:
    slopes = torch.tensor([2.0**-i for i in range(1, H + 1)]).to(dtype)
    return {"bias": scores.alibi(slopes), "added": reference.alibi(slopes.double(), T, S).expand(B, H, T, S)}


def _t5(B: int, H: int, T: int, S: int, dtype: torch.dtype, g: torch.Generator) -> Extra:
    """T5's bias, its buckets found by comparing with their thresholds, not by a logarithm."""
    table = torch.randn(32, H, generator=g).to(dtype)
    away = torch.arange(S) - (torch.arange(T)[:, None] + S - T)
    # For each sign 8 exact distances, then buckets that begin at 8 · 16^(i/8), i = 1 … 7.
    far = torch.tensor([8 * 16 ** (i / 8) for i in range(1, 8)], dtype=torch.float64)
    distance = away.abs()
    bucket = torch.where(distance < 8, distance, 8 + (distance[..., None] >= far - 1e-9).sum(-1))
    added = table.double()[bucket + 16 * (away > 0)].permute(2, 0, 1)
    return {"bias": scores.t5_bias(table), "added": added.expand(B, H, T, S), "scale": 1.0}


BIASES: dict[str, Callable[..., Extra]] = {
    "none": lambda *a: {},
    "scale 1": lambda *a: {"scale": 1.0},
    "finfo.min": _dense_bias(lambda dtype: torch.finfo(dtype).min),
    "-inf": _dense_bias(lambda dtype: -math.inf),
    "alibi": _alibi,
    "t5": _t5,
    "softcap": lambda *a: {"softcap": 2.0},
    "learned sinks": lambda B, H, T, S, dtype, g: {"sinks": torch.randn(H, generator=g).to(dtype)},
}
LARGE = ["1025x1025"]  # a second each: sampled apart
FACTORS = {
    "mask": list(MASKS),
    "size": [size for size in SIZES if size not in LARGE],
    "bias": list(BIASES),
    "layout": list(LAYOUTS),
    "dtype": list(DTYPES),
    "heads": list(HEADS),
    "tile": list(TILES),
}
