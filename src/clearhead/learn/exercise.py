"""What an exercise is: a task as the stub of a solution, the check of an answer, and hints."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Exercise", "Wrong", "unchanged"]

_STUB = "raise NotImplementedError  # your code here"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Wrong(Exception):
    """Raised by a check; the message says what is wrong with the answer, in terms of the idea."""


@dataclass(frozen=True)
class Exercise:
    """One thing for the learner to write.

    Args:
        solution: a right answer, real code with a docstring that says what to write; it uses only `math`, `torch`,
            `nn`, `F` (`torch.nn.functional`), `Tensor` and `clearhead`, which the learner's file imports.
        check: called with the learner's function or class and a freshly seeded generator; raises `Wrong`.
        hints: from the gentle to the plain.
        slips: what to say in terms of the idea where the learner's code raises: (pattern, sentence). The pattern is
            searched in the error's text and, below it, the line of code; the first that is found counts.

    >>> def double(x: float) -> float:
    ...     '''Twice x.'''
    ...     return x + x
    >>> print(Exercise(double, lambda answer, generator: None, hints=("Add.",)).stub)
    def double(x: float) -> float:
        '''Twice x.'''
        raise NotImplementedError  # your code here
    """

    solution: Callable[..., Any]
    check: Callable[[Any, torch.Generator], None]
    hints: tuple[str, ...]
    slips: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Of the function or class, in the learner's file as in ours."""
        return self.solution.__name__

    def remark(self, error: str) -> str:
        """What to say about an error that is shown like this; empty if nothing is known of it."""
        return next((sentence for pattern, sentence in self.slips if re.search(pattern, error)), "")

    @property
    def source(self) -> str:
        """The solution as it is written."""
        return textwrap.dedent(inspect.getsource(self.solution)).strip()

    @property
    def stub(self) -> str:
        """The solution without what the learner has to write: signatures, docstrings and a class's `__init__` stay."""
        lines = self.source.split("\n")
        for function in reversed(list(_to_write(ast.parse(self.source).body[0]))):
            body = function.body[1:] if ast.get_docstring(function) is not None else function.body
            start = function.body[0].end_lineno if body is not function.body else body[0].lineno - 1
            lines[start : function.end_lineno] = [" " * function.body[0].col_offset + _STUB]
        return "\n".join(lines)


def _to_write(node: ast.stmt) -> Iterator[Function]:
    """The function itself, or a class's methods but `__init__`, from the top."""
    if isinstance(node, Function):
        yield node
    elif isinstance(node, ast.ClassDef):
        yield from (part for part in node.body if isinstance(part, Function) and part.name != "__init__")


@contextmanager
def unchanged(*inputs: Tensor) -> Iterator[None]:
    """Refuse an answer that, within this block, writes into its inputs.

    Raises:
        Wrong: where a tensor is not what it was.
    """
    before = [tensor.detach().clone() for tensor in inputs]
    yield
    for tensor, copy in zip(inputs, before, strict=True):
        if tensor.shape != copy.shape or not bool(((tensor == copy) | (copy.isnan() & tensor.isnan())).all()):
            raise Wrong(
                "Your code changes its input in place (x += …, x[…] = …, a method ending in _). "
                "Whoever passed it in still needs it: make a new tensor."
            )
