"""The block itself: enters the seams, sorts what arrives into passes and layers, leaves all as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeAlias

from torch import Tensor, nn

from clearhead.errors import RecordingError
from clearhead.maps import AttentionMap
from clearhead.recording import huggingface, observer, torch_modules
from clearhead.recording.buffers import Buffer, buffers_of, filled, is_borrowed, is_in_buffer
from clearhead.recording.calls import AnyCall, Unread
from clearhead.recording.generating import way_of_generating
from clearhead.recording.layers import Layer
from clearhead.recording.models import (
    Places,
    check_model,
    check_parts,
    encoders,
    generating,
    inside,
    opaque,
    parts_of,
    recomputing,
    running_eagerly,
    unwrapped,
)
from clearhead.recording.padding import Padding, check_padding, read_padding
from clearhead.recording.reach import attends_by_interface_alone
from clearhead.recording.recording import Pass, Recording
from clearhead.recording.sequence import shorten, some

__all__ = ["Keep", "Recorder"]

Keep: TypeAlias = Callable[[str, AttentionMap], Any]  # of a layer's label and its map


class Recorder(observer.Listener):
    """The context manager that `clearhead.record` returns; entering it gives the `Recording`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Iterable[int] | None,
        keep: Keep | None,
        padding: Tensor | bool | None,
        detach: bool,
    ) -> None:
        model = inside(model)
        check_model(model)
        check_padding(padding)
        _check_keep(keep)
        self._model: nn.Module | None = model
        self._models = unwrapped(model)
        self._encoders = encoders(self._models[-1])
        self.roots = self._models + self._encoders
        self._layers, self._keep = _numbers(layers), keep
        self._stated, self._detach = padding, detach
        self._name = type(self._models[-1]).__name__
        self._recording = Recording()
        self._open: Pass | None = None
        self._encoded: dict[int, Pass] = {}  # what encoders have computed for the call of the model that follows
        self._by_encoder: int | None = None  # the encoder whose call is open, outside of one of the model
        self._started = 0  # calls of the model
        self._numbers: dict[tuple[str, int], int] = {}  # layers: (path, call index within the pass)
        self._calls: Counter[str] = Counter()  # attention calls of the open pass, by path
        self._reducing = False  # `keep` is running
        self._buffers: list[Buffer] = []
        self._unread: list[tuple[Unread, nn.Module | None]] = []
        self._may_wait = False
        self._padding = Padding()
        self._grown: dict[int, int] = {}  # texts to which stated padding belongs, as far as calls are complete
        self._sizes: set[tuple[int, int]] = set()  # (B, S) of the calls that stated padding did not fit
        self._fitted = False
        self._places = Places(self._models)
        self._foreign: set[str] = set()
        self.watches_functions = False  # until a pass begins for which that is needed
        self._stack: ExitStack | None = None  # what the block holds; None outside of it

    # --- the block ------------------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        if self._model is None or self._stack is not None:
            state = "has been used" if self._model is None else "is in use"
            raise RecordingError(f"this recorder {state}: call clearhead.record(model) again for a new block.")
        parts = parts_of(self._model)
        check_parts(self._model, parts)
        self.watches_functions = False
        with ExitStack() as stack:
            stack.enter_context(running_eagerly(self._model, parts))
            for replacement in (*observer.replacements(self.roots, watching=False), *huggingface.replacements()):
                stack.enter_context(replacement.held())
            stack.enter_context(observer.listening(self))
            self._stack = stack.pop_all()
        return self._recording

    def _look(self) -> None:
        """See what the model consists of now, and from now on watch every call, if it may attend in other ways."""
        parts = self._places.look()
        if self.watches_functions or self._stack is None or attends_by_interface_alone(parts):
            return
        self.watches_functions = True
        everything = observer.replacements(self.roots, watching=True)
        for replacement in (*everything, *torch_modules.replacements(parts)):
            self._stack.enter_context(replacement.held())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stack is None:
            raise RecordingError("this recorder is not in use: write `with clearhead.record(model) as recording:`.")
        self._stack.close()
        model = self._models[-1]
        self._stack, self._model, self._models, self._encoders, self.roots = None, None, (), (), ()
        self._open, self._encoded, self._places, self._unread = None, {}, Places(()), []
        if error is None:  # an exception of the block is never hidden by one of ours
            self._check_seen(model)

    # --- what the observer reports --------------------------------------------------------------------------

    def begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A call of the model begins, or of an encoder that is called before it, as `generate` does."""
        if self._open is not None or recomputing():
            return False
        self._look()
        by_encoder = any(root is encoder for encoder in self._encoders)
        self._padding = read_padding(root if by_encoder else self._models[-1], args, kwargs, self._stated)
        self._padding.grown.update(self._grown)
        self._buffers = buffers_of([*args, *kwargs.values()])
        self._may_wait = self._detach and self._keep is None and self._layers is None and not self._buffers
        self._by_encoder = id(root) if by_encoder else None
        self._open = Pass() if by_encoder else self._begun(kwargs)
        self._open.way = way_of_generating()
        self._calls = Counter(self._open.paths)
        self._started += not by_encoder
        return True

    def _begun(self, kwargs: dict[str, Any]) -> Pass:
        """The pass of the model's call, which begins with what its encoders computed, if that was given to it."""
        encoded, self._encoded = self._encoded, {}
        given = any(kwargs.get(name) is not None for name in ("encoder_outputs", "mm_encoder_outputs"))
        return Pass.after(encoded.values() if given else ())

    def end(self, complete: bool) -> None:
        """A call ended; one that an exception ended leaves no pass."""
        try:
            if complete and self._open is not None:
                self._close(self._open)
        finally:
            self._open, self._padding, self._buffers, self._by_encoder = None, Padding(), [], None
            self._unread = []

    def _close(self, ended: Pass) -> None:
        self._read()
        self._grown = self._padding.grown
        if self._by_encoder is None:
            self._recording.add(ended)
        else:
            self._encoded[self._by_encoder] = ended

    def see(self, call: AnyCall | Unread, module: nn.Module | None) -> None:
        """An attention call: a layer of the open pass, if the module is one of the model's.

        It is read when the pass ends, if that can wait: calls that are read one after another, with all code in cache,
        take a fifth of the time.
        """
        if self._open is None or self._reducing:
            return
        if isinstance(call, Unread) and self._may_wait and not is_in_buffer(call.k):
            self._unread.append((call, module))
            return
        self._read()
        self._add(self._open, call.read() if isinstance(call, Unread) else call, module)

    def _read(self) -> None:
        """Read the calls that have waited."""
        waiting, self._unread = self._unread, []
        for call, module in waiting:
            if self._open is not None:
                self._add(self._open, call.read(), module, overwritten=call.watched.changed, borrowed=False)

    def _add(
        self,
        into: Pass,
        call: AnyCall,
        module: nn.Module | None,
        *,
        overwritten: bool = False,
        borrowed: bool | None = None,
    ) -> None:
        path = self._places.of(module)
        if path is None:
            self._foreign.add(type(module).__name__)
            return
        number = self._numbers.setdefault((path, self._calls[path]), len(self._numbers))
        self._calls[path] += 1
        if self._layers is not None and number not in self._layers:
            return
        call = filled(call.detached() if self._detach else call, self._buffers)
        rule = self._padding.rule(call, path, number)
        self._fitted |= rule is not None
        self._sizes.add((call.shape[0], call.shape[3]))
        if self._keep is not None:
            self._reduce(into, Layer(number, path, call, rule), self._keep)
            return
        before, call = self._recording.last(number), call.without_values()
        borrowed = is_borrowed(call, self._buffers) if borrowed is None else borrowed
        into.add(Layer(number, path, call, rule, before=before, borrowed=borrowed, overwritten=overwritten))

    def _reduce(self, into: Pass, layer: Layer, keep: Keep) -> None:
        """Keep what the user's function makes of a map, and no tensor of it."""
        self._reducing = True
        try:
            into.reduce(layer, keep(layer.label, layer.read()))
        except Exception as error:
            name = getattr(keep, "__qualname__", type(keep).__name__)
            raise RecordingError(
                f"record({self._name}, keep={name}): the function failed on layer {layer.label} ({layer.path!r}), a map"
                f" of shape {layer.shape}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._reducing = False

    # --- what is said at the end ----------------------------------------------------------------------------

    def _check_seen(self, model: nn.Module) -> None:
        if self._started == 0:
            inner = generating(model)
            wraps = f" What it wraps calls itself, in generate say: record that ({some(inner)})." if inner else ""
            raise RecordingError(
                f"record({self._name}): the model was not called inside the block. Call the module that was passed to"
                " record, as model(…): another method of it, a copy of it, another thread, or a function that"
                f" torch.compile has compiled are not seen.{wraps}"
            )
        if not self._recording.passes:
            raise RecordingError(f"record({self._name}): every call of the model in this block ended in an exception.")
        if not self._numbers:
            raise RecordingError(self._nothing_seen(opaque(model)))
        self._check_layers()
        self._check_stated()

    def _check_layers(self) -> None:
        unknown = sorted((self._layers or frozenset()) - set(range(len(self._numbers))))
        if unknown:
            raise RecordingError(
                f"record({self._name}, layers=[{shorten(sorted(self._layers or ()))}]): there is no layer"
                f" {shorten(unknown)}; the model made {len(self._numbers)} attention calls, layers"
                f" {shorten(range(len(self._numbers)))}."
            )

    def _check_stated(self) -> None:
        if isinstance(self._stated, Tensor) and not self._fitted and not bool((self._stated != 0).all()):
            sizes = ", ".join(str(one) for one in sorted(self._sizes))
            raise RecordingError(
                f"record({self._name}, padding={tuple(self._stated.shape)}): the padding fits no attention call;"
                f" (batch, keys) of the calls: {sizes}."
            )

    def _nothing_seen(self, unseen: list[str]) -> str:
        foreign = f" (here: {_list(self._foreign)} made attention calls)" if self._foreign else ""
        parts = f" (here: {some(unseen)})" if unseen else ""
        return (
            f"record({self._name}): the model ran, but no attention call was seen. Likely causes:\n"
            "  (a) it computes attention by hand, and not as softmax(scores) @ v: seen is PyTorch's softmax over the"
            " keys, the last dimension, and a product of the weights with the values (in two dimensions: as"
            " softmax(q @ k.T) @ v). Write it so, or call torch.nn.functional.scaled_dot_product_attention;\n"
            "  (b) it calls a kernel of another package (flash-attn, xformers), or torch.compile(flex_attention): call"
            " torch.nn.functional.scaled_dot_product_attention, or load the model with attn_implementation='sdpa';\n"
            f"  (c) the attention is in modules that are not registered as its submodules{foreign};\n"
            f"  (d) it is not in Python code of this thread: in scripted or exported parts{parts}, in another thread or"
            " process, in a generator that runs on after the call, or there is none."
        )


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _check_keep(keep: object) -> None:
    if keep is not None and not callable(keep):
        raise RecordingError(
            f"record(keep={keep!r}): expected a function of a layer's label ('L17') and its map, for example"
            " keep=lambda name, attn: attn.entropy(); None keeps the maps."
        )


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
