"""A lesson with two tiny exercises, a data folder and a current folder of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from clearhead.learn import Outcome, checking, exercises, lessons
from clearhead.learn.child import _judge
from clearhead.learn.exercise import Exercise

LESSON = """# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Lesson 7: Doubling
#
# Twice a number is the number added to itself.

# %%
print(1 + 1)
"""

EXERCISES = '''
from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.learn.exercise import Exercise, Wrong


def double(x: Tensor) -> Tensor:
    """Twice x."""
    return x + x


class Doubler(nn.Module):
    """A layer that doubles."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice x."""
        return 2 * x


def check_double(answer, generator):
    x = torch.randn(3, generator=generator)
    y = answer(x)
    if not torch.equal(y, x + x):
        raise Wrong("Twice means added to itself.")


EXERCISES = (
    Exercise(double, check_double, hints=("Think of addition.", "x + x")),
    Exercise(Doubler, lambda answer, generator: check_double(answer(), generator), hints=("See double.",)),
)
'''

# An exercise that needs nothing of PyTorch, and what stands for it: importing the real one is most of a check's time.
LIGHT = {
    "light_exercises.py": """
import torch
from clearhead.learn.exercise import Exercise

def double(x):
    return x + x

def check(answer, generator):
    assert answer(3) == 6

EXERCISES = [Exercise(double, check, hints=())]
""",
    "torch.py": """
class Generator:
    manual_seed = lambda self, seed: self

manual_seed = lambda seed: None
""",
}

RIGHT = """
import torch

def double(x):
    return 2 * x

class Doubler(torch.nn.Module):
    forward = staticmethod(double)
"""


@pytest.fixture
def right() -> str:
    """A right answer to both exercises of lesson 7."""
    return RIGHT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty; lesson 7, Doubling, and lesson 8, which has no exercises; no progress yet."""
    for name in ("here", "lessons", "modules"):
        (tmp_path / name).mkdir()
    (tmp_path / "lessons" / "07_doubling.py").write_text(LESSON)
    (tmp_path / "lessons" / "08_reading.py").write_text("# %% [markdown]\n# # Reading\n")
    (tmp_path / "modules" / "tiny_exercises.py").write_text(EXERCISES)
    monkeypatch.setattr(lessons, "_folder", lambda: tmp_path / "lessons")
    monkeypatch.setattr(exercises, "NAMES", {7: ("double", "Doubler")})
    monkeypatch.setattr(lessons, "NAMES", {7: ("double", "Doubler")})
    for module in (exercises, checking):
        monkeypatch.setattr(module, "module_of", lambda lesson: "tiny_exercises")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "tiny_exercises", raising=False)
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def answer(here: Path) -> Callable[[str], Path]:
    """Write this as the learner's exercises.py of lesson 7; returns the file."""

    def write(text: str) -> Path:
        file = here / "clearhead-lesson-7" / "exercises.py"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text.encode())
        return file.resolve()

    return write


@pytest.fixture
def light(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of checks find light_exercises, and no PyTorch."""
    (tmp_path / "light").mkdir()
    for name, text in LIGHT.items():
        (tmp_path / "light" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "light"))


@pytest.fixture
def judge_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Judge an exercise in this process, which has imported PyTorch already: for answers that do not end Python."""

    def judged(exercise: Exercise, file: Path, seed: int = 3) -> Outcome:
        monkeypatch.setitem(sys.modules, "exercises", None)
        with redirect_stdout(io.StringIO()) as printed:
            found = _judge(exercise, file, tmp_path / "state", seed)
        return Outcome(exercise.name, printed=printed.getvalue().rstrip(), **found)

    return judged
