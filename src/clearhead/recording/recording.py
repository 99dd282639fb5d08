"""What a block has seen: passes (calls of the model), each a sequence of layer maps."""

from __future__ import annotations

import difflib
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

from torch import Tensor

from clearhead._format import size
from clearhead._watch import Watched
from clearhead.errors import RecordingError
from clearhead.maps import SoftmaxMap
from clearhead.masks import MaskRule
from clearhead.recording.calls import Call

__all__ = ["Layer", "Pass", "Recording"]


class Layer:
    """One attention call of a pass: its number, its module, and its map, made when first asked for."""

    def __init__(self, number: int, path: str, call: Call, padding: MaskRule | None) -> None:
        self.number, self.path = number, path
        self._call, self._padding = call, padding
        self.made_from = tuple(call.tensors())  # every tensor the map reads
        self._watched = Watched(self.made_from)  # from the call on: the map, which watches too, is made later

    def __reduce__(self) -> tuple[Any, ...]:
        """As a copy or a pickle, whose tensors count their versions anew."""
        self._check_unchanged()
        return Layer, (self.number, self.path, self._call, self._padding)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, T, S)."""
        return (*self._call.q.shape[:3], self._call.k.shape[2])

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the weights as a tensor."""
        return math.prod(self.shape) * max(4, self._call.q.element_size())

    @cached_property
    def _map(self) -> SoftmaxMap:
        return self._call.to_map(self._padding)

    def read(self) -> SoftmaxMap:
        """The map; RecordingError if a tensor that it reads was written to since the call."""
        self._check_unchanged()
        return self._map

    def _check_unchanged(self) -> None:
        if self._watched.changed:
            raise RecordingError(
                f"the map of layer {self.number} ({self.path!r}) can no longer be read: its q, k, v, mask or bias was"
                " overwritten in place after the call (a static cache does so at each step, an optimiser at each"
                " update). Read it before that."
            )


class _Maps(Sequence[SoftmaxMap]):
    """What a pass and a recording of one pass have in common."""

    @abstractmethod
    def _kept(self, asked: str) -> list[Layer]:
        """The layers to speak of; `asked` restates the question for an error."""

    def __len__(self) -> int:
        return len(self._kept("len(recording)"))

    def __iter__(self) -> Iterator[SoftmaxMap]:
        return (layer.read() for layer in self._kept("iteration"))

    @overload
    def __getitem__(self, index: int | str | tuple[str, int]) -> SoftmaxMap: ...
    @overload
    def __getitem__(self, index: slice) -> list[SoftmaxMap]: ...
    def __getitem__(self, index: int | str | tuple[str, int] | slice) -> SoftmaxMap | list[SoftmaxMap]:
        """A map by position, module path, or (path, number of its call); a list of maps by a slice."""
        kept = self._kept(f"recording[{index!r}]")
        if isinstance(index, slice):
            return [layer.read() for layer in kept[index]]
        if isinstance(index, str):
            return _only(kept, index).read()
        if isinstance(index, tuple) and len(index) == 2 and isinstance(index[0], str):
            return _at(_of(kept, index[0]), index[1], f"recording[{index!r}]").read()
        return _at(kept, index, f"recording[{index!r}]").read()

    @property
    def paths(self) -> list[str]:
        """The module path of each map."""
        return [layer.path for layer in self._kept("recording.paths")]

    @property
    def layers(self) -> list[int]:
        """The number of each map: its index among all attention calls of the pass."""
        return [layer.number for layer in self._kept("recording.layers")]

    @property
    def attentions(self) -> tuple[SoftmaxMap, ...]:
        """The maps in the order of transformers' `output_attentions`, lazy."""
        return tuple(self)

    @property
    def dense_nbytes(self) -> int:
        """Bytes that the weights would take as tensors, as `output_attentions` makes them."""
        return sum(layer.dense_nbytes for layer in self._kept("recording.dense_nbytes"))

    @property
    def nbytes(self) -> int:
        """Bytes that are held: each storage once, however many maps share it (a mask, a fused qkv)."""
        return _held(self._kept("recording.nbytes"))

    def to_attentions(self, *, max_bytes: int = 1_000_000_000) -> tuple[Tensor, ...]:
        """The dense weights of every layer, each (B, H, T, S): what transformers returns and BertViz takes.

        Raises RecordingError where they would take more than `max_bytes`.
        """
        if self.dense_nbytes > max_bytes:
            raise RecordingError(
                f"to_attentions(max_bytes={max_bytes:,}): the dense weights take {self.dense_nbytes:,} bytes"
                f" ({size(self.dense_nbytes)}). Allow that many, record fewer layers (record(model, layers=[…])),"
                " or read the lazy maps in recording.attentions."
            )
        return tuple(attn.to_dense() for attn in self)


class Pass(_Maps):
    """One call of the recorded model: its maps in the order of the attention calls."""

    def __init__(self) -> None:
        self._layers: list[Layer] = []

    def add(self, layer: Layer) -> None:
        """Append the next attention call."""
        self._layers.append(layer)

    def _kept(self, asked: str) -> list[Layer]:
        return self._layers

    def __repr__(self) -> str:
        return f"Pass({_summary(self._layers)})"


class Recording(_Maps):
    """What `clearhead.record` has seen.

    A sequence of layer maps where the model was called once; `.passes` holds one such sequence per call. Maps
    are indexed by position (`recording[17]`, `recording[-1]`, `recording[2:5]`) or module path.
    """

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    def _kept(self, asked: str) -> list[Layer]:
        if len(self.passes) == 1:
            return self.passes[0]._kept(asked)
        if not self.passes:
            raise RecordingError(f"{asked}: nothing is recorded; no call of the model has ended in this block yet.")
        raise RecordingError(
            f"{asked}: the model was called {len(self.passes)} times in this block."
            f" Say which call: recording.passes[0] … recording.passes[{len(self.passes) - 1}]."
        )

    @property
    def nbytes(self) -> int:
        """Bytes that are held by all passes: each storage once."""
        return _held([layer for each in self.passes for layer in each._kept("recording.nbytes")])

    @property
    def dense_nbytes(self) -> int:
        """Bytes that the weights of all passes would take as tensors."""
        return sum(each.dense_nbytes for each in self.passes)

    def __repr__(self) -> str:
        if len(self.passes) == 1:
            return f"Recording({_summary(self._kept('repr'))})"
        return f"Recording(passes={len(self.passes)}; holds {size(self.nbytes)})"


def _summary(layers: list[Layer]) -> str:
    dense = sum(layer.dense_nbytes for layer in layers)
    shapes = sorted({layer.shape for layer in layers})
    shape = f", each {shapes[0]}" if len(shapes) == 1 else ""
    return f"layers={len(layers)}{shape}; holds {size(_held(layers))}, dense {size(dense)}"


def _held(layers: list[Layer]) -> int:
    storages = (tensor.untyped_storage() for layer in layers for tensor in layer.made_from)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _at(kept: list[Layer], index: int, asked: str) -> Layer:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(
            f"{asked}: expected the position of a layer, its module path, or (path, number of the call). Heads, queries"
            " and keys come after it: recording[17][0, 5, -1]."
        )
    if not -len(kept) <= index < len(kept):
        numbers = [layer.number for layer in kept]
        raise IndexError(f"{asked}: there are {len(kept)} maps here, of layers {shorten(numbers)}.")
    return kept[index]


def _of(kept: list[Layer], path: str) -> list[Layer]:
    found = [layer for layer in kept if layer.path == path]
    if not found:
        paths = list(dict.fromkeys(layer.path for layer in kept))
        near = difflib.get_close_matches(path, paths, n=3, cutoff=0.4) or paths[:3]
        raise RecordingError(
            f"recording[{path!r}]: no attention call of that module. Near: {', '.join(map(repr, near))};"
            " recording.paths lists all."
        )
    return found


def _only(kept: list[Layer], path: str) -> Layer:
    found = _of(kept, path)
    if len(found) > 1:
        raise RecordingError(
            f"recording[{path!r}]: the module was called {len(found)} times in this pass, as layers"
            f" {shorten([layer.number for layer in found])}. Say which: recording[{path!r}, 0], or by layer."
        )
    return found[0]


def shorten(numbers: Sequence[int]) -> str:
    """Numbers for a message: 0, 1, 2, …, 29.

    >>> shorten(range(30))
    '0, 1, 2, …, 29'
    """
    if len(numbers) <= 6:
        return ", ".join(map(str, numbers)) or "none"
    return ", ".join([*map(str, numbers[:3]), "…", str(numbers[-1])])
