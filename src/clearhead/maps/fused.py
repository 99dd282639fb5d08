"""SoftmaxMaps and PyTorch's fused kernels: when an identity is taken, and which one answers each reducer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.kernels import aten, identities
from clearhead.kernels.identities import Source
from clearhead.kernels.path import forced
from clearhead.maps import reductions as reduce
from clearhead.masks import Both, Coverage, MaskRule, causal

if TYPE_CHECKING:
    from clearhead.maps.softmax import SoftmaxMap

QUESTIONS = ("entropy", "distance", "received", "mass", "@", "mT @")
# Measured with one thread (9 heads): of 256 tokens A X takes 0.77 of the time of tiles, of 128 tokens 0.86.
FEW = 1 << 18  # weights: for fewer, tiles are as fast
MANY = 1 << 22  # weights: from here on, Aᵀ Y is faster than with tiles even where each row's lse must be found first
ROUNDED = 1e-4  # what rounding each row's lse may be: an entropy is the difference between it and a score
WIDE = 64  # numbers a key, or twice the width of the keys: on the CPU more make A X slower than tiles
Answer = Callable[[], "tuple[Tensor, Tensor]"]  # (B, H, …), and each row's lse (B, H, T)


def against(attn: SoftmaxMap, question: str) -> str | None:
    """What speaks against an identity over a fused kernel."""
    if forced() == "tiles":
        return "forced"
    if question not in QUESTIONS:
        return "no identity gives it"
    if attn.softcap is not None:
        return "fused kernels take no soft-cap"
    if not attn._has_numbers:
        return "q or k have no numbers (traced, on the meta device, or under vmap)"
    if not math.prod(attn.shape) * attn._q.shape[-1]:
        return "there are no weights"
    if forced() != "fused" and math.prod(attn.shape) < FEW:
        return f"{math.prod(attn.shape):,} weights are too few for a fused kernel to pay"
    if aten.exact(attn.device, attn.dtype) is None:
        return f"no fused kernel on {attn.device} is exact in {attn.dtype}".replace("torch.", "")
    return _against_identity(attn, question) or (None if forced() == "fused" else _slower(attn, question))


def _against_identity(attn: SoftmaxMap, question: str) -> str | None:
    if question == "entropy" and attn.bias is not None:
        return "with a bias, entropy does not follow from fused attention"
    if question == "distance" and not _looks_back(attn, attn.mask):
        return "distance follows from fused attention only where no key lies ahead of its query"
    return None


def _slower(attn: SoftmaxMap, question: str) -> str | None:
    """Where two passes take longer than tiles. Not on a GPU, where tiles go through slow memory again and again."""
    if question not in ("received", "mT @") or attn.device.type != "cpu" or _knows_lse(attn):
        return None
    if question == "mT @" and math.prod(attn.shape) >= MANY and _kind(attn)[0]:
        return None
    return "each row's lse would have to be found first"


def _looks_back(attn: SoftmaxMap, rule: MaskRule | None) -> bool:
    """Whether every query is known to see no key ahead of it."""
    if isinstance(rule, Both):
        return _looks_back(attn, rule.left) or _looks_back(attn, rule.right)
    ends = None if rule is None else rule.interval(attn._t, *attn._bound)
    return ends is not None and bool((ends[1] <= attn.positions + 1).all())


def stream(attn: SoftmaxMap, reducers: Sequence[Any]) -> bool:
    """Give every reducer its result; False where tiles must do it."""
    asked = [_asked(attn, reducer) for reducer in reducers]
    if any(one is None or against(attn, one[0]) is not None for one in asked):
        return False
    factors = [reducer for reducer in reducers if type(reducer) is reduce.Product]
    if attn._needs_graph() or any(_has_graph(factor._x) or _is_wide(attn, factor) for factor in factors):
        return False
    attn._check_unchanged()
    found = [answer() for _, answer in asked]  # type: ignore[misc]
    if not all(bool(result.isfinite().all()) and _is_precise(lse) for result, lse in found):
        return False  # numbers of q or k that are not finite, or very large: tiles say for which rows
    for (question, _), (result, _) in zip(asked, found, strict=True):  # type: ignore[misc]
        if question == "distance" and float(result.max()) * math.sqrt(attn.shape[-1]) < identities.BLOCK:
            return False  # all keys so near that what is told from the block's first row is not exact
    for reducer, (result, lse) in zip(reducers, found, strict=True):
        attn._kept_lse().copy_(lse)
        reducer.take(attn._shown(result))
    return True


def logsumexp(attn: SoftmaxMap) -> Tensor | None:
    """Every row's lse, (B, H, T); None where tiles must do it."""
    if against(attn, "@") is not None or attn._needs_graph():
        return None
    lse, _ = identities.with_sinks(_sums(attn), _sinks(attn))
    return lse if _is_precise(lse) else None


def _sums(attn: SoftmaxMap) -> Tensor:
    """Every row's lse without sinks: half-precision queries and keys as they are, where a kernel is exact with them."""
    (is_whole, is_causal), narrow = _kind(attn), attn._q.shape[-1] <= aten.WIDEST
    half = aten.exact_sums(attn.device, attn._q.dtype) if is_whole and narrow else None
    if half is not None:
        return aten.attend(attn._q, attn._k, attn._k, scale=attn.scale, is_causal=is_causal, kernel=half)[1]
    source = _source(attn)
    return source.attend(source.k)[1]


def _knows_lse(attn: SoftmaxMap) -> bool:
    return attn._keeps_lse() and not bool(attn._kept_lse().isnan().any())


def _has_graph(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _is_wide(attn: SoftmaxMap, factor: reduce.Product) -> bool:
    """Whether the CPU's kernel, which wants queries and keys as wide as what they average, is slower than tiles."""
    wide = not factor._transposed and factor._x.shape[-1] > max(WIDE, 2 * attn._q.shape[-1])
    return wide and attn.device.type == "cpu" and forced() != "fused"


def _is_precise(lse: Tensor) -> bool:
    """Whether every row's lse is near enough to 0; false, too, where one is NaN."""
    near = lse.abs() * torch.finfo(lse.dtype).eps < ROUNDED
    return bool((near | (lse == -math.inf)).all())


def _asked(attn: SoftmaxMap, reducer: Any) -> tuple[str, Answer] | None:
    """What a reducer asks, and how it is answered; None: only tiles can."""
    if type(reducer) is reduce.PerQuery and not reducer.maximum:
        return _asked_of_rows(attn, reducer.measure)
    if type(reducer) is reduce.PerKey and not reducer.maximum:
        return "received", lambda: _turned(attn, identities.received)
    if type(reducer) is reduce.Product and reducer._transposed:
        y = _four(attn, reducer._x)
        return "mT @", lambda: _turned(attn, partial(identities.transposed_product, y=y))
    if type(reducer) is reduce.Product:
        return "@", lambda: identities.product(_source(attn), _four(attn, reducer._x), _sinks(attn))
    return None


def _asked_of_rows(attn: SoftmaxMap, measure: Any) -> tuple[str, Answer] | None:
    function = measure.func if isinstance(measure, partial) else measure
    if function is reduce.entropy:
        return "entropy", lambda: identities.entropy(_source(attn), _sinks(attn))
    if function is reduce._distance:
        return "distance", lambda: identities.distance(_source(attn), measure.args[0], _sinks(attn))
    if function is reduce._mass:
        return "mass", lambda: _mass(attn, measure.args[0])
    return None


def _turned(attn: SoftmaxMap, answer: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    lse = attn._lse_of(slice(0, attn.shape[-2]))
    return answer(_source(attn), lse=lse), lse


def _mass(attn: SoftmaxMap, chosen: Tensor) -> tuple[Tensor, Tensor]:
    mass, lse = identities.product(_source(attn), chosen.to(attn.dtype)[None, None, :, None], _sinks(attn))
    return mass[..., 0], lse


def _kind(attn: SoftmaxMap) -> tuple[bool, bool]:
    """Whether a kernel knows by itself what is visible, and whether that is s <= t."""
    T, S = attn.shape[-2:]
    everything = attn.block(slice(0, T), slice(0, S)) is Coverage.FULL
    is_causal = not everything and attn.mask == causal() and attn._all_queries and T == S
    return attn.bias is None and (everything or is_causal), is_causal


def _source(attn: SoftmaxMap) -> Source:
    added, one, (is_whole, is_causal) = partial(_added, attn), slice(0, 1), _kind(attn)
    return Source(
        attn._q.to(attn.dtype),
        attn._k.to(attn.dtype),
        attn.scale,
        attn,
        added,
        copies=1 if added(one, one).shape[:2] == (1, 1) else math.prod(attn._q.shape[:2]),
        is_moved=attn.bias is not None,
        is_whole=is_whole,
        is_causal=is_causal,
    )


def _added(attn: SoftmaxMap, rows: slice, cols: slice) -> Tensor:
    """What is added to the scores of a block, (B or 1, H or 1, t, s): the bias, and -inf where the mask hides."""
    t, s = attn._grid(rows, cols)
    at, nothing = attn._indices(t, s), attn.like.new_zeros(t.numel(), s.numel())
    added = nothing if attn.bias is None else attn.bias.values(*at).to(attn.dtype) + nothing
    return added if attn.mask is None else torch.where(attn.mask.allows(*at), added, -math.inf)


def _sinks(attn: SoftmaxMap) -> Tensor | None:
    return None if attn.sinks is None else attn.sinks[attn._h]


def _four(attn: SoftmaxMap, x: Tensor) -> Tensor:
    """x (…, n, width) as (B or 1, H or G or 1, n, width)."""
    lead = x.shape[:-2]
    sizes = dict(zip(attn._axes[len(attn._axes) - len(lead) :], lead, strict=True))
    return x.reshape(*(sizes.get(axis, 1) for axis in "BH"), *x.shape[-2:])
