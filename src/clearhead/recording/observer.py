"""Watching one thread: which module runs, when a pass begins and ends, and where the function mode may be on.

`torch.nn.Module.__call__` and the `forward` of the model's class are replaced for the time of a block (no hook is put
on any module: a hook would switch off the fast path of nn.TransformerEncoderLayer, and would have to be taken back from
each module). The function mode that sees the other calls steps out where an earlier seam has taken over, and in again
for any module that is called there. Where every block's model attends through transformers' interface alone
(`reach.py`), the mode stays off and of all modules the model's own call is replaced: both cost time at each call.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any

from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from clearhead.recording.calls import AnyCall, Unread
from clearhead.recording.changing import Change
from clearhead.recording.functional import FunctionSeam
from clearhead.recording.models import check_eager
from clearhead.recording.wrapping import Function, Replacement

__all__ = ["Listener", "Observer", "current", "listening", "replacements"]


class Listener:
    """What a block does with what is seen in its thread. Subclasses say `begin` and `end`, and what they are for."""

    roots: tuple[nn.Module, ...]  # the model, what a compiled model wraps, encoders that are called before it
    watches_functions: bool  # attention may be called in other ways than through transformers' interface

    def begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A call of a root begins; False where one is running already (a root that calls itself)."""
        raise NotImplementedError

    def end(self, complete: bool) -> None:
        """The pass ended: completely, or by an exception."""
        raise NotImplementedError

    def see(self, call: AnyCall | Unread, module: nn.Module | None) -> None:
        """An attention call of `module` was made."""

    def change(self, module: nn.Module | None) -> Change | None:
        """What is to be changed of the attention call that `module` makes now; asked once a call, before `see`."""
        return None


_observer: ContextVar[Observer | None] = ContextVar("clearhead_observer", default=None)


def current() -> Observer | None:
    """The observer of this thread, if a block is open in it; one in a context copied from elsewhere is not."""
    observer = _observer.get()
    if observer is None or not observer.listeners or observer.thread != threading.get_ident():
        return None
    return observer


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report to `listener` what this thread does; blocks may close in any order, and in another context."""
    observer = current() or Observer()
    _observer.set(observer)
    observer.listen([*observer.listeners, listener])
    try:
        yield
    finally:
        observer.listen([one for one in observer.listeners if one is not listener])
        if not observer.listeners and _observer.get() is observer:
            _observer.set(None)


class Observer:
    """The blocks that are open in one thread, and where that thread is."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.listen([])
        self.modules: list[nn.Module] = []  # running now, outermost first
        self.running = 0  # passes that are open
        self.inside = False  # within an attention call that an earlier seam has taken
        self.reporting: dict[Function, Function] = {}  # what seam 1 gives out in the place of attention functions
        self._present = False  # whether the function mode is on torch's stack
        self._mode = FunctionSeam(self._called)

    def listen(self, listeners: list[Listener]) -> None:
        """These blocks are open now."""
        self.listeners = listeners
        self._watching = any(listener.watches_functions for listener in listeners)
        self._roots = {id(root) for listener in listeners for root in listener.roots}

    def _called(self, call: AnyCall) -> dict[int, Tensor]:
        """PyTorch's attention function was called; an earlier seam may report that call (see `stepped_out`).

        Returns what the heads bring that a block changes, each (B, T, Dv).
        """
        if self.inside:
            return {}
        change = self.change(self.modules[-1])
        call, brought = (call, {}) if change is None else change.of(call)
        self.see(call, self.modules[-1])
        return brought

    def change(self, module: nn.Module | None) -> Change | None:
        """What the blocks change of the attention call that `module` makes now."""
        asked = (listener.change(module) for listener in self.listeners)
        found = [change for change in asked if change is not None]
        return reduce(Change.joined, found) if found else None

    def see(self, call: AnyCall | Unread, module: nn.Module | None) -> None:
        """Tell every block whose model is running."""
        for listener in self.listeners:
            listener.see(call, module)

    def watches(self, module: nn.Module) -> bool:
        """Whether a module is a part of a model that a block records."""
        roots = (root for listener in self.listeners for root in listener.roots)
        return any(module is part for root in roots for part in root.modules())

    def is_outside(self, module: nn.Module) -> bool:
        """Whether a module is one whose calls are passes, and is not running yet."""
        return id(module) in self._roots and not any(module is one for one in self.modules)

    def run(self, original: Function, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)`, noting that it runs."""
        if not self.running:
            check_eager(module, self._roots)
        if not (self._watching or self.is_outside(module)):
            return original(module, *args, **kwargs)
        self.modules.append(module)
        try:
            if id(module) in self._roots:
                return self._run_root(original, module, args, kwargs)
            if self._present or self.inside or not self.running:
                return original(module, *args, **kwargs)
            with self.stepped_in():
                return original(module, *args, **kwargs)
        finally:
            self.modules.pop()

    def _run_root(self, original: Function, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        concerned = [one for one in self.listeners if any(r is root for r in one.roots)]
        with ExitStack() as passes:  # whatever raises, each pass that has begun is ended
            for listener in concerned:
                if listener.begin(root, args, kwargs):
                    passes.enter_context(self._open_pass(listener))
            self.listen(self.listeners)  # one may have begun to watch
            with self.stepped_in():
                return original(root, *args, **kwargs)

    @contextmanager
    def _open_pass(self, listener: Listener) -> Iterator[None]:
        self.running += 1
        complete = False
        try:
            yield
            complete = True
        finally:
            self.running -= 1
            listener.end(complete)

    @contextmanager
    def stepped_in(self) -> Iterator[None]:
        """Our function mode on torch's stack, unless an earlier seam has taken over."""
        if self._present or self.inside or not self._watching:
            yield
            return
        self._present = True
        try:
            with self._mode:
                yield
        finally:
            self._present = False

    @contextmanager
    def stepped_out(self) -> Iterator[None]:
        """Our function mode off torch's stack. Below somebody else's it may stay: theirs has the same effect."""
        if not self._present or _get_current_function_mode() is not self._mode:  # type: ignore[no-untyped-call]
            yield
            return
        self._mode.__exit__(None, None, None)
        self._present = False
        try:
            yield
        finally:
            self._present = True
            self._mode.__enter__()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within an attention call that is reported by its own seam: nothing below it is reported again."""
        outer, self.inside = self.inside, True
        try:
            if not self._present:
                yield
                return
            with self.stepped_out():
                yield
        finally:
            self.inside = outer


def _observed(original: Function) -> Function:
    @functools.wraps(original)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        observer = current()
        if observer is None:
            return original(self, *args, **kwargs)
        return observer.run(original, self, args, kwargs)

    return __call__


def _entered(original: Function) -> Function:
    """`model.forward(…)` without a call of the model, as TransformerLens runs its models with hooks."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        observer = current()
        if observer is None or not observer.is_outside(self):
            return original(self, *args, **kwargs)
        return observer.run(original, self, args, kwargs)

    return forward


_CALL = Replacement(nn.Module, "__call__", _observed)
_calls: dict[type, Replacement] = {}  # one per class, so that blocks in several threads share the count
_forwards: dict[type, Replacement] = {}


def replacements(roots: Iterable[nn.Module], *, watching: bool) -> list[Replacement]:
    """The forward of these modules' classes; and the call of any module if `watching`, else of these."""
    owners = dict.fromkeys(type(root) for root in roots)
    forwards = [_forwards.setdefault(owner, Replacement(owner, "forward", _entered)) for owner in owners]
    if watching:
        return [_CALL, *forwards]
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)  # one may hold a root
    called = [*owners, *(() if compiled is None else (compiled,))]
    return [*(_calls.setdefault(owner, Replacement(owner, "__call__", _observed)) for owner in called), *forwards]
