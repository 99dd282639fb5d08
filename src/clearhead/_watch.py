"""Tensors kept by reference: which ones an object holds, and whether somebody wrote to them since."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.errors import RecordingError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HoldsTensors", "Watched", "version_of"]


class HoldsTensors:
    """A rule made of numbers, tensors and other rules."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor in it, those of the rules it is made of included."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, HoldsTensors):
                yield from value.tensors()

    def made_of(self, tensors: Iterator[Tensor]) -> Self:
        """The same rule with other tensors in the place of its own, in the order of `tensors()`."""
        made = copy.copy(self)
        for name, value in vars(self).items():
            other: Any = value
            if isinstance(value, Tensor):
                other = next(tensors)
            elif isinstance(value, HoldsTensors):
                other = value.made_of(tensors)
            object.__setattr__(made, name, other)  # rules are frozen
        return made


class Watched:
    """Tensors with the versions they had when the watch began."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._seen = [(tensor, version_of(tensor)) for tensor in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are watched."""
        return [tensor for tensor, _ in self._seen]

    @property
    def changed(self) -> bool:
        """Whether one of them was written to in place since."""
        return any(version_of(tensor) != version for tensor, version in self._seen)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient may be asked of one of them."""
        return any(tensor.requires_grad for tensor, _ in self._seen)

    def __getstate__(self) -> list[Tensor]:
        if self.changed:
            raise RecordingError("a map whose tensors were overwritten cannot be copied: its weights are lost.")
        return [tensor for tensor, _ in self._seen]

    def __setstate__(self, tensors: list[Tensor]) -> None:
        """Copied or unpickled tensors count their versions anew."""
        self.__init__(tensors)  # type: ignore[misc]


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to; inference tensors and those of a traced graph do not count."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version
