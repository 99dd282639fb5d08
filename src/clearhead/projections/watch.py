"""While a model runs: what its modules were given, and a few rows of what they returned."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LIMIT", "Watch", "is_sequence", "rows_of"]

LIMIT = 150_000_000  # bytes of inputs that are kept; of a text whose inputs take more, three rows are
_NO_ATTENTION = re.compile("mlp|feed_?forward|ffn|intermediate|expert", re.IGNORECASE)  # not worth their memory

# Their fast path reads whether hooks are attached, and computes otherwise where there are: they are left alone.
_UNTOUCHED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class Watch:
    """A context in which every call of a module is noted: its input (T, d), and three rows of input and output.

    Args:
        model: the module that runs.
        tokens: T, or several lengths; calls with another number of rows are passed over.
        limit: bytes of inputs to keep. Beyond it all are let go but for their rows, and `full` is True.

    Attributes: inputs, rows, outputs: tensors by (path of the module, number of its call). Inputs are the model's own
    tensors, not copies; no result changes.
    """

    def __init__(self, model: nn.Module, *tokens: int, limit: int = LIMIT) -> None:
        self.inputs: dict[tuple[str, int], Tensor] = {}
        self.rows: dict[tuple[str, int], Tensor] = {}  # (3, d_in)
        self.outputs: dict[tuple[str, int], Tensor] = {}  # (3, d)
        self.full = False
        self._model, self._tokens, self._limit = model, tokens, limit
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._blocks = set[str]()  # modules of modules of modules: seldom those that attend, the first to be let go
        self._scarce = False  # such inputs are not kept any more
        self._at = dict[tuple[torch.device, int], Tensor]()
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        for path, module in _watched(self._model):
            if any(next(child.children(), None) is not None for child in module.children()):
                self._blocks.add(path)
            attends = not path or _may_attend(module)
            if attends:
                self._stack.callback(module.register_forward_pre_hook(self._before(path), with_kwargs=True).remove)
            if attends or getattr(getattr(module, "weight", None), "ndim", 0) == 2:
                self._stack.callback(module.register_forward_hook(self._after(path)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _before(self, path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((each for each in (*args, *kwargs.values()) if is_sequence(each, *self._tokens)), None)
            if x is None:
                return
            self.rows[path, self._calls[path]] = self._three(x)
            if not (self.full or (self._scarce and path in self._blocks)):
                self._hold(path, x.detach().reshape(x.shape[-2:]))

        return keep

    def _three(self, x: Tensor) -> Tensor:
        """`rows_of` x, in as few operations as can be: this runs hundreds of times in a pass."""
        place = x.device, x.shape[-2]
        at = self._at[place] if place in self._at else self._at.setdefault(place, _three_of(place[1]).to(x.device))
        return x.detach().index_select(-2, at).view(3, -1)

    def _hold(self, path: str, x: Tensor) -> None:
        self.inputs[path, self._calls[path]] = x
        if sum(each.nbytes for each in self.inputs.values()) > self._limit:
            self._scarce = True
            self.inputs = {at: each for at, each in self.inputs.items() if at[0] not in self._blocks}
        if sum(each.nbytes for each in self.inputs.values()) > self._limit:
            self.full, self.inputs = True, {}

    def keep_only(self, paths: Iterable[str]) -> None:
        """Let go of the inputs of all other modules, once it is known which attended."""
        wanted = set(paths)
        self.inputs = {at: x for at, x in self.inputs.items() if at[0] in wanted}

    def _after(self, path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            out = result[0] if isinstance(result, tuple) and result else result
            if is_sequence(out, *self._tokens):
                self.outputs[path, self._calls[path]] = self._three(out)
            self._calls[path] += 1

        return keep


def _may_attend(module: nn.Module) -> bool:
    """Whether to keep what a module is given: not of a matrix, a norm, an activation, a feed-forward layer."""
    alone = next(module.children(), None) is None
    plain = hasattr(module, "weight") or next(module.parameters(), None) is None
    return not (alone and plain) and _NO_ATTENTION.search(type(module).__name__) is None


def _watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules to watch, with their paths."""
    closed: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if isinstance(module, _UNTOUCHED):
            closed = (*closed, f"{path}." if path else "")
        elif not path.startswith(closed):
            yield path, module


def is_sequence(value: object, *tokens: int) -> bool:
    """Whether it is a tensor of one vector a token, (T, d) or (1, T, d), of one of these lengths."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim not in (2, 3):
        return False
    return value.shape[-2] in tokens and (value.ndim == 2 or value.shape[0] == 1)


def rows_of(x: Tensor) -> Tensor:
    """The second, the middle and the last row of (T, …): what a guess about a matrix is held against."""
    return x.detach()[_three_of(len(x))]


def _three_of(length: int) -> Tensor:
    return torch.tensor([min(1, length - 1), length // 2, length - 1])
