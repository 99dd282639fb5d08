"""Which models can be watched at all: those whose Python code runs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType

import torch
from torch import fx, nn

from clearhead._checks import describe
from clearhead.errors import RecordingError
from clearhead.recording.wrapping import Counted

__all__ = [
    "Places",
    "check_eager",
    "check_model",
    "check_parts",
    "encoders",
    "generating",
    "inside",
    "opaque",
    "parts_of",
    "recomputing",
    "running_eagerly",
    "unwrapped",
]


def check_model(model: object, call: str = "record") -> None:
    """Raise RecordingError, saying why and what to do, for what has no Python code to watch; `call` was given it."""
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise RecordingError(
            f"{call}({type(model).__name__}): a scripted or traced model runs in TorchScript, where no call can be"
            " seen. Record the nn.Module that it was made from."
        )
    if _is_exported(model):
        raise RecordingError(
            f"{call}({type(model).__name__}): an exported program is a graph of kernels, in which attention may"
            " have been taken apart. Record the nn.Module that it was exported from."
        )
    if not isinstance(model, nn.Module):
        raise RecordingError(
            f"{call}({_said(model)}): expected the torch.nn.Module that is called in the block. {_instead(model)}"
        )


def _said(model: object) -> str:
    if isinstance(model, type):
        return f"the class {model.__name__}"
    return repr(model) if isinstance(model, str) else describe(model)


def _instead(model: object) -> str:
    """What to pass instead of something that is no module."""
    if isinstance(model, (str, os.PathLike)):
        return "That is a name: load the model, for example with clearhead.zoo.load, and pass it."
    if isinstance(model, type):
        return "Pass an object of a class, and not the class."
    inside = [name for name, part in getattr(model, "__dict__", {}).items() if isinstance(part, nn.Module)]
    if inside:
        return f"It holds one: pass its .{', its .'.join(inside)}."
    if isinstance(getattr(model, "__self__", None), nn.Module):
        return "Pass the module, and not a method of it."
    if isinstance(model, FunctionType):
        return "Of a function, compiled or not, pass the module that it calls, and call the function in the block."
    return "Of a pipeline or wrapper, pass the module inside; models of other frameworks cannot be recorded."


def check_parts(model: nn.Module, parts: Mapping[nn.Module, str], call: str = "record") -> None:
    """Raise RecordingError for PyTorch's quantised nn.MultiheadAttention; other layers may be quantised."""
    quantised = getattr(sys.modules.get("torch.ao.nn.quantized"), "MultiheadAttention", None)
    if quantised is None:
        return
    path = next((path for part, path in parts.items() if isinstance(part, quantised)), None)
    if path is not None:
        raise RecordingError(
            f"{call}({type(model).__name__}): {path or 'it'!r} is torch.ao's quantised nn.MultiheadAttention, whose"
            " layout of heads is not known. Record the model that it was made from, before torch.ao converted it; one"
            " of which the Linear layers alone are quantised can be recorded."
        )


def _is_exported(model: object) -> bool:
    """Whether this is a product of torch.export: the program, its module, or that module taken apart again."""
    if isinstance(model, torch.export.ExportedProgram) or type(model).__module__.startswith("torch.export."):
        return True
    nodes = model.graph.nodes if isinstance(model, fx.GraphModule) else ()
    return any(isinstance(node.target, torch._ops.OpOverload) for node in nodes)


def opaque(model: nn.Module) -> list[str]:
    """Where a model has parts in which no call can be seen, the outermost."""
    found: list[str] = []
    for path, part in model.named_modules():
        within = found and path.startswith(f"{found[-1]}.")
        if not within and (isinstance(part, torch.jit.ScriptModule) or _is_exported(part)):
            found.append(path)
    return found


def inside(model: nn.Module) -> nn.Module:
    """The module that a wrapper of nnsight's, which is no module, runs; anything else as it is."""
    wraps = any(cls.__module__.partition(".")[0] == "nnsight" for cls in type(model).__mro__)
    module = getattr(model, "_module", None) if wraps else None
    return module if isinstance(module, nn.Module) else model


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


def generating(model: nn.Module) -> list[str]:
    """Where a wrapper holds models that generate by themselves, and then call themselves and not the wrapper."""
    return [path for path, part in model.named_modules() if path and callable(getattr(type(part), "generate", None))]


def recomputing() -> bool:
    """Whether autograd is running: gradient checkpointing then calls a part of the model once more."""
    return torch._C._current_graph_task_id() != -1


def parts_of(model: nn.Module) -> dict[nn.Module, str]:
    """Every module in a model with its path, as `named_modules` gives them in three times as long."""
    found: dict[nn.Module, str] = {}
    waiting: list[tuple[nn.Module, str]] = [(model, "")]
    while waiting:
        module, path = waiting.pop()
        if module in found:
            continue
        found[module] = path
        if module._modules:
            before = f"{path}." if path else ""
            inside = [(part, before + name) for name, part in module._modules.items() if part is not None]
            waiting.extend(reversed(inside))
    return found


class Places:
    """Where modules stand in a model, and in what wraps it; the model is walked when asked to, and for unknown modules.

    Args: models: the model as it is called, and the one inside if torch.compile has wrapped it.
    """

    def __init__(self, models: tuple[nn.Module, ...]) -> None:
        self._models = models
        self._parts: dict[nn.Module, str] = {}

    def look(self) -> dict[nn.Module, str]:
        """Every module that the model has now, with its path."""
        self._parts = parts_of(self._models[-1])
        return self._parts

    def of(self, module: nn.Module | None) -> str | None:
        """The path of a module; None for one of another model."""
        if module in self._models:
            return ""
        if module is not None and module not in self._parts:  # also for modules that were added in the meantime
            self.look()
        return None if module is None else self._parts.get(module)


def running_eagerly(model: nn.Module, parts: Iterable[nn.Module], call: str = "record") -> AbstractContextManager[None]:
    """Within the block a compiled model runs its Python code, and a warning says so; others are left alone.

    Only for compiled models: FlexAttention compiles its kernel on its own, and that must run as without the
    recorder. The warning names the line that called our caller: the user's `with`.
    """
    if not any(_is_compiled(part) for part in parts):
        return nullcontext()
    if torch.compiler.is_compiling():
        raise RecordingError(f"{call}() inside a function that torch.compile is compiling: call it outside.")
    warnings.warn(
        f"{call}({type(model).__name__}): the compiled model runs uncompiled inside this block (a compiled graph"
        " makes no calls that can be seen), and so does everything else that torch.compile has compiled; its output"
        " is that of the uncompiled model.",
        UserWarning,
        stacklevel=3,
    )
    return _EAGERLY.held()


def check_eager(module: nn.Module, roots: Collection[int]) -> None:
    """Raise RecordingError where a compiled module is called of which the block, that records it or a part, knew not.

    `roots` are the ids of what is recorded. A compiled graph makes no calls that can be seen.
    """
    if _is_compiled(module) and not _EAGERLY.is_held and any(id(part) in roots for part in module.modules()):
        raise RecordingError(
            f"{type(module).__name__}, compiled, was called in a block that records what it was made of. Compile before"
            " the block, and pass the compiled model: record(compiled) runs it uncompiled in the block."
        )


class _Eagerly(Counted):
    """PyTorch's stance to compiled code: one for the whole process, and each new one remembers the one before."""

    def make(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")  # holds from here

    def undo(self) -> None:
        self._stance.__exit__(None, None, None)


_EAGERLY = _Eagerly()


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
