"""What a learner gets to fill in, and what no answer may do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clearhead.learn.exercise import Exercise, Wrong, unchanged


def one_line(x: int) -> int:
    """The docstring stays."""
    # a comment that gives it away
    total = 0
    for _ in range(2):
        total += x
    return total


def many_lines(
    x: int,
    *,
    factor: int = 2,
) -> int:
    """The signature stays, all of it.

    And the rest of the docstring.
    """
    return x * factor


class Layer(torch.nn.Module):
    """A class keeps its constructor."""

    width = 3

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))  # with its comments

    def forward(self, x: Any) -> Any:
        """What comes out."""

        def inner() -> Any:
            return x

        return inner()

    def without_docstring(self) -> int:
        return 3


def exercise(solution: Any) -> Exercise:
    return Exercise(solution, lambda answer, generator: None, hints=())


def test_the_body_of_a_function_is_left_to_write() -> None:
    assert exercise(one_line).stub == (
        'def one_line(x: int) -> int:\n    """The docstring stays."""\n    raise NotImplementedError  # your code here'
    )
    stub = exercise(many_lines).stub
    assert stub.startswith("def many_lines(\n    x: int,\n    *,\n    factor: int = 2,\n) -> int:\n")
    assert 'And the rest of the docstring.\n    """\n    raise NotImplementedError' in stub
    assert "return" not in stub


def test_a_class_keeps_its_constructor_and_its_attributes() -> None:
    stub = exercise(Layer).stub
    assert "width = 3" in stub
    assert "self.weight = torch.nn.Parameter(torch.zeros(size))  # with its comments" in stub
    assert "return" not in stub
    assert stub.count("raise NotImplementedError  # your code here") == 2
    assert 'def forward(self, x: Any) -> Any:\n        """What comes out."""\n        raise' in stub


@pytest.mark.parametrize("solution", [one_line, many_lines, Layer])
def test_stubs_are_code_that_says_it_is_not_written(solution: Any) -> None:
    namespace: dict[str, Any] = {"torch": torch, "Any": Any}
    exec(exercise(solution).stub, namespace)
    left = namespace[solution.__name__]
    with pytest.raises(NotImplementedError):
        left(2).without_docstring() if solution is Layer else left(2)


def test_the_source_is_the_solution_as_it_is_written() -> None:
    assert exercise(one_line).source.endswith("    return total")
    assert "# a comment that gives it away" in exercise(one_line).source


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.t_(), lambda x: x[0].fill_(torch.nan)])
def test_inputs_may_not_be_changed(change: Any) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    with pytest.raises(Wrong, match=r"changes its input in place.*make a new tensor"), unchanged(x):
        change(x)


def test_inputs_may_be_read_nan_and_all() -> None:
    x = torch.tensor([torch.nan, 1.0])
    with unchanged(x):
        read = x + 1
    assert read[1] == 2
