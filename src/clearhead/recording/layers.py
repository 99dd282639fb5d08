"""What is kept of an attention call, and of one layer over the calls of a text that grows.

A generating model calls each layer once a step, with one query and all keys so far. The keys of a step are those of
the step before and one more, so a layer has one tensor of keys, always the latest, and its earlier calls read the
beginning of it; of the calls themselves the queries are kept, and what hides or moves their scores.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead._watch import Watched
from clearhead.errors import RecordingError
from clearhead.maps import AttentionMap
from clearhead.masks import MaskRule
from clearhead.recording.calls import AnyCall, Call
from clearhead.recording.steps import Step, stitched

__all__ = ["Joined", "Kept", "Layer", "Link", "Reduced"]


class Kept(ABC):
    """One layer of a pass or of a text: its number, its module, and its map, made when first asked for."""

    number: int
    path: str
    shape: tuple[int, ...]  # (B, H, T, S)
    itemsize: int  # bytes of one weight

    @property
    @abstractmethod
    def made_from(self) -> tuple[Tensor, ...]:
        """Every tensor that the map reads."""

    @abstractmethod
    def read(self) -> AttentionMap:
        """The map; RecordingError where it cannot be read any more."""

    @property
    def label(self) -> str:
        """L17, zero-based."""
        return f"L{self.number}"

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the weights as a tensor."""
        return math.prod(self.shape) * self.itemsize


class Link(Enum):
    """How the keys of a call stand to those that its layer had in the pass before."""

    NONE = "others"
    SAME = "the same"  # cross-attention, whose keys are made once
    GROWN = "those and one more for each query, or the last of those where the cache slides"


class Keys:
    """The keys of a layer, (B, G, S, D): a longer tensor takes the place of the one whose rows it begins with."""

    def __init__(self, k: Tensor, *, borrowed: bool = False) -> None:
        self.take(k, borrowed=borrowed)

    def take(self, k: Tensor, *, borrowed: bool = False) -> None:
        """Keep this tensor from now on, or a copy if it is `borrowed`: a buffer that the next step writes to."""
        self.address = k.data_ptr()
        self.k = k.clone() if borrowed else k
        self._watched = Watched([self.k], numbers=True)

    @property
    def changed(self) -> bool:
        """Whether somebody wrote to the keys since."""
        return self._watched.changed

    def part(self, cols: slice) -> Tensor:
        """A range of the keys, a view."""
        if cols == slice(0, self.k.shape[2]):
            return self.k
        with torch.enable_grad():  # whoever reads it first, later readers may want gradients
            return self.k[:, :, cols]

    def holds(self, k: Tensor, cols: slice) -> bool:
        """Whether these are the keys in this range, to the bit."""
        return k.shape[2] == cols.stop - cols.start and torch.equal(*_bits(k, self.k[:, :, cols]))

    def __reduce__(self) -> tuple[Any, ...]:
        """As a copy or a pickle, whose tensors lie elsewhere."""
        return Keys, (self.k,)


def _bits(*tensors: Tensor) -> list[Tensor]:
    """The same memory as integers of 8 bytes where it divides evenly: compared in half the time, and NaN is itself."""
    n = 8 // tensors[0].element_size()
    even = all(x.stride(-1) == 1 and not any(at % n for at in (x.storage_offset(), *x.stride()[:-1])) for x in tensors)
    even = even and tensors[0].shape[-1] % n == 0
    return [x.detach().view(torch.int64) if even else x for x in tensors]


class Layer(Kept):
    """One attention call of a pass, which may go on from the call `before` it, of the same layer."""

    def __init__(
        self,
        number: int,
        path: str,
        call: AnyCall,
        padding: MaskRule | None,
        *,
        before: Layer | None = None,
        borrowed: bool = False,  # k and v are buffers that will be overwritten
        overwritten: bool = False,  # what the map reads was written to already
    ) -> None:
        self.number, self.path, self.shape, self.padding = number, path, call.shape, padding
        self._overwritten = overwritten
        self._keys, self.cols, self.link = None, slice(0, self.shape[3]), Link.NONE
        if isinstance(call, Call):
            self._keys, self.cols, self.link = _keys_of(call, before, borrowed)
            call = replace(call, k=call.no_keys, v=call.no_keys) if borrowed else call
        self._set(_slim(call) if self.link is Link.GROWN else call)
        if self.link is Link.GROWN and before is not None and before.link is not Link.GROWN:
            before._set(_slim(before._call))
            vars(before).pop("_map", None)

    def _set(self, call: AnyCall) -> None:
        self._call = call  # without its keys, where they are others' too
        # From the call on: the map, which watches too, is made later.
        self._watched = Watched(call.tensors(), numbers=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """As a copy or a pickle, whose tensors count their versions anew; layers go on sharing their keys."""
        self._check_unchanged()
        return _restored, (self.number, self.path, self._call, self.padding, self._keys, self.cols, self.link)

    @property
    def itemsize(self) -> int:  # type: ignore[override]  # of others it is known when they are made
        return max(4, next(self._call.tensors()).element_size())

    @property
    def call(self) -> AnyCall:
        """The call, its keys included."""
        if self._keys is None or not isinstance(self._call, Call):
            return self._call
        k = self._keys.part(self.cols)
        return self._call if k is self._call.k else replace(self._call, k=k)

    @property
    def made_from(self) -> tuple[Tensor, ...]:
        return (*self.call.tensors(), *(() if self.padding is None else self.padding.tensors()))

    @property
    def has_keys(self) -> bool:
        """Whether the keys are known, and not the weights alone."""
        return self._keys is not None

    @property
    def changed(self) -> bool:
        """Whether a tensor that the map reads was written to since the call."""
        return self._overwritten or self._watched.changed or (self._keys is not None and self._keys.changed)

    @cached_property
    def _map(self) -> AttentionMap:
        return self.call.to_map(self.padding)

    def read(self) -> AttentionMap:
        """The map; RecordingError if a tensor that it reads was written to since the call."""
        self._check_unchanged()
        return self._map

    def _check_unchanged(self) -> None:
        if self.changed:
            raise RecordingError(
                f"the map of layer {self.number} ({self.path!r}) can no longer be read: its q, k, v, weights, mask"
                " or bias was overwritten in place after the call (a cache in one buffer does so at each step, an"
                " optimiser at each update). Read it before that."
            )


def _slim(call: AnyCall) -> AnyCall:
    """Of a call of a growing text its queries only, not what they were computed together with."""
    if not isinstance(call, Call):
        return call
    q = call.q
    q = q if q.requires_grad or q.untyped_storage().nbytes() == q.nbytes else q.clone()
    return replace(call, q=q, k=call.no_keys, v=call.no_keys)


def _restored(number: int, path: str, call: AnyCall, padding: Any, keys: Keys | None, cols: slice, link: Link) -> Layer:
    layer = Layer.__new__(Layer)
    layer.number, layer.path, layer.padding, layer.cols, layer.link = number, path, padding, cols, link
    layer._keys, layer._overwritten = keys, False
    layer._set(call)
    layer.shape = layer.call.shape
    return layer


def _keys_of(call: Call, before: Layer | None, borrowed: bool) -> tuple[Keys, slice, Link]:
    """The keys of a call, which of them it reads, and how they stand to those of the call before."""
    (T, S), k = call.shape[-2:], call.k
    keys = None if before is None or before.changed else before._keys
    if before is None or keys is None or not _alike(k, keys.k):
        return Keys(k, borrowed=borrowed), slice(0, S), Link.NONE
    known, stop = S - T, before.cols.stop
    if k.data_ptr() == keys.address and keys.holds(k, before.cols):
        return keys, before.cols, Link.SAME
    if not (1 <= known <= stop and T and keys.holds(k[:, :, :known], slice(stop - known, stop))):
        return Keys(k, borrowed=borrowed), slice(0, S), Link.NONE
    if known == stop:
        keys.take(k, borrowed=borrowed)
    else:  # a cache that slides hands out the last keys only
        keys.take(torch.cat([keys.k[:, :, :stop], k[:, :, known:]], 2))
    return keys, slice(stop - known, stop + T), Link.GROWN


def _alike(k: Tensor, other: Tensor) -> bool:
    """Whether two tensors of keys differ in their number alone."""
    same_width = k.shape[:2] == other.shape[:2] and k.shape[3] == other.shape[3]
    return same_width and k.dtype == other.dtype and k.device == other.device


class Joined(Kept):
    """One layer over the passes of a text: its calls as one map over all of its tokens."""

    def __init__(self, calls: list[Layer]) -> None:
        first = calls[0]
        self.number, self.path, self.itemsize, self._calls = first.number, first.path, first.itemsize, calls
        keys = max(call.cols.stop for call in calls) - min(call.cols.start for call in calls)
        self.shape = (*first.shape[:2], sum(call.shape[2] for call in calls), keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, (self._calls,)

    @property
    def made_from(self) -> tuple[Tensor, ...]:
        return tuple(tensor for call in self._calls for tensor in call.made_from)

    @cached_property
    def _map(self) -> AttentionMap:
        first = min(call.cols.start for call in self._calls)
        return stitched([Step(call.call, call.padding, call.cols.start - first) for call in self._calls])

    def read(self) -> AttentionMap:
        """The map; RecordingError if a tensor that it reads was written to since its call."""
        for call in self._calls:
            call._check_unchanged()
        return self._map


class Reduced(Kept):
    """A layer of which the result of `keep` is kept, and not the map."""

    def __init__(self, layer: Layer) -> None:
        self.number, self.path, self.shape, self.itemsize = layer.number, layer.path, layer.shape, layer.itemsize

    @property
    def made_from(self) -> tuple[Tensor, ...]:
        return ()

    def read(self) -> AttentionMap:
        """Never possible."""
        raise RecordingError(
            f"the map of layer {self.number} ({self.path!r}) was not kept: record(keep=…) reduced it as it was made."
            f" Its result is recording.results[{self.label!r}]; without keep= the maps are kept."
        )
