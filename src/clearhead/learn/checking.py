"""Check the exercises of a lesson, and keep what passed."""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from clearhead._plain import plain
from clearhead.learn import running
from clearhead.learn.exercises import module_of
from clearhead.learn.folder import exercise_file, in_notebook
from clearhead.learn.lessons import Lesson, find_lesson
from clearhead.learn.progress import Record, update
from clearhead.learn.running import Outcome

__all__ = ["Report", "check", "describe"]

MARKS = {"passed": "✓", "wrong": "✗", "failed": "✗", "unwritten": "○"}
_WIDTH = 96
_LINES = 10  # of output


@dataclass(frozen=True)
class Report:
    """What came of checking a lesson's exercises; shown as text.

    Args:
        lesson: that was checked.
        file: the learner's.
        seed: of the inputs; `check(…, seed=…)` makes the same ones.
        outcomes: one for each exercise, fewer if the file could not be read.
    """

    lesson: Lesson
    file: Path
    seed: int
    outcomes: tuple[Outcome, ...]

    @property
    def first_open(self) -> str | None:
        """The name of the first exercise that does not pass."""
        return next((outcome.name for outcome in self.outcomes if not outcome.passed), None)

    @property
    def passed(self) -> bool:
        """Whether every exercise passes."""
        return self.first_open is None

    @property
    def summary(self) -> str:
        """One line: how many pass, and how to repeat the inputs if not all do."""
        count, total = sum(outcome.passed for outcome in self.outcomes), len(self.lesson.exercises)
        if count == total:
            return f"All {total} exercises of lesson {self.lesson.number} pass."
        again = f" (The same inputs again: --seed {self.seed}, or seed={self.seed} in Python)"
        return f"{count} of {total} exercises pass.{again if any(map(_depends, self.outcomes)) else ''}"

    def __repr__(self) -> str:
        return "\n".join([f"Checked {self.file}", *map(describe, self.outcomes), self.summary])


def _depends(outcome: Outcome) -> bool:
    """Whether the outcome may depend on the inputs."""
    return outcome.loaded and outcome.verdict in ("wrong", "failed")


def check(
    lesson: int,
    folder: str | Path | None = None,
    *,
    seed: int | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Check the learner's `exercises.py` of this lesson, each exercise in a process of its own with a time limit.

    Args:
        lesson: its number.
        folder: that holds `exercises.py`; by default the current folder if it is that lesson's, else
            ./clearhead-lesson-N, or where `clearhead learn N` wrote last.
        seed: of the inputs; new ones each time by default.
        on_outcome: called with each outcome as it comes.

    Returns: the report, which shows itself in a notebook.

    Raises:
        LessonError: where there is no such lesson or file.

    Cost: importing torch, once for each exercise and all at once; 20 seconds for code that does not end.
    """
    found = find_lesson(lesson)
    file = exercise_file(found, None if folder is None else Path(folder))
    seed = secrets.randbelow(1_000_000) if seed is None else seed  # short enough to be typed
    outcomes = []
    for outcome in _outcomes(found, file, seed):
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
    return Report(found, file, seed, tuple(outcomes))


def _outcomes(lesson: Lesson, file: Path, seed: int) -> Iterator[Outcome]:
    """Check one exercise after the other, and keep in the progress what passes."""
    for outcome in running.run(module_of(lesson.number), lesson.exercises, file, seed):
        if outcome.passed:
            update(lesson.number, partial(_keep, outcome.name))
        yield _told_where(outcome, lesson, file)


def _keep(name: str, record: Record) -> None:
    record.passed = [*dict.fromkeys([*record.passed, name])]
    record.hints.pop(name, None)


def _told_where(outcome: Outcome, lesson: Lesson, file: Path) -> Outcome:
    """Of what is not written, say if it stands where the check does not look."""
    elsewhere = in_notebook(outcome.name, lesson, file.parent) if outcome.verdict == "unwritten" else None
    if elsewhere is None:
        return outcome
    more = f"There is one in {elsewhere}, which the check does not read: copy it into {file.name}."
    return replace(outcome, message=f"{outcome.message}\n{more}")


def describe(outcome: Outcome) -> str:
    """The outcome in lines, safe to print: what the code raised and printed may hold anything."""
    lines = [f"{MARKS[outcome.verdict]} {outcome.name}", *_wrapped(outcome.message, "    ")]
    printed = list(_wrapped(outcome.printed, "      "))
    if printed:
        lines += ["    It printed:", *printed[:_LINES]]
    if len(printed) > _LINES:
        lines.append("      … and more")
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield from textwrap.wrap(plain(line.expandtabs()), _WIDTH, initial_indent=indent, subsequent_indent=indent)
