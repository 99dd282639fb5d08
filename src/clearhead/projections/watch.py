"""While a model runs: what its modules were given, and a few rows of what they returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

__all__ = ["LIMIT", "Watch", "rows_of", "sequence_of"]

LIMIT = 128_000_000  # bytes of inputs that are kept; a text whose inputs take more has none

# Their fast path reads whether hooks are attached, and computes otherwise where there are: they are left alone.
_UNTOUCHED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Watch:
    """A context in which every call of a module is noted: its input (T, d), and three rows of its output.

    Args:
        model: the module that runs.
        tokens: T; calls with another number of rows are passed over.
        limit: bytes of inputs to keep. Beyond it all are let go, and `full` is True.

    Attributes: inputs, outputs: tensors by (path of the module, number of its call). Inputs are the model's own
    tensors, not copies; no result changes.
    """

    def __init__(self, model: nn.Module, tokens: int, *, limit: int = LIMIT) -> None:
        self.inputs: dict[tuple[str, int], Tensor] = {}
        self.outputs: dict[tuple[str, int], Tensor] = {}  # (3, d)
        self.full = False
        self._model, self._tokens, self._limit, self._held = model, tokens, limit, 0
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        for path, module in _watched(self._model):
            if not (hasattr(module, "weight") and next(module.children(), None) is None):  # attends to nothing
                self._stack.callback(module.register_forward_pre_hook(self._before(path), with_kwargs=True).remove)
            self._stack.callback(module.register_forward_hook(self._after(path)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _before(self, path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (sequence_of(each, self._tokens) for each in (*args, *kwargs.values()))
            x = next((each for each in given if each is not None), None)
            if x is None or self.full:
                return
            self._held += x.nbytes
            self.full = self._held > self._limit
            self.inputs[path, self._calls[path]] = x
            if self.full:
                self.inputs.clear()

        return keep

    def _after(self, path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            first = result[0] if isinstance(result, tuple) and result else result
            out = sequence_of(first, self._tokens)
            if out is not None:
                self.outputs[path, self._calls[path]] = rows_of(out)
            self._calls[path] += 1

        return keep


def _watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules to watch, with their paths."""
    closed: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if isinstance(module, _UNTOUCHED):
            closed = (*closed, f"{path}." if path else "")
        elif not path.startswith(closed):
            yield path, module


def sequence_of(value: object, tokens: int) -> Tensor | None:
    """A tensor of one vector a token as (T, d), detached; None for everything else."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim not in (2, 3):
        return None
    if value.shape[-2] != tokens or (value.ndim == 3 and value.shape[0] != 1):
        return None
    return value.detach().reshape(value.shape[-2:])


def rows_of(x: Tensor) -> Tensor:
    """The second, the middle and the last row of (T, …): what a guess about a matrix is held against."""
    return x[[min(1, len(x) - 1), len(x) // 2, len(x) - 1]].detach().clone()
