"""Seam 2: PyTorch's own nn.MultiheadAttention and the nn.Transformer family, whose fast path stays on.

A torch function mode would switch that path off, and padded rows of the output would change; so while these modules
compute, the mode steps out (and in again for any module that they call). Under them lie three functions: the
kernel of a whole encoder layer, the kernel of a MultiheadAttention, and the Python code for everything else. For
the time of a block these also report their call. They are looked up by name at each call, so replacing the name
changes nothing that is computed. The names are private: PyTorch 2.6 to 2.14 have them all, and without one of them
these modules are an error in a block, and no other model's. (A dispatch mode would see the kernels too; it costs time
at every operation.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.recording.calls import AnyCall, Call
from clearhead.recording.multihead import Given, read_layer, read_native, read_python
from clearhead.recording.multihead_changed import Changed, changed_layer, changed_native, changed_python
from clearhead.recording.observer import current
from clearhead.recording.wrapping import Function, Replacement

__all__ = ["replacements"]

# How each module calls what hides keys.
_MASKS: dict[type[nn.Module], tuple[str, str]] = {
    nn.MultiheadAttention: ("attn_mask", "key_padding_mask"),
    nn.TransformerEncoderLayer: ("src_mask", "src_key_padding_mask"),
}


@dataclass(eq=False)
class _Running:
    """A call of one of PyTorch's modules that has begun."""

    kind: type[nn.Module]  # whose forward runs
    module: nn.Module
    depth: int  # modules that were running when it began, itself included
    call: Callable[[], Mapping[str, Any]]
    outer: _Running | None
    known: dict[Any, Any] = field(default_factory=dict)  # for as long as the outermost one runs
    seen: bool = False  # its attention was reported

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        """By name."""
        return self.call()

    @property
    def attention(self) -> Any:
        """The module whose attention it computes."""
        return self.module.self_attn if self.kind is nn.TransformerEncoderLayer else self.module

    def given(self) -> Given:
        """What hides keys here."""
        attn_mask, key_padding_mask = (self.arguments[name] for name in _MASKS[self.kind])
        return Given(
            attn_mask,
            key_padding_mask,
            self.arguments["is_causal"],
            self._query_padding_mask(),
            self._tokens(),
            self.known,
        )

    def _query_padding_mask(self) -> Tensor | None:
        """Of cross-attention, which is not told: the decoder layer knows."""
        layer = self.outer
        if layer is None or layer.kind is not nn.TransformerDecoderLayer:
            return None
        crossing = getattr(layer.module, "multihead_attn", None) is self.module
        return layer.arguments["tgt_key_padding_mask"] if crossing else None

    def _tokens(self) -> int | None:
        """How long the sequences were before the encoder made a nested tensor of them."""
        within = self.outer
        while within is not None and within.kind is not nn.TransformerEncoder:
            within = within.outer
        src = None if within is None else within.arguments["src"]
        return None if src is None or src.is_nested else src.shape[1]


_running: ContextVar[_Running | None] = ContextVar("clearhead_torch_module", default=None)
_projected: ContextVar[list[Tensor] | None] = ContextVar("clearhead_projected", default=None)


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_signature = functools.lru_cache(maxsize=16)(inspect.signature)  # 0.1 ms each time it is made anew


def _bound(function: Function, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


# --- the modules --------------------------------------------------------------------------------------------


def _watched(kind: type[nn.Module]) -> Replacement:
    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original, self, *args, **kwargs)
            return _run(kind, self, run, functools.partial(_bound, original, self, *args, **kwargs))

        return forward

    return Replacement(kind, "forward", wrap)


def _run(kind: type[nn.Module], module: nn.Module, run: Function, arguments: Callable[[], Mapping[str, Any]]) -> Any:
    """`run()`, the forward of one of PyTorch's modules, without the function mode."""
    observer, outer = current(), _running.get()
    if observer is None or not observer.running or observer.inside:
        return run()
    depth = len(observer.modules)
    if outer is not None and (outer.module, outer.kind, outer.depth) == (module, kind, depth):
        return run()  # a forward of the module's own that calls its class's
    _check_names()
    running = _Running(kind, module, depth, arguments, outer, {} if outer is None else outer.known)
    # PyTorch looks for a function mode where it has a fast path; only the decoder layer has none.
    quiet = nullcontext() if kind is nn.TransformerDecoderLayer else observer.stepped_out()
    with _set(_running, running), quiet:
        result = run()
    if kind is nn.MultiheadAttention and not running.seen:
        raise _unknown("computed attention in a way that clearhead does not see")
    return result


class _Own(Replacement):
    """Of a module that has a forward of its own beside its class's, which may call that as it was before the block."""

    def __init__(self, kind: type[nn.Module], module: nn.Module) -> None:
        def wrap(original: Function) -> Function:
            @functools.wraps(original)
            def forward(*args: Any, **kwargs: Any) -> Any:
                run = functools.partial(original, *args, **kwargs)
                return _run(kind, module, run, functools.partial(_bound, kind.forward, module, *args, **kwargs))

            return forward

        super().__init__(module, "forward", wrap)

    def undo(self) -> None:
        super().undo()
        _own.pop(id(self._owner), None)


def _check_names() -> None:
    missing = [str(replacement) for replacement in _ALWAYS if not replacement.possible]
    if missing:
        raise _unknown(f"has no {', '.join(missing)}, by which clearhead sees its own attention modules")


def _unknown(what: str) -> RecordingError:
    return RecordingError(
        f"PyTorch {torch.__version__} {what}: nn.MultiheadAttention and nn.Transformer cannot be recorded with it. Use"
        " a version from 2.6 to 2.14."
    )


def _stepping_in(original: Function) -> Function:
    @functools.wraps(original)
    def _sa_block(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        observer = current()
        if observer is None or not observer.running:
            return original(self, *args, **kwargs)
        with observer.stepped_in():
            return original(self, *args, **kwargs)

    return _sa_block


# --- the functions ------------------------------------------------------------------------------------------

Report = Callable[[_Running | None, list[Tensor], Function, tuple[Any, ...], dict[str, Any]], Call]


def _reporting(owner: Any, name: str, report: Report, changed: Changed) -> Replacement:
    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            observer = current()
            if observer is None or not observer.running or observer.inside:
                return original(*args, **kwargs)
            with observer.taken():
                running = _running.get()
                own = running if running is not None and running.depth == len(observer.modules) else None
                module = observer.modules[-1] if own is None else own.attention
                change = observer.change(module)
                call: AnyCall
                projected: list[Tensor] = []
                with _set(_projected, projected):
                    if change is None:
                        result = original(*args, **kwargs)
                        call = report(own, projected, original, args, kwargs)
                    else:
                        read = functools.partial(report, own, projected, original)
                        result, call = changed(change, original, read, args, kwargs)
                if own is not None:
                    own.seen = True
                observer.see(call, module)
            return result

        return _in_python(function)

    return Replacement(owner, name, wrap)


def _in_python(function: Function) -> Function:
    """The same, and no compiler traces what it does: a compiled function is split at this call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # else nothing may load the compiler
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return call


def _python(
    own: _Running | None,
    projected: list[Tensor],
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    arguments = _bound(function, *args, **kwargs)
    if len(projected) != 3:
        raise _unknown(f"made no q, k and v that clearhead sees in {function.__name__}")
    if own is not None and own.kind is nn.MultiheadAttention:
        given = own.given()
    else:  # called by somebody else, as CLIP does
        given = Given(arguments["attn_mask"], arguments["key_padding_mask"], arguments["is_causal"])
    return read_python(given, projected, arguments)


def _kernel(read: Callable[..., Call], kind: type[nn.Module]) -> Report:
    def report(own: _Running | None, projected: list[Tensor], function: Function, args: Any, kwargs: Any) -> Call:
        if own is None or own.kind is not kind:
            raise RecordingError(
                f"torch.{function.__name__} was not called by nn.{kind.__name__}.forward, whose kernel it is: what its"
                " masks mean is not known. Call the forward of that class, or F.scaled_dot_product_attention."
            )
        return read(own.given(), *args, **kwargs)

    return report


def _noting(name: str) -> Replacement:
    """Within `F.multi_head_attention_forward`: q, k and v as they were projected, with their autograd graph."""

    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def project(*args: Any, **kwargs: Any) -> Any:
            result, projected = original(*args, **kwargs), _projected.get()
            if projected is not None:
                projected[:] = result
            return result

        return project

    return Replacement(F, name, wrap)


_KINDS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
_ALWAYS = (
    *map(_watched, _KINDS),
    _reporting(torch, "_transformer_encoder_layer_fwd", _kernel(read_layer, nn.TransformerEncoderLayer), changed_layer),
    _reporting(torch, "_native_multi_head_attention", _kernel(read_native, nn.MultiheadAttention), changed_native),
    _reporting(F, "multi_head_attention_forward", _python, changed_python),
    _noting("_in_projection_packed"),
    _noting("_in_projection"),
)
_blocks: dict[type, Replacement] = {}  # one per class, so that blocks in several threads share the count
_own: dict[int, Replacement] = {}  # one per module, for as long as a block needs it


def replacements(parts: Collection[nn.Module]) -> list[Replacement]:
    """Those for every model; for encoder layers among these parts that call attention in a method of their own; and for
    modules whose forward somebody has replaced (accelerate does, to move tensors).

    That method runs off the fast path only, within a forward that the function mode had to leave.
    """
    base = nn.TransformerEncoderLayer
    classes = {cls for kind in set(map(type, parts)) if issubclass(kind, base) for cls in kind.__mro__}
    owners = [cls for cls in classes - {base} if "_sa_block" in vars(cls)]
    always = [replacement for replacement in _ALWAYS if replacement.possible]
    blocks = [_blocks.setdefault(owner, Replacement(owner, "_sa_block", _stepping_in)) for owner in owners]
    changed = [module for module in parts if "forward" in vars(module)]
    found = [(kind, module) for module in changed for kind in _KINDS if isinstance(module, kind)]
    return [*always, *blocks, *(_own.setdefault(id(module), _Own(kind, module)) for kind, module in found)]
