"""What is no answer to any exercise: nothing, lists, NaN, other shapes, numbers typed in, inputs that are changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.learn.exercise import Exercise, Wrong
from clearhead.learn.exercises import NAMES, exercises_of

EXERCISES: dict[str, Exercise] = {e.name: e for lesson in NAMES for e in exercises_of(lesson)}
Answer = Callable[..., Any]


def change(how: Callable[[Tensor], Any]) -> Callable[[Answer], Answer]:
    """Does this to the right answer, or to the first of two."""

    def changed(right: Answer) -> Answer:
        def answer(*args: Any) -> Any:
            got = right(*args)
            return (how(got[0]), *got[1:]) if isinstance(got, tuple) else how(got)

        return answer

    return changed


def changes_its_input(right: Answer) -> Answer:
    def answer(*args: Any) -> Any:
        got = right(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))
        next(arg for arg in args if isinstance(arg, Tensor)).mul_(2)  # args[0] is a layer's self
        return got

    return answer


def types_in(right: Answer) -> Answer:
    """What was right the first time, ever after."""
    first: list[Any] = []

    def answer(*args: Any) -> Any:
        first.append(right(*args))
        return first[0]

    return answer


ANYBODY: dict[str, tuple[str, Callable[[Answer], Answer]]] = {
    "None": ("None", lambda right: lambda *args: None),
    "a list": ("list|float", change(Tensor.tolist)),
    "an array": ("ndarray", change(lambda got: got.detach().numpy())),
    "whole numbers": ("int64", change(Tensor.long)),
    "NaN": ("NaN", change(lambda got: got * math.nan)),
    "infinity": ("infinity", change(lambda got: got / 0)),
    "another shape": ("shape", change(lambda got: got[None])),
    "numbers typed in": ("numbers copied from the lesson|Nothing is dropped", types_in),
    "an input that is changed": ("in place", changes_its_input),
}


@pytest.mark.parametrize("what", ANYBODY)
@pytest.mark.parametrize("name", EXERCISES)
def test_what_is_no_answer_at_all_is_refused(name: str, what: str) -> None:
    words, spoil = ANYBODY[what]
    solution = EXERCISES[name].solution
    spoilt: Any = spoil(solution)
    if isinstance(solution, type):
        forward = spoil(solution.forward)  # type: ignore[attr-defined]
        spoilt = type(name, (solution,), {"forward": lambda self, *x: forward(self, *x)})
    with pytest.raises(Wrong, match=words):
        EXERCISES[name].check(spoilt, torch.Generator().manual_seed(0))
