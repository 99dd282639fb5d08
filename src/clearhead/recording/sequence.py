"""A sequence of layer maps, by position, module path and side: what passes, texts and recordings have in common."""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

from torch import Tensor

from clearhead._format import size
from clearhead.errors import RecordingError
from clearhead.maps import AttentionMap
from clearhead.recording.layers import Kept
from clearhead.recording.sides import Side, side_of

__all__ = ["Group", "Maps", "held", "shorten", "some", "summary"]


class Maps(Sequence[AttentionMap]):
    """A sequence of layer maps: what a pass, a text, a recording of one text, and a side of them have in common."""

    @abstractmethod
    def _kept(self, asked: str) -> list[Kept]:
        """The layers to speak of; `asked` restates the question for an error."""

    def __len__(self) -> int:
        return len(self._kept("len(recording)"))

    def __iter__(self) -> Iterator[AttentionMap]:
        return (layer.read() for layer in self._kept("iteration"))

    @overload
    def __getitem__(self, index: int | str | tuple[str, int]) -> AttentionMap: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionMap]: ...
    def __getitem__(self, index: int | str | tuple[str, int] | slice) -> AttentionMap | list[AttentionMap]:
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
    def labels(self) -> list[str]:
        """The label of each map: L17 is layer 17, whose head 5 is L17H5."""
        return [layer.label for layer in self._kept("recording.labels")]

    @property
    def encoder(self) -> Group:
        """The maps of an encoder-decoder's encoder."""
        return self._side("encoder")

    @property
    def decoder(self) -> Group:
        """The self-attention of an encoder-decoder's decoder."""
        return self._side("decoder")

    @property
    def cross(self) -> Group:
        """The cross-attention of an encoder-decoder's decoder: queries of the target, keys of the source."""
        return self._side("cross")

    def _side(self, side: Side) -> Group:
        layers = self._kept(f"recording.{side}")
        paths = [layer.path for layer in layers]
        found = [layer for layer in layers if side_of(layer.path, paths) == side]
        if not found:
            raise RecordingError(
                f"recording.{side}: there is no such layer here. It is for encoder-decoder models, whose modules'"
                f" paths say encoder or decoder; the paths here: {some(paths)}. All layers: recording[0] …"
            )
        return Group(found)

    @property
    def attentions(self) -> tuple[AttentionMap, ...]:
        """The maps in the order of transformers' `output_attentions`, lazy."""
        return tuple(self)

    @property
    def dense_nbytes(self) -> int:
        """Bytes that the weights would take as tensors, as `output_attentions` makes them."""
        return sum(layer.dense_nbytes for layer in self._kept("recording.dense_nbytes"))

    @property
    def nbytes(self) -> int:
        """Bytes that are held: each storage once, however many maps share it (a mask, a fused qkv)."""
        return held(self._kept("recording.nbytes"))

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


class Group(Maps):
    """Some layers of a pass or text: the encoder's, the decoder's, or those of cross-attention."""

    def __init__(self, layers: list[Kept]) -> None:
        self._layers = layers

    def _kept(self, asked: str) -> list[Kept]:
        return self._layers

    def __repr__(self) -> str:
        return f"Group({summary(self._layers)})"


# --- finding a layer ----------------------------------------------------------------------------------------


def _at(kept: list[Kept], index: int, asked: str) -> Kept:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(
            f"{asked}: expected the position of a layer, its module path, or (path, number of the call). Heads, queries"
            " and keys come after it: recording[17][0, 5, -1]."
        )
    if not -len(kept) <= index < len(kept):
        numbers = [layer.number for layer in kept]
        raise IndexError(f"{asked}: there are {len(kept)} maps here, of layers {shorten(numbers)}.")
    return kept[index]


def _of(kept: list[Kept], path: str) -> list[Kept]:
    found = [layer for layer in kept if layer.path == path]
    if not found:
        paths = list(dict.fromkeys(layer.path for layer in kept))
        near = difflib.get_close_matches(path, paths, n=3, cutoff=0.4) or paths
        raise RecordingError(
            f"recording[{path!r}]: no attention call of that module. Near: {some(near)}; recording.paths lists all."
        )
    return found


def _only(kept: list[Kept], path: str) -> Kept:
    found = _of(kept, path)
    if len(found) > 1:
        raise RecordingError(
            f"recording[{path!r}]: the module was called {len(found)} times in this pass, as layers"
            f" {shorten([layer.number for layer in found])}. Say which: recording[{path!r}, 0], or by layer."
        )
    return found[0]


# --- what is said of layers ---------------------------------------------------------------------------------


def summary(layers: list[Kept]) -> str:
    """How many layers, of which size, for a repr."""
    dense = sum(layer.dense_nbytes for layer in layers)
    shapes = sorted({layer.shape for layer in layers})
    shape = f", each {shapes[0]}" if len(shapes) == 1 else ""
    return f"layers={len(layers)}{shape}; holds {size(held(layers))}, dense {size(dense)}"


def held(layers: list[Kept]) -> int:
    """Bytes that layers hold: each storage once."""
    storages = (tensor.untyped_storage() for layer in layers for tensor in layer.made_from)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def some(paths: list[str]) -> str:
    """The first few paths for a message."""
    return ", ".join(map(repr, list(dict.fromkeys(paths))[:3])) or "none"


def shorten(numbers: Sequence[int]) -> str:
    """Numbers for a message: 0, 1, 2, …, 29.

    >>> shorten(range(30))
    '0, 1, 2, …, 29'
    """
    if len(numbers) <= 6:
        return ", ".join(map(str, numbers)) or "none"
    return ", ".join([*map(str, numbers[:3]), "…", str(numbers[-1])])
