"""The lessons that are handed out: their exercises are there, not yet written, and can be solved in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from clearhead.learn import Lesson, all_lessons
from clearhead.learn.exercises import NAMES, exercises_of
from clearhead.learn.folder import write
from clearhead.learn.running import run

LESSONS = [lesson for lesson in all_lessons() if lesson.exercises]


def names(lesson: Lesson) -> str:
    return str(lesson.number)


def test_every_lesson_with_exercises_is_there() -> None:
    assert [lesson.number for lesson in LESSONS] == sorted(NAMES)
    assert all(lesson.title != lesson.path.stem for lesson in LESSONS)


@pytest.mark.parametrize("lesson", LESSONS, ids=names)
def test_exercises_are_those_that_are_listed(lesson: Lesson) -> None:
    exercises = exercises_of(lesson.number)
    assert tuple(exercise.name for exercise in exercises) == lesson.exercises
    assert all(exercise.hints for exercise in exercises)


@pytest.mark.parametrize("lesson", LESSONS, ids=names)
def test_what_is_handed_out_is_unwritten_and_the_solutions_pass_in_its_place(lesson: Lesson, tmp_path: Path) -> None:
    """In processes of their own, with only the imports that a learner's file begins with."""
    pytest.importorskip("jupytext")
    folder = tmp_path / "lesson"
    write(lesson, folder)
    file = (folder / "exercises.py").resolve()
    module = f"clearhead.learn.exercises.lesson{lesson.number}"
    assert [outcome.verdict for outcome in run(module, lesson.exercises, file, seed=1)] == ["unwritten"] * len(
        lesson.exercises
    )
    text = file.read_text()
    for exercise in exercises_of(lesson.number):
        assert exercise.stub in text
        text = text.replace(exercise.stub, exercise.source)
    file.write_text(text)
    outcomes = list(run(module, lesson.exercises, file, seed=1))
    assert [(outcome.message, outcome.printed) for outcome in outcomes] == [("", "")] * len(lesson.exercises)


@pytest.mark.parametrize("lesson", LESSONS, ids=names)
def test_notebooks_hold_text_and_code_and_name_their_kernel(lesson: Lesson) -> None:
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.reads(lesson.notebook(), fmt="ipynb")
    assert {cell.cell_type for cell in notebook.cells} == {"markdown", "code"}
    assert notebook.metadata.kernelspec.name == "python3"
