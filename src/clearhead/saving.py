"""Recordings in a folder: maps and their numbers, to be opened later without the model.

A folder holds `recording.json` and one safetensors file a layer. The files are mapped into memory: what nobody reads is
never loaded. The folder appears whole or not at all, and nothing in it is ever run as code.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead import scores
from clearhead._files import why_no_folder
from clearhead._version import __version__
from clearhead._watch import Watched
from clearhead.errors import RecordingError
from clearhead.maps import AdditiveMap, DenseMap, HeadAverage, LinearMap, SoftmaxMap, Stitched
from clearhead.maps.base import Selection, Uniform
from clearhead.maps.composed import OneSequence, _Part
from clearhead.maps.replaced import Nothing, Previous, Replaced
from clearhead.masks import Band, Both, positions, rule, sequences, sparse

__all__ = ["FORMAT", "fitting", "is_recording", "load_folder", "save_folder"]

FORMAT = 3  # to be raised with every change of what the classes below hold: a test knows the names
CHECKED = 1_000_000_000  # bytes of tensors that are read through when a folder is opened: a second from a slow disk
_INDEX = "recording.json"
_HINT = 'saving and opening recordings needs safetensors: pip install "clearhead[page]"'

# What a recording may be made of. Of each, all attributes are written, and put back without calling anything.
_CLASSES: dict[str, type] = {
    one.__name__: one
    for one in (
        *(SoftmaxMap, AdditiveMap, LinearMap, DenseMap, HeadAverage, OneSequence, Stitched, _Part, Selection, Uniform),
        *(Replaced, Previous, Nothing),
        *(Band, Both, positions.FirstTokens, rule.Dense, rule.Either, rule.Not, sequences.Documents, sequences.Padding),
        *(sparse.BlockSparse, sparse.GlobalTokens, sparse.Strided),
        *(scores.ALiBi, scores.DenseBias, scores.Hidden, scores.Sum, scores.T5Bias),
    )
}


# --- writing --------------------------------------------------------------------------------------------------------


def save_folder(folder: Path, facts: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> None:
    """Write facts, and one mapping a layer: of numbers, text, tensors, arrays, maps, and lists and dicts of them.

    Raises RecordingError where something in it cannot be written, or the folder is there already; OSError.
    Cost: what is written, and memory for one tensor that is not contiguous.
    """
    why = why_no_folder(folder)
    if why is not None:
        raise RecordingError(f"{why}.")
    there = folder.is_dir()
    part = (folder if there else folder.absolute().parent) / f".clearhead-{secrets.token_hex(8)}"
    part.mkdir()
    try:
        _write(part, facts, layers)
        if there:
            _move_up(part)
        else:
            os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _move_up(part: Path) -> None:
    """Move all files into the folder above, the index last: it makes a recording of them.

    That folder is not replaced: it may be a link, a disk of its own, or where somebody's shell stands.
    """
    moved: list[Path] = []
    try:
        for path in sorted(part.iterdir(), key=lambda path: path.name == _INDEX):
            moved.append(part.parent / path.name)
            os.replace(path, moved[-1])
        part.rmdir()
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _write(folder: Path, facts: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> None:
    writer = _Writer(folder)
    told = {"facts": writer.value(facts), "layers": [writer.layer(layer) for layer in layers], "files": writer.files}
    index = {"format": FORMAT, "clearhead": __version__, "sha256": _digest(told), "told": told}
    (folder / _INDEX).write_text(_json(index), encoding="ascii", newline="")
    for name in writer.files:  # which safetensors lets nobody else read
        shutil.copymode(folder / _INDEX, folder / name)


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _digest(told: Any) -> str:
    """What shows that an index was changed by accident; it is no signature."""
    return hashlib.sha256(_json(told).encode("ascii")).hexdigest()


class _Writer:
    """Turns values into JSON and tensors into files; a tensor that several maps share is written once."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, list[int]] = {}  # bytes and checksum
        self._folder, self._names = folder, dict[Any, str]()
        self._pending: dict[str, Tensor] = {}
        self._alive: list[Tensor] = []  # an address names a tensor only while that lives

    def layer(self, layer: Mapping[str, Any]) -> Any:
        """The JSON of one layer, whose tensors become a file."""
        told = self.value(layer)
        try:
            from safetensors.torch import save_file
        except ImportError:
            raise ImportError(_HINT) from None
        path = self._folder / _file(len(self.files))
        save_file({name: _stored(tensor) for name, tensor in self._pending.items()}, path)
        self.files[path.name] = [path.stat().st_size, _checksum(path)]
        self._pending = {}
        return told

    def value(self, value: Any) -> Any:
        """What JSON can hold."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.ndarray):
            return {"array": self.value(torch.from_numpy(value))}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [self.value(one) for one in value]}
        if isinstance(value, slice):
            return {"slice": [value.start, value.stop]}
        if isinstance(value, Watched):
            return {"watched": [self.value(one) for one in value.tensors]}
        if isinstance(value, Mapping):
            return {"dict": {str(name): self.value(one) for name, one in value.items()}}
        name = type(value).__name__
        if _CLASSES.get(name) is not type(value):
            raise RecordingError(
                f"a recording that holds {value!r:.80} ({name}) cannot be saved: a function, or a class of your own, is"
                " not data. Maps of queries, keys, weights and the rules of clearhead.masks and clearhead.scores are."
            )
        return {name: {field: self.value(one) for field, one in vars(value).items()}}

    def _tensor(self, tensor: Tensor) -> Any:
        """Its name, its shape, and along which dimensions it repeats itself."""
        tensor = tensor.detach()
        dims = list(zip(tensor.shape, tensor.stride(), strict=True))
        strides = tuple((n, stride) for n, stride in dims if n > 1 and stride)
        key = (tensor.data_ptr(), tensor.dtype, strides) if tensor.numel() else object()
        if key not in self._names:
            self._names[key] = f"{len(self.files)}.{len(self._pending)}"
            self._pending[self._names[key]] = tensor
            self._alive.append(tensor)
        repeated = [dim for dim, (n, stride) in enumerate(dims) if n > 1 and not stride]
        return {"tensor": [self._names[key], list(tensor.shape), repeated]}


def _stored(tensor: Tensor) -> Tensor:
    """Without the dimensions along which it repeats itself, in one piece that is its own: files share no memory."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor if stride or not tensor.shape[dim] else tensor.narrow(dim, 0, 1)
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _file(n: int) -> str:
    return f"layer-{n:04}.safetensors"


# --- reading --------------------------------------------------------------------------------------------------------


def is_recording(folder: Path) -> bool:
    """Whether this is a folder that `save_folder` has written."""
    return (folder / _INDEX).is_file()


def load_folder(folder: Path, *, check: bool | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The facts and layers of a folder. Its tensors are read from the disk when they are used.

    Args: check: read all of them now and compare their checksums; by default up to `CHECKED` bytes in all.
    Raises RecordingError where the folder is not there, cut short, damaged, or of another version.
    Cost: the checksums take 0.3 s a gigabyte, and the time in which the disk reads it.
    """
    if not folder.is_dir():
        raise RecordingError(
            f"there is no recording {folder}: no such folder. `clearhead look --save-recording {folder}` makes one."
        )
    told = _index(folder)
    with fitting(folder):
        found = _told(folder, told["facts"], told["layers"], told["files"], check)
    return found


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Where what was read does not fit together, say so: an index may be of other hands, or of another state."""
    try:
        yield
    except (RecordingError, ImportError, OSError):
        raise
    except Exception as error:
        raise _damaged(folder, f"its parts do not fit together ({type(error).__name__}: {error})") from error


def _told(
    folder: Path, facts: Any, layers: Any, files: Any, check: bool | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    names = [_file(n) for n in range(len(files))]
    if list(files) != names:
        raise _damaged(folder, f"{_INDEX} names files that no recording has")
    wanted = sum(nbytes for nbytes, _ in files.values()) <= CHECKED if check is None else check
    for name in names:
        _check_file(folder, name, *files[name], check=wanted)
    with ExitStack() as stack:
        reader = _Reader([_open(folder / name, stack) for name in names])
        return reader.value(facts), [reader.value(layer) for layer in layers]


def _index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / _INDEX).read_text("ascii"))
        version = index["format"]
        whole = version != FORMAT or index["sha256"] == _digest(index["told"])
    except FileNotFoundError:
        raise RecordingError(f"{folder} is no recording: there is no {_INDEX} in it.") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise _damaged(folder, f"{_INDEX} is cut short or was changed")
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        what = "a newer clearhead: update this one, or" if newer else "another clearhead:"
        raise RecordingError(
            f"the recording {folder} has format {version!r}, this clearhead reads {FORMAT}. It was written by {what}"
            " record it anew."
        )
    told: dict[str, Any] = index["told"]
    return told


def _check_file(folder: Path, name: str, nbytes: int, checksum: int, *, check: bool) -> None:
    path = folder / name
    if not path.is_file():
        raise _damaged(folder, f"{name} is missing")
    if path.stat().st_size != nbytes:
        raise _damaged(folder, f"{name} has {path.stat().st_size:,} bytes instead of {nbytes:,}")
    if check and _checksum(path) != checksum:
        raise _damaged(folder, f"the numbers in {name} are not those that were written")


def _checksum(path: Path) -> int:
    """What shows that bytes were changed by accident: CRC-32, three times as fast as SHA-256."""
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _damaged(folder: Path, why: str) -> RecordingError:
    return RecordingError(f"the recording {folder} is damaged: {why}. Copy the folder again, or record it anew.")


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(_HINT) from None
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except SafetensorError as error:
        raise _damaged(path.parent, f"{path.name}: {error}") from None


class _Reader:
    """Turns JSON back into values; a tensor that several maps share is one tensor again."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._files, self._tensors = files, dict[str, Tensor]()

    def value(self, told: Any) -> Any:
        """The value that `_Writer.value` was given."""
        if not isinstance(told, dict):
            return told
        ((kind, content),) = told.items()
        if kind in _CLASSES:
            made: Any = object.__new__(_CLASSES[kind])
            for name, one in content.items():
                object.__setattr__(made, name, self.value(one))  # rules are frozen
            return made
        return _KINDS[kind](self, content)

    def _many(self, content: list[Any]) -> list[Any]:
        return [self.value(one) for one in content]

    def _tensor(self, content: tuple[str, list[int], list[int]]) -> Tensor:
        name, shape, repeated = content
        if name not in self._tensors:
            self._tensors[name] = self._files[int(name.split(".")[0])].get_tensor(name)
        once = [1 if dim in repeated else n for dim, n in enumerate(shape)]
        return self._tensors[name].reshape(once).expand(shape)


_KINDS: dict[str, Callable[[_Reader, Any], Any]] = {
    "array": lambda reader, content: reader.value(content).numpy(),
    "dict": lambda reader, content: {name: reader.value(one) for name, one in content.items()},
    "list": _Reader._many,
    "slice": lambda reader, content: slice(*content),
    "tensor": _Reader._tensor,
    "tuple": lambda reader, content: tuple(reader._many(content)),
    "watched": lambda reader, content: Watched(reader._many(content)),
}
