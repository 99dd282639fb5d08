"""Which models can be watched at all: those whose Python code runs."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import fx, nn

from clearhead._checks import describe
from clearhead.errors import RecordingError
from clearhead.recording.wrapping import Counted

__all__ = ["check_model", "encoders", "running_eagerly", "unwrapped"]


def check_model(model: object) -> None:
    """Raise RecordingError, saying why and what to do, for what has no Python code to watch."""
    if isinstance(model, torch.jit.ScriptModule):
        raise RecordingError(
            f"record({type(model).__name__}): a scripted or traced model runs in TorchScript, where no call can be"
            " seen. Record the nn.Module that it was made from."
        )
    if isinstance(model, torch.export.ExportedProgram) or (isinstance(model, fx.GraphModule) and _is_exported(model)):
        raise RecordingError(
            f"record({type(model).__name__}): an exported program is a graph of kernels, in which attention may"
            " have been taken apart. Record the nn.Module that it was exported from."
        )
    if not isinstance(model, nn.Module):
        raise RecordingError(
            f"record({describe(model)}): expected the torch.nn.Module that is called in the block. Of a pipeline or"
            " wrapper, pass the module inside (often its .model)."
        )


def _is_exported(model: fx.GraphModule) -> bool:
    return any(isinstance(node.target, torch._ops.OpOverload) for node in model.graph.nodes)


def unwrapped(model: nn.Module) -> tuple[nn.Module, ...]:
    """The model, and the one inside if it is the product of torch.compile: a call of either is a pass."""
    inner = getattr(model, "_orig_mod", None) if type(model).__name__ == "OptimizedModule" else None
    return (model, inner) if isinstance(inner, nn.Module) else (model,)


def encoders(model: nn.Module) -> tuple[nn.Module, ...]:
    """What transformers' `generate` calls by itself, before it calls the model: encoders, image towers."""
    get = getattr(model, "get_encoder", None)
    if get is None or not any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        return ()
    found: list[nn.Module] = []
    for modality in (None, "image", "audio"):
        try:
            part = get(modality=modality)
        except (AttributeError, NotImplementedError, TypeError, ValueError):  # a model without one may say so like this
            continue
        if isinstance(part, nn.Module) and part is not model and not any(part is other for other in found):
            found.append(part)
    return tuple(found)


def running_eagerly(model: nn.Module) -> AbstractContextManager[None]:
    """Within the block a compiled model runs its Python code, and a warning says so; others are left alone.

    Only for compiled models: FlexAttention compiles its kernel on its own, and that must run as without the
    recorder. The warning names the line that called our caller: the user's `with`.
    """
    if not any(_is_compiled(module) for module in model.modules()):
        return nullcontext()
    if torch.compiler.is_compiling():
        raise RecordingError("record() inside a function that torch.compile is compiling: call it outside.")
    warnings.warn(
        f"record({type(model).__name__}): the compiled model runs uncompiled inside this block (a compiled graph"
        " makes no calls that can be seen), and so does everything else that torch.compile has compiled; its output"
        " is that of the uncompiled model.",
        UserWarning,
        stacklevel=3,
    )
    return _EAGERLY.held()


class _Eagerly(Counted):
    """PyTorch's stance to compiled code: one for the whole process, and each new one remembers the one before."""

    def make(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")  # holds from here

    def undo(self) -> None:
        self._stance.__exit__(None, None, None)


_EAGERLY = _Eagerly()


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
