"""The block itself: enters the seams, sorts what arrives into passes and layers, leaves all as it was."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from clearhead.errors import RecordingError
from clearhead.recording import huggingface, observer, torch_modules
from clearhead.recording.calls import Call
from clearhead.recording.models import check_model, running_eagerly, unwrapped
from clearhead.recording.padding import Padding, check_padding, read_padding
from clearhead.recording.recording import Layer, Pass, Recording, shorten

__all__ = ["Recorder"]


class Recorder:
    """The context manager that `clearhead.record` returns; entering it gives the `Recording`."""

    def __init__(
        self, model: nn.Module, *, layers: Iterable[int] | None, padding: Tensor | bool | None, detach: bool
    ) -> None:
        check_model(model)
        check_padding(padding)
        self._model: nn.Module | None = model
        self.roots = unwrapped(model)
        self._layers = _numbers(layers)
        self._stated, self._detach = padding, detach
        self._name = type(self.roots[-1]).__name__
        self._recording = Recording()
        self._open: Pass | None = None
        self._started = 0  # calls of the model
        self._calls = 0  # attention calls of the open pass
        self._most_calls = 0
        self._padding = Padding()
        self._sizes: set[tuple[int, int]] = set()  # (B, S) of the calls that stated padding did not fit
        self._fitted = False
        self._paths: dict[int, str] = {}
        self._foreign: set[str] = set()
        self._stack: ExitStack | None = None  # what the block holds; None outside of it

    # --- the block ------------------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        if self._model is None or self._stack is not None:
            state = "has been used" if self._model is None else "is in use"
            raise RecordingError(f"this recorder {state}: call clearhead.record(model) again for a new block.")
        with ExitStack() as stack:
            stack.enter_context(running_eagerly(self._model))
            for replacement in (
                *observer.REPLACEMENTS,
                *torch_modules.replacements(self._model),
                *huggingface.replacements(),
            ):
                stack.enter_context(replacement.held())
            stack.enter_context(observer.listening(self))
            self._stack = stack.pop_all()
        return self._recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stack is None:
            raise RecordingError("this recorder is not in use: write `with clearhead.record(model) as recording:`.")
        self._stack.close()
        self._stack, self._model, self.roots, self._open, self._paths = None, None, (), None, {}
        if error is None:  # an exception of the block is never hidden by one of ours
            self._check_seen()

    # --- what the observer reports --------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A call of the model begins."""
        if self._open is not None:
            return False
        self._padding = read_padding(self.roots[-1], args, kwargs, self._stated)
        self._open, self._calls = Pass(), 0
        self._started += 1
        return True

    def end(self, complete: bool) -> None:
        """A call of the model ended; one that an exception ended leaves no pass."""
        if complete and self._open is not None:
            self._recording.passes.append(self._open)
            self._most_calls = max(self._most_calls, self._calls)
        self._open, self._padding = None, Padding()

    def see(self, call: Call, module: nn.Module | None) -> None:
        """An attention call: a layer of the open pass, if the module is one of the model's."""
        if self._open is None:
            return
        path = self._path(module)
        if path is None:
            self._foreign.add(type(module).__name__)
            return
        number, self._calls = self._calls, self._calls + 1
        if self._layers is not None and number not in self._layers:
            return
        call = call.detached() if self._detach else call
        rule = self._padding.rule(call, path)
        self._fitted |= rule is not None
        self._sizes.add((call.q.shape[0], call.k.shape[2]))
        self._open.add(Layer(number, path, call, rule))

    def _path(self, module: nn.Module | None) -> str | None:
        """Where a module stands in the model; None for a module of another model."""
        if id(module) not in self._paths:  # also for modules that were added in the meantime
            self._paths = {id(child): path for path, child in self.roots[-1].named_modules()}
            self._paths.update({id(root): "" for root in self.roots})
        return self._paths.get(id(module))

    # --- what is said at the end ----------------------------------------------------------------------------

    def _check_seen(self) -> None:
        if self._started == 0:
            raise RecordingError(
                f"record({self._name}): the model was not called inside the block. Call the module that was passed to"
                " record, as model(…): model.forward(…), a copy of it, or another thread are not seen."
            )
        if not self._recording.passes:
            raise RecordingError(f"record({self._name}): every call of the model in this block ended in an exception.")
        if self._most_calls == 0:
            raise RecordingError(self._nothing_seen())
        self._check_layers()
        self._check_stated()

    def _check_layers(self) -> None:
        unknown = sorted((self._layers or frozenset()) - set(range(self._most_calls)))
        if unknown:
            raise RecordingError(
                f"record({self._name}, layers=[{shorten(sorted(self._layers or ()))}]): there is no layer"
                f" {shorten(unknown)}; the model made {self._most_calls} attention calls, layers"
                f" {shorten(range(self._most_calls))}."
            )

    def _check_stated(self) -> None:
        if isinstance(self._stated, Tensor) and not self._fitted and not bool((self._stated != 0).all()):
            sizes = ", ".join(str(one) for one in sorted(self._sizes))
            raise RecordingError(
                f"record({self._name}, padding={tuple(self._stated.shape)}): the padding fits no attention call;"
                f" (batch, keys) of the calls: {sizes}."
            )

    def _nothing_seen(self) -> str:
        foreign = f" (here: {_list(self._foreign)} made attention calls)" if self._foreign else ""
        return (
            f"record({self._name}): the model ran, but no attention call was seen. Likely causes:\n"
            "  (a) it computes attention by hand, as softmax(q @ k.mT) @ v: call"
            " torch.nn.functional.scaled_dot_product_attention there, or"
            " clearhead.scaled_dot_product_attention;\n"
            f"  (b) the attention is in modules that are not registered as its submodules{foreign};\n"
            "  (c) it is not in Python code of this thread: in scripted or exported parts, in another thread or"
            " process, or there is none."
        )


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _numbers(layers: Iterable[int] | None) -> frozenset[int] | None:
    if layers is None:
        return None
    numbers = list(layers) if isinstance(layers, Iterable) else []
    if not numbers or any(type(n) is not int or n < 0 for n in numbers):
        raise RecordingError(
            f"record(layers={numbers or layers!r}): expected layer numbers, a list of integers from 0 (the order of"
            " the attention calls), or None for all."
        )
    return frozenset(numbers)
