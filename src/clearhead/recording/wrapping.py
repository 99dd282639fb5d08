"""Replacing an attribute of somebody else's class for a while: counted, undone, and never undone too early.

Several blocks (nested, or in several threads) may need the same replacement: the first one in makes it, the
last one out takes it back. Whoever replaced the attribute again in between keeps what they put there: our
wrapper below it does nothing once no block is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Replacement"]

Function = Callable[..., Any]

_lock = threading.RLock()
_MISSING = object()


class Replacement:
    """`owner.name` becomes `wrap(owner.name)` while at least one `held()` block is open."""

    def __init__(self, owner: type, name: str, wrap: Callable[[Function], Function]) -> None:
        self._owner, self._name, self._wrap = owner, name, wrap
        self._holders = 0
        self._own: Any = _MISSING  # what the owner's own namespace held before
        self._ours: Any = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the replacement; it is taken back when the last holder leaves, whatever the reason."""
        with _lock:
            self._acquire()
        try:
            yield
        finally:
            with _lock:
                self._release()

    def _acquire(self) -> None:
        if self._holders == 0:
            self._own = vars(self._owner).get(self._name, _MISSING)
            self._ours = self._wrap(getattr(self._owner, self._name))
            setattr(self._owner, self._name, self._ours)
        self._holders += 1

    def _release(self) -> None:
        self._holders -= 1
        if self._holders == 0 and vars(self._owner).get(self._name) is self._ours:
            if self._own is _MISSING:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._own)
