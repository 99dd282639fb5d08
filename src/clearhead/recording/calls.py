"""One call of attention as it arrived, whatever the seam, in one layout; and the lazy map that is made of it.

Layout: q (B, H, T, D), k (B, G, S, D), v (B, G, S, Dv), grouped heads not expanded. What hides or moves
scores is kept as it came (a rule, or a tensor by reference), so that a map of a causal call never owns a T×S
tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clearhead._checks import describe
from clearhead._watch import Watched
from clearhead.errors import RecordingError
from clearhead.maps import AttentionMap, DenseMap, SoftmaxMap
from clearhead.maps.replaced import replace_heads
from clearhead.masks import MaskRule, all_of
from clearhead.scores import Bias, as_bias

__all__ = ["AnyCall", "Call", "DenseCall", "Unread", "as_heads", "as_heads_mask", "check_lasting", "usual_scale"]


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: weights = softmax(softcap(scale · q·k) + biases), hidden by the masks."""

    # Not the log-sum-exp of PyTorch's kernel, which a dispatch mode around the call could read: that takes 0.01 to
    # 0.05 ms a call, whether somebody looks or not, and saves 0.03 of a fused call of 4,096 tokens (all statistics:
    # 0.61 for 0.64), nothing where one question is asked, and 0.05 ms where one row is.
    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    v: Tensor  # (B, G, S, Dv)
    scale: float
    masks: tuple[MaskRule | Tensor, ...] = ()  # all of them must let a pair through; tensors (B|1, H|1, T|1, S|1) bool
    biases: tuple[Bias | Tensor, ...] = ()  # all are added; tensors (B|1, H|1, T|1, S|1) float
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)
    real_queries: Tensor | None = None  # (B, T) bool, where the call itself says which queries are padding
    changed: Mapping[int, str] = field(default_factory=dict)  # heads that a knockout made attend otherwise

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, T, S)."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def no_keys(self) -> Tensor:
        """What stands for k or v where they are kept elsewhere, or not at all: none of them, (B, 1, 0, D)."""
        return self.q.new_empty(self.q.shape[0], 1, 0, self.q.shape[3])

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that the map will read later."""
        yield from (self.q, self.k, self.v)
        for rule in (*self.masks, *self.biases):
            yield from [rule] if isinstance(rule, Tensor) else rule.tensors()
        if self.sinks is not None:
            yield self.sinks

    def detached(self) -> Call:
        """The same call off the autograd graph, sharing memory with the original."""
        if not any(tensor.requires_grad for tensor in self.tensors()):
            return self
        return Call(
            q=self.q.detach(),
            k=self.k.detach(),
            v=self.v.detach(),
            scale=self.scale,
            masks=self.masks,
            biases=tuple(bias.detach() if isinstance(bias, Tensor) else bias for bias in self.biases),
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.detach(),
            real_queries=self.real_queries,
            changed=self.changed,
        )

    def without_values(self) -> Call:
        """As it is: the values are kept beside the keys."""
        return self

    def rule(self, padding: MaskRule | None = None) -> MaskRule | None:
        """All masks, and the padding, as one rule; None where everything is visible."""
        return all_of(*self.masks, padding)

    def bias(self) -> Bias | None:
        """All biases as one."""
        return reduce(operator.add, (as_bias(bias) for bias in self.biases)) if self.biases else None

    def to_map(self, padding: MaskRule | None = None) -> AttentionMap:
        """The lazy map of this call; nothing is computed."""
        attn = SoftmaxMap(
            self.q,
            self.k,
            v=self.v if self.v.shape[2] == self.k.shape[2] else None,
            mask=self.rule(padding),
            scale=self.scale,
            bias=self.bias(),
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return replace_heads(attn, self.changed) if self.changed else attn


@dataclass(frozen=True, eq=False)
class DenseCall:
    """A call of which only the weights are known, as they were made: before dropout."""

    weights: Tensor  # (B, H, T, S)
    v: Tensor | None = None  # (B, G, S, Dv), where it fits the weights

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, T, S)."""
        return tuple(self.weights.shape)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that the map will read later."""
        yield self.weights

    def detached(self) -> DenseCall:
        """The same off the autograd graph, sharing memory."""
        return DenseCall(self.weights.detach(), None if self.v is None else self.v.detach())

    def without_values(self) -> DenseCall:
        """The weights alone: what is kept for later, when the values may have been overwritten."""
        return DenseCall(self.weights)

    def leaves_out(self, keys: Tensor | None, queries: Tensor | None) -> bool:
        """Whether padded keys, where `keys` (B, S) is False, get no weight from real queries (B, T)."""
        if keys is None:
            return False
        weights = self.weights.detach() if queries is None else self.weights.detach() * queries[:, None, :, None]
        return not bool((weights.amax((1, 2)) > 0)[~keys].any())

    def to_map(self, padding: MaskRule | None = None) -> DenseMap:
        """The map over the weights; where there is padding, over a copy in which padded tokens have weight 0."""
        if padding is None:
            return DenseMap(self.weights, v=self.v)
        B, H, T, S = self.weights.shape
        batches, heads = (torch.arange(n, device=self.weights.device) for n in (B, H))
        seen = padding.bind(T, S).tile(slice(0, T), slice(0, S), batches, heads)
        return DenseMap(self.weights.where(seen, 0), v=self.v)


AnyCall: TypeAlias = Call | DenseCall


@dataclass(frozen=True, eq=False)
class Unread:
    """An attention call that was made, and may be read later; what may change meanwhile is noted."""

    k: Tensor  # as it arrived
    watched: Watched  # all tensors that the call will hold
    read: Callable[[], Call]


def usual_scale(q: Tensor) -> float:
    """1/√D; queries without features, which have none, are refused when the map is read."""
    return float(max(1, q.shape[-1]) ** -0.5)


def as_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of rank 2 and up as (B, heads, tokens, width), broadcast as PyTorch does, as views if possible.

    Rank 2 is one sequence, rank 3 a batch with one head, further leading dimensions are folded into the
    batch.
    """
    check_lasting(q, k, v)
    if _is_usual(q, k, v):
        return q, k, v
    if any(x.is_nested for x in (q, k, v)):
        raise RecordingError(
            f"attention with nested tensors cannot be recorded yet: {_arrived(q, k, v)}. Pad the batch instead."
        )
    given = (q, k, v)
    rank = max(q.ndim, k.ndim, v.ndim)
    q, k, v = (_lift(x, rank) for x in _one_dtype(q, k, v))
    lead = _broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = max(k.shape[-3], v.shape[-3])
    q = _fold(q, lead, heads if q.shape[-3] == 1 else q.shape[-3])
    k, v = _fold(k, lead, heads), _fold(v, lead, heads)
    if q.shape[1] % max(heads, 1):
        raise RecordingError(f"{heads} key heads do not divide {q.shape[1]} query heads: {_arrived(*given)}.")
    return q, k, v


def check_lasting(*tensors: Tensor) -> None:
    """Raise RecordingError for tensors that cannot be read later: of a transform, which ends, or without numbers."""
    if torch.compiler.is_dynamo_compiling():  # which takes this apart too, on its way from a call that it left to us
        return
    if not all(isinstance(x, Tensor) for x in tensors):
        raise RecordingError(
            f"attention of {', '.join(type(x).__name__ for x in tensors)} cannot be recorded: expected tensors."
            " Trace or export the model outside of the block."
        )
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        raise RecordingError(
            f"attention inside vmap, grad or another transform of torch.func cannot be recorded: {_arrived(*tensors)},"
            " which end with the transform. Call the model outside of it, in a block of its own."
        )
    if any(isinstance(x, FakeTensor) for x in tensors):
        raise RecordingError(
            f"attention of fake tensors cannot be recorded: {_arrived(*tensors)}, which hold no numbers. Call the model"
            " outside of FakeTensorMode and torch.export, in a block of its own."
        )


def _is_usual(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether they are in our layout as they came: asked first, since what follows takes ten times as long."""
    if q.is_nested or k.is_nested or v.is_nested or not q.dtype == k.dtype == v.dtype:
        return False
    if not q.ndim == k.ndim == v.ndim == 4:
        return False
    (B, H, _, _), (batches, G, S, _), of_v = q.shape, k.shape, v.shape
    return batches == B and of_v[:3] == (B, G, S) and G > 0 and H % G == 0 and H >= G


def _arrived(*tensors: Tensor) -> str:
    names = ("q", "k", "v") if len(tensors) == 3 else ("weights",)
    return ", ".join(f"{name}={describe(x)}" for name, x in zip(names, tensors, strict=True))


def as_heads_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask that PyTorch broadcasts against the scores of q and k (as they arrived), in the same layout."""
    rank = max(q.ndim, k.ndim)
    if mask.ndim > rank:
        raise RecordingError(f"a mask of more dimensions than the scores: {describe(mask)} for q={describe(q)}.")
    mask = _lift(mask, rank)
    lead = tuple(mask.shape[:-3])
    if all(size == 1 for size in lead):
        return mask.reshape(1, *mask.shape[-3:])
    batch = _broadcast(_lift(q, rank).shape[:-3], _lift(k, rank).shape[:-3])
    return _fold(mask, _broadcast(lead, batch), mask.shape[-3])


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _lift(x: Tensor, rank: int) -> Tensor:
    """To this rank, as broadcasting does; then (T, D) → (1, 1, T, D) and (B, T, D) → (B, 1, T, D)."""
    x = x[(None,) * (rank - x.ndim)]
    return x[None, None] if rank == 2 else x.unsqueeze(1) if rank == 3 else x


def _fold(x: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    """(…, heads or 1, n, m) → (prod(lead), heads, n, m)."""
    return x.expand(*lead, heads, *x.shape[-2:]).reshape(math.prod(lead), heads, *x.shape[-2:])


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the three may differ; the widest holds them all."""
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(dtype) for x in tensors)
