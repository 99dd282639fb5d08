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
    """Tensors with the versions they had when the watch began.

    Inference tensors have none. With `numbers=True` a sum over them stands for it: O(their size), at each question too.

    Attributes:
        tensors: those that are watched.
    """

    def __init__(self, tensors: Iterable[Tensor], *, numbers: bool = False) -> None:
        self.tensors, self._numbers = list(tensors), numbers
        self._before = self._states()

    def _states(self) -> list[int | Tensor]:
        if torch.compiler.is_compiling():  # a traced graph counts no versions
            return [0] * len(self.tensors)
        return [self._of_inference(one) if one.is_inference() else one._version for one in self.tensors]

    def _of_inference(self, tensor: Tensor) -> int | Tensor:
        return _sum_of_bits(tensor) if self._numbers and not tensor.is_meta else 0

    @property
    def changed(self) -> bool:
        """Whether one of them was written to in place since."""
        return any(bool(now != before) for now, before in zip(self._states(), self._before, strict=True))

    @property
    def differentiable(self) -> bool:
        """Whether a gradient may be asked of one of them."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def __getstate__(self) -> tuple[list[Tensor], bool]:
        if self.changed:
            raise RecordingError("a map whose tensors were overwritten cannot be copied: its weights are lost.")
        return self.tensors, self._numbers

    def __setstate__(self, state: tuple[list[Tensor], bool]) -> None:
        """Copied or unpickled tensors count their versions anew."""
        tensors, numbers = state
        self.__init__(tensors, numbers=numbers)  # type: ignore[misc]


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to; inference tensors and those of a traced graph do not count."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Of all numbers, as integers of their size: exact, and another one for almost any other numbers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integers).sum()
