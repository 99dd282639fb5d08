"""Attention scores that a program computed step by step, as the formula they follow; and a call read back from it.

Each step is noted, nothing is computed: q, k, masks and biases are kept as they arrived, with the leading
dimensions that the scores had when they met. Only when the weights turn out to be attention is all of it brought
into one layout, and compared with the weights on one query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from clearhead import masks
from clearhead._checks import has_numbers
from clearhead._watch import Watched
from clearhead.recording.calls import Call, DenseCall, as_heads, as_heads_mask
from clearhead.recording.comparing import gives_weights

__all__ = ["Part", "Scores", "number", "read_back", "weights_call"]

HIDES = -1e4  # a score at or below this gets weight 0; programs write -1e4, -1e9, finfo.min or -inf


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor that broadcast against scores whose leading dimensions were `lead`."""

    tensor: Tensor  # (…, T or 1, S or 1)
    lead: tuple[int, ...]
    factor: float = 1.0

    def fit(self, lead: tuple[int, ...]) -> Tensor:
        """The same where the scores have been reshaped to `lead`; a view if possible."""
        x = self.tensor[(None,) * (2 - self.tensor.ndim)]
        own = (1,) * (len(self.lead) + 2 - x.ndim) + tuple(x.shape[:-2])
        if math.prod(own) == 1:
            return x.reshape(*(1 for _ in lead), *x.shape[-2:])
        if self.lead == lead:
            return x
        if math.prod(own[1:]) == 1 and self.lead[0] == lead[0]:  # one a batch entry
            return x.reshape(own[0], *(1 for _ in lead[1:]), *x.shape[-2:])
        return x.expand(*self.lead, *x.shape[-2:]).reshape(*lead, *x.shape[-2:])


@dataclass(frozen=True, eq=False)
class Scores:
    """softcap(scale · q·k) + biases, hidden where `hidden` is True: (*lead, T, S)."""

    q: Part  # (…, T, D)
    k: Part  # (…, S, D)
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the product: it was rounded to this
    heads: tuple[int, ...] = ()  # (B, H), where `lead` has them in one dimension
    scale: float = 1.0
    softcap: float | None = None
    biases: tuple[Part, ...] = ()
    hidden: tuple[Part, ...] = ()
    watched: tuple[Watched, ...] = ()
    computed: bool = True  # q and k, both: neither is a parameter

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions before T and S."""
        return self.shape[:-2]

    def scaled(self, factor: float | None) -> Scores | None:
        """Every score times a number."""
        if factor is None:
            return None
        biases = tuple(replace(bias, factor=bias.factor * factor) for bias in self.biases)
        if self.softcap is not None:
            return replace(self, softcap=self.softcap * factor, biases=biases)
        return replace(self, scale=self.scale * factor, biases=biases)

    def squashed(self) -> Scores | None:
        """tanh of every score: the inside of a soft-cap."""
        return None if self.softcap is not None or self.biases or self.hidden else replace(self, softcap=1.0)

    def plus(self, other: object, factor: float = 1.0) -> Scores | None:
        """A mask or a bias added; the same number for all changes no weight."""
        if number(other) is not None:
            return self
        if not isinstance(other, Tensor) or not other.is_floating_point():
            return None
        part = Part(other, self.lead, factor)
        return replace(self, biases=(*self.biases, part), watched=(*self.watched, Watched([other])))

    def without(self, mask: object, value: float | None) -> Scores | None:
        """Hidden where the mask is True, if the value that stands there hides."""
        if value is None or value > HIDES or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return None
        part = Part(mask, self.lead)
        return replace(self, hidden=(*self.hidden, part), watched=(*self.watched, Watched([mask])))

    def reshaped(self, shape: tuple[int, ...]) -> Scores:
        """With other leading dimensions."""
        return replace(self, shape=shape, heads=shape[:2] if len(shape) == 4 else self.heads)

    def turned(self) -> Scores | None:
        """Of (…, S, T), where the keys came first; None where something was added or hidden."""
        if self.biases or self.hidden:
            return None
        return replace(self, q=self.k, k=self.q, shape=(*self.lead, self.shape[-1], self.shape[-2]))


def number(value: object) -> float | None:
    """A number, also as a tensor of one element; None for anything else, and for one that is learned."""
    if isinstance(value, Tensor):
        known = value.numel() == 1 and not value.requires_grad and has_numbers(value)
        return float(value) if known else None
    return float(value) if isinstance(value, Real) else None


def weights_call(
    weights: Tensor, scores: Scores | None, heads: tuple[int, ...] = (), v: Part | None = None
) -> DenseCall:
    """The weights as they are, as (B, H, T, S); `heads` are (B, H) if these may be one dimension."""
    lead = tuple(weights.shape[:-2])
    lead = _apart(lead, heads) if scores is None else _layout(scores)
    *batch, last = lead if len(lead) > 1 else (*lead, 1)
    B = math.prod(batch)
    return DenseCall(weights.reshape(B, last, *weights.shape[-2:]), None if v is None else _values(v, B, last))


def _values(v: Part, B: int, H: int) -> Tensor | None:
    """Values that broadcast against the weights as (B, H, S, Dv); None where they do not."""
    x = v.tensor
    if tuple(x.shape[:-2]) == (B, H):
        return x
    if _is_shared(x) and x.shape[0] == B and H % x.shape[1] == 0:
        return x.squeeze(2)
    if len(v.lead) < x.ndim - 2 or math.prod(v.lead) != B * H:
        return None
    return x.expand(*v.lead, *x.shape[-2:]).reshape(B, H, *x.shape[-2:])


def read_back(scores: Scores, zeroed: tuple[Part, ...], weights: Tensor, v: Part) -> Call | None:
    """The call that computed `weights` (…, T, S), set to 0 where `zeroed`; None unless it is understood.

    Understood is what reproduces the weights of one query, and needs no bias of the size of all weights.
    """
    if any(one.changed for one in scores.watched) or (scores.softcap is not None and scores.softcap <= 0):
        return None
    dtypes = scores.dtype, weights.dtype
    dense = weights_call(weights, scores).detached()
    try:
        call = _read(scores, zeroed, v)
        return call if _is_less(call, dense) and gives_weights(call.detached(), dense.weights, dtypes) else None
    except (RuntimeError, ValueError, TypeError):  # tensors that do not fit together as they should
        return None


def _is_less(call: Call, dense: DenseCall) -> bool:
    """Whether a call is of the weights' shape, and holds no bias of their size (unless they are one matrix or row)."""
    one = math.prod(dense.shape[:2]) <= 1 or dense.shape[2] == 1
    full = any(isinstance(bias, Tensor) and bias.shape == dense.shape for bias in call.biases)
    return call.shape == dense.shape and (one or not full)


def _layout(scores: Scores) -> tuple[int, ...]:
    """The leading dimensions in which a call is read: (B, H) where that is known."""
    if len(scores.lead) == 3 and _is_shared(scores.k.tensor):
        return scores.lead[0], scores.lead[1] * scores.lead[2]
    return _apart(scores.lead, scores.heads)


def _apart(lead: tuple[int, ...], heads: tuple[int, ...]) -> tuple[int, ...]:
    """Batch and heads, if they are one dimension."""
    return heads if len(lead) == 1 and len(heads) == 2 and math.prod(heads) == lead[0] else lead


def _is_shared(k: Tensor) -> bool:
    """Whether k or v is (B, G, 1, S, D): one for several query heads."""
    return k.ndim == 5 and k.shape[2] == 1


def _read(scores: Scores, zeroed: tuple[Part, ...], v: Part) -> Call:
    lead = _layout(scores)
    keys, values = (
        part.tensor.squeeze(2) if len(lead) == 2 and _is_shared(part.tensor) else part.fit(lead)
        for part in (scores.k, v)
    )
    q, k, v_ = as_heads(scores.q.fit(lead), keys, values)
    T, S = q.shape[2], k.shape[2]

    def four(part: Part) -> Tensor:
        return _unrepeated(as_heads_mask(part.fit(lead), scores.q.fit(lead), keys))

    hiding = [rule for part in (*scores.hidden, *zeroed) for rule in _rules(four(part), T, S)]
    biases: list[Tensor] = []
    for part in scores.biases:
        bias = four(part) if part.factor == 1 else four(part) * part.factor
        rule = _causal_bias(bias, T, S)
        (biases.append(bias) if rule is None else hiding.append(rule))
    return Call(
        q,
        k,
        v_,
        scores.scale * (1.0 if scores.softcap is None else scores.softcap),
        masks=tuple(hiding),
        biases=tuple(biases),
        softcap=scores.softcap,
    )


def _unrepeated(mask: Tensor) -> Tensor:
    """(B or 1, H or 1, …), a dimension along which the mask was expanded as 1."""
    batches, heads = (1 if stride == 0 else None for stride in mask.stride()[:2])
    return mask[:batches, :heads]


def _rules(hidden: Tensor, T: int, S: int) -> list[masks.MaskRule]:
    """What a mask that is True where nothing may be seen leaves visible; nothing where it hides nothing."""
    if not bool(hidden.any()):
        return []
    causal = _causal(hidden, T, S)
    return [~masks.dense(hidden) if causal is None else causal]


def _causal_bias(bias: Tensor, T: int, S: int) -> masks.MaskRule | None:
    """The rule that a mask of 0 and huge negative numbers stands for, if it is causal."""
    if bias.shape != (1, 1, T, S):
        return None
    hidden = bias.detach() <= HIDES
    return None if bool(bias.detach().masked_fill(hidden, 0).any()) else _causal(hidden, T, S)


def _causal(hidden: Tensor, T: int, S: int) -> masks.MaskRule | None:
    """The causal rule that hides just this, of (1, 1, T, S): then nobody has to keep it."""
    if hidden.shape != (1, 1, T, S):
        return None
    everything = torch.ones(T, S, dtype=torch.bool, device=hidden.device)
    for rule, first in ((masks.causal(), 1 + S - T), (masks.causal_upper_left(), 1)):
        if torch.equal(hidden[0, 0], everything.triu(first)):
            return rule
    return None
