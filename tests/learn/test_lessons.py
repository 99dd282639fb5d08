"""The lessons that are handed out: their exercises are there, not yet written, and can be solved in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.learn import Lesson, Outcome, all_lessons
from clearhead.learn.exercises import NAMES, exercises_of, module_of
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
def test_what_is_handed_out_is_unwritten_and_the_solutions_pass_in_its_place(
    lesson: Lesson, tmp_path: Path, judge_here: Callable[..., Outcome]
) -> None:
    """With only the imports that a learner's file begins with; of two lessons one in a process of its own too."""
    pytest.importorskip("jupytext")
    folder = tmp_path / "lesson"
    write(lesson, folder)
    file = (folder / "exercises.py").resolve()
    exercises, text = exercises_of(lesson.number), file.read_text()
    for exercise in exercises:
        assert judge_here(exercise, file).verdict == "unwritten"
        assert exercise.stub in text
        text = text.replace(exercise.stub, exercise.source)
    file.write_text(text)
    outcomes = [judge_here(exercise, file) for exercise in exercises]
    if lesson in (LESSONS[0], LESSONS[-1]):  # which imports torch once more
        outcomes += run(module_of(lesson.number), lesson.exercises[-1:], file, seed=1)
    assert {(outcome.verdict, outcome.message, outcome.printed) for outcome in outcomes} == {("passed", "", "")}


@pytest.mark.parametrize("lesson", LESSONS, ids=names)
def test_notebooks_hold_text_and_code_and_name_their_kernel(lesson: Lesson) -> None:
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.reads(lesson.notebook(), fmt="ipynb")
    assert {cell.cell_type for cell in notebook.cells} == {"markdown", "code"}
    assert notebook.metadata.kernelspec.name == "python3"
