"""What `clearhead learn` and `clearhead check` do and print."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from clearhead._plain import plain
from clearhead.learn.checking import Report, check, describe
from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import exercises_of
from clearhead.learn.folder import default_folder, exercise_file, program, reset, write
from clearhead.learn.lessons import Lesson, all_lessons, find_lesson
from clearhead.learn.progress import Record, progress, update

__all__ = ["check_lesson", "list_lessons", "reset_lesson", "start_lesson"]


def list_lessons() -> None:
    """Print the lessons, and how far the learner is in each."""
    lessons, known = all_lessons(), progress()
    width = max(len(lesson.title) for lesson in lessons)
    for lesson in lessons:
        done = [name in known[lesson.number].passed for name in lesson.exercises]
        marks = " ".join("✓" if passed else "○" for passed in done)
        count = f"{sum(done)} of {len(done)} exercises" if done else "no exercises"
        print(f"{lesson.number:>2}  {lesson.title:<{width}}  {count}  {marks}".rstrip())
    clearhead = program("clearhead")
    print("\n✓ has passed once; that stays counted, whatever the file holds now.")
    print(f"Start lesson N: {clearhead} learn N      Check its exercises: {clearhead} check N")


def start_lesson(number: int, folder: Path | None) -> None:
    """Write the lesson's files and say how to open them."""
    lesson = find_lesson(number)
    named = folder is not None
    folder = default_folder(lesson) if folder is None else folder
    written = write(lesson, folder)
    update(number, partial(_remember, folder))
    print(f"Lesson {number}: {lesson.title}")
    if folder == Path() and not named:
        print(plain(f"You are in its folder, {Path.cwd()}:"))
    for name, new in written.items():
        print(plain(f"  {folder / name}{'' if new else '   was there and is left as it is'}"))
    print("Open it, one of:")
    print(f"  the notebook in VS Code, Colab or Jupyter ({program('python')} -m pip install jupyterlab)")
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    print(plain(f"  {enter}{program('python')} {lesson.path.name}"))
    if lesson.exercises:
        print(plain(f"Then write what is missing in {folder / 'exercises.py'}, and see whether it is right:"))
        print(f"  {program('clearhead')} check {number}")


def check_lesson(
    number: int, folder: Path | None, *, seed: int | None = None, hint: bool = False, solution: bool = False
) -> bool:
    """Check the exercises and print each outcome as it comes, then the next hint or the solution if wanted.

    Returns: whether all pass.
    """
    file = exercise_file(find_lesson(number), folder)
    print(plain(f"Checking {file} ..."), flush=True)
    report = check(number, file.parent, seed=seed, on_outcome=lambda outcome: print(describe(outcome), flush=True))
    print(f"\n{report.summary}")
    if solution:
        _show_solution(report)
    elif hint:
        _show_hint(report)
    else:
        _show_next(report)
    return report.passed


def reset_lesson(number: int, folder: Path | None) -> None:
    """Start the exercises of the lesson anew and keep the file as it was under another name."""
    lesson = find_lesson(number)
    file = exercise_file(lesson, folder)
    kept = reset(lesson, file)
    update(number, _forget)
    print(plain(f"{file} is as it was at the beginning, and nothing of lesson {number} counts as done."))
    if kept is not None:
        print(plain(f"What you had written is kept as {kept.name} beside it."))


def _remember(folder: Path, record: Record) -> None:
    record.folder = str(folder.resolve())


def _forget(record: Record) -> None:
    record.passed, record.hints = [], {}


def _show_next(report: Report) -> None:
    number = report.lesson.number
    if not report.outcomes[0].loaded:
        return
    if not report.passed:
        print(f"Stuck? {program('clearhead')} check {number} --hint   (or --solution)")
        return
    following = [lesson for lesson in all_lessons() if lesson.number > number]
    if following:
        print(f"Next: {program('clearhead')} learn {following[0].number}   {following[0].title}")


def _show_hint(report: Report) -> None:
    number, name = report.lesson.number, report.first_open
    if name is None:
        print("There is nothing left to hint at.")
        return
    if not report.outcomes[0].loaded:
        print("A hint comes once Python can read the file.")
        return
    hints = _exercise(report.lesson, name).hints
    given = min(progress()[number].hints.get(name, 0) + 1, len(hints))
    update(number, lambda record: record.hints.update({name: given}))
    for count, hint in enumerate(hints[:given], 1):
        print(f"Hint {count} of {len(hints)} for {name}: {hint}")
    if given == len(hints):
        print(f"There are no more hints. One way to write it: {program('clearhead')} check {number} --solution")


def _show_solution(report: Report) -> None:
    names = report.lesson.exercises if report.first_open is None else (report.first_open,)
    for name in names:
        print(f"\nOne way to write {name}:\n\n{_exercise(report.lesson, name).source}")


def _exercise(lesson: Lesson, name: str) -> Exercise:
    return next(exercise for exercise in exercises_of(lesson.number) if exercise.name == name)
