"""Caches that keep their keys in one buffer: which of its slots are filled, and that it will be written to again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from clearhead._watch import version_of
from clearhead.masks import causal_upper_left
from clearhead.recording.blockmask import BlockRule
from clearhead.recording.calls import AnyCall, Call

__all__ = ["buffers_of", "filled", "is_borrowed", "is_in_buffer"]

Buffer = Any  # a layer of transformers' static cache: .keys (B, G, slots, D), .get_seq_length()


def buffers_of(arguments: Iterable[Any]) -> list[Buffer]:
    """The buffers of the static caches among the arguments of a call, encoder-decoder caches included."""
    return [layer for cache in _caches(arguments) for layer in cache.layers if hasattr(layer, "max_cache_len")]


def _caches(arguments: Iterable[Any]) -> Iterator[Any]:
    for one in arguments:
        if type(one).__module__.startswith("transformers."):
            parts = (getattr(one, name, None) for name in ("self_attention_cache", "cross_attention_cache"))
            yield from (part for part in (one, *parts) if isinstance(getattr(part, "layers", None), list))


def filled(call: AnyCall, buffers: list[Buffer]) -> AnyCall:
    """The call without the keys of unfilled slots, which the model hides one way or another."""
    if not buffers or not isinstance(call, Call):
        return call
    n = next((_length(each) for each in buffers if _is(each, call.k)), call.k.shape[2])
    known = (isinstance(rule, (Tensor, BlockRule)) or rule == causal_upper_left() for rule in call.masks)
    if n >= call.k.shape[2] or not all(known) or not all(isinstance(bias, Tensor) for bias in call.biases):
        return call
    return replace(
        call,
        k=call.k[:, :, :n],
        v=call.v[:, :, :n],
        masks=tuple(_first(rule, n) if isinstance(rule, Tensor) else rule for rule in call.masks),
        biases=tuple(_first(bias, n) if isinstance(bias, Tensor) else bias for bias in call.biases),
    )


def is_borrowed(call: AnyCall, buffers: list[Buffer]) -> bool:
    """Whether a later step will write to the keys: they are a buffer's, or look so (room behind, or written to)."""
    return isinstance(call, Call) and (is_in_buffer(call.k) or any(_is(each, call.k) for each in buffers))


def is_in_buffer(k: Tensor) -> bool:
    """Whether keys look as if a buffer held them."""
    return _has_room(k) or version_of(k) > 0


def _has_room(k: Tensor) -> bool:
    """Whether there are more slots in memory behind the last key: what comes next lies further on than that."""
    *outer, step, _ = k.stride()
    following = min((stride for stride in outer if stride >= step), default=0)
    return following > k.shape[2] * step > 0


def _is(buffer: Buffer, k: Tensor) -> bool:
    """Whether these are the buffer's keys; told by the shape where an offloaded cache has moved them away since."""
    keys = buffer.keys
    if not isinstance(keys, Tensor):
        return False
    return keys.data_ptr() == k.data_ptr() if keys.device == k.device else keys.shape == k.shape


def _length(buffer: Buffer) -> int:
    return int(buffer.get_seq_length())


def _first(tensor: Tensor, n: int) -> Tensor:
    """A mask or a bias (B or 1, H or 1, T or 1, S or 1) of the first n keys."""
    return tensor[..., :n]
