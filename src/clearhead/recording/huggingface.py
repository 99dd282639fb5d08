"""Seam 1: transformers' attention interface, through which every current model calls every implementation.

`AttentionInterface.get_interface(implementation, default)` gives a model the function it calls next. For the
time of a block the method is replaced, so that the function also reports its call: with the module, grouped
heads unexpanded, before the library repeats or packs them. So is `get_compiled_call`, by which `generate` compiles a
model whose cache is static: a compiled graph makes no calls that can be seen.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from clearhead._checks import describe
from clearhead._watch import Watched
from clearhead.errors import RecordingError
from clearhead.recording.calls import AnyCall, Call, Unread
from clearhead.recording.changing import Change, weights_written, written
from clearhead.recording.checking import confirmed
from clearhead.recording.interfaces import Arguments, Function, read_sdpa, readings, tensors_of_sdpa
from clearhead.recording.observer import current
from clearhead.recording.wrapping import Replacement

__all__ = ["replacements"]

_NAMES = ("module", "query", "key", "value", "attention_mask")
_known: dict[type, Replacement] = {}  # one per class, so that blocks in several threads share the count


def replacements() -> list[Replacement]:
    """Those for transformers, if it is loaded: the interface class, and subclasses that override the method."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if interface is None:
        return []
    owners = [cls for cls in _family(interface) if "get_interface" in vars(cls)]
    found = [_known.setdefault(owner, Replacement(owner, "get_interface", _reporting)) for owner in owners]
    model = sys.modules["transformers.modeling_utils"].PreTrainedModel
    if hasattr(model, "get_compiled_call"):
        found.append(_known.setdefault(model, Replacement(model, "get_compiled_call", _uncompiled)))
    return found


def _family(cls: type) -> Iterator[type]:
    yield cls
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield from _family(child)


def _reporting(original: Function) -> Function:
    @functools.wraps(original)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Function:
        function: Function = original(self, *args, **kwargs)
        observer = current()
        watched = observer is not None and observer.running and not observer.inside
        # A subclass that calls super().get_interface() has been given a reporting function already.
        if observer is None or not watched or hasattr(function, "reports_to_clearhead"):
            return function
        if function not in observer.reporting:
            observer.reporting[function] = _reported(function)
        return observer.reporting[function]

    return get_interface


def _uncompiled(original: Function) -> Function:
    @functools.wraps(original)
    def get_compiled_call(self: nn.Module, *args: Any, **kwargs: Any) -> Function:
        observer = current()
        if observer is None or not observer.watches(self):
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        warnings.warn(
            f"{type(self).__name__}.generate would compile the model; inside a record block it runs uncompiled (a"
            " compiled graph makes no calls that can be seen). Its output is that of the uncompiled model.",
            UserWarning,
            stacklevel=2,
        )
        return self.__call__

    return get_compiled_call


def _reported(function: Function) -> Function:
    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        observer = current()
        if observer is None or not observer.running or observer.inside:
            return function(*args, **kwargs)
        with observer.taken():
            result = function(*args, **kwargs)
            arguments = _bind(function, args, kwargs)
            call: AnyCall | Unread = _seen(function, arguments, result)
            change = observer.change(arguments.module)
            if change is not None:
                call, brought = change.of(call.read() if isinstance(call, Unread) else call)
                result = _changed(result, call, change, brought)
            observer.see(call, arguments.module)
        return result

    attention.reports_to_clearhead = True  # type: ignore[attr-defined]
    return attention


def _seen(function: Function, arguments: Arguments, result: Any) -> Call | Unread:
    """The call, which can be read later if nothing but its arguments is needed for that."""
    tensors = tensors_of_sdpa(function, arguments)
    if tensors is not None and not arguments.query.is_inference():  # these count no versions
        return Unread(arguments.key, Watched(tensors), functools.partial(read_sdpa, arguments))
    calls, certain = readings(function, arguments)
    return calls[0] if certain else confirmed(calls, _output(result), arguments)


def _bind(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments by name. Models pass five by position, in this order, or fewer; more: by the signature."""
    if len(args) == len(_NAMES):
        module, query, key, value, mask = args
        return Arguments(module, query, key, value, mask, kwargs)
    if len(args) > len(_NAMES):
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        given = {**bound.pop("kwargs", {}), **bound}
    else:
        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    module, query, key, value = (given.pop(name) for name in _NAMES[:4])
    return Arguments(module, query, key, value, given.pop("attention_mask", None), given)


def _changed(result: Any, call: AnyCall, change: Change, brought: dict[int, Tensor]) -> Any:
    """What the function returned, (B, T, H, Dv) and perhaps weights (B, H, T, S), with some heads changed."""
    output = _output(result)
    if output.shape[:3] != (call.shape[0], call.shape[2], call.shape[1]):
        raise RecordingError(
            f"{change.said}: its attention function returned {describe(output)}, expected (B, T, H, Dv)."
            " Use attn_implementation='sdpa'."
        )
    output = written(output.transpose(1, 2), brought).transpose(1, 2)
    if not isinstance(result, tuple):
        return output
    weights = (weights_written(x, call, change) if isinstance(x, Tensor) else x for x in result[1:2])
    return output, *weights, *result[2:]


def _output(result: Any) -> Tensor:
    output = result[0] if isinstance(result, tuple) else result
    return output  # type: ignore[no-any-return]
