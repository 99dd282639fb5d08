"""Changing something of somebody else's for a while: counted, undone, and never undone too early.

Several blocks (nested, overlapping, or in several threads) may need the same change: the first one in makes it,
the last one out takes it back.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Counted", "Replacement"]

Function = Callable[..., Any]

_lock = threading.RLock()
_MISSING = object()


class Counted(ABC):
    """A change that is in force while at least one `held()` block is open."""

    _holders = 0

    @abstractmethod
    def make(self) -> None:
        """Make the change: the first block opens."""

    @abstractmethod
    def undo(self) -> None:
        """Take it back: the last block closes."""

    @property
    def is_held(self) -> bool:
        """Whether the change is in force."""
        return self._holders > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the change; it is taken back when the last holder leaves, whatever the reason."""
        with _lock:
            if self._holders == 0:
                self.make()
            self._holders += 1
        try:
            yield
        finally:
            with _lock:
                self._holders -= 1
                if self._holders == 0:
                    self.undo()


class Replacement(Counted):
    """`owner.name` becomes `wrap(owner.name)`.

    Whoever replaced the attribute again in between keeps what they put there: our wrapper below it does nothing
    once no block is open.
    """

    def __init__(self, owner: object, name: str, wrap: Callable[[Function], Function]) -> None:
        self._owner: Any = owner
        self._name, self._wrap = name, wrap
        self._own: Any = _MISSING  # what the owner's own namespace held before
        self._ours: Any = None

    def __str__(self) -> str:
        return f"{getattr(self._owner, '__name__', type(self._owner).__name__)}.{self._name}"

    @property
    def possible(self) -> bool:
        """Whether there is something to replace."""
        return hasattr(self._owner, self._name)

    def make(self) -> None:
        self._own = vars(self._owner).get(self._name, _MISSING)
        self._ours = self._wrap(getattr(self._owner, self._name))
        setattr(self._owner, self._name, self._ours)

    def undo(self) -> None:
        if vars(self._owner).get(self._name) is not self._ours:
            return
        if self._own is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)
