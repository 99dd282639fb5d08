"""The lessons: which there are, and what stands in their files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from clearhead.errors import LessonError
from clearhead.learn.exercises import NAMES

__all__ = ["Lesson", "all_lessons", "find_lesson"]


@dataclass(frozen=True)
class Lesson:
    """One lesson: a script in percent format, whose first heading is its title.

    Args:
        number: that its file begins with, and that the commands take.
        path: of the script.
    """

    number: int
    path: Path

    @property
    def title(self) -> str:
        """The first heading, without "Lesson 3:" before it."""
        heading = re.search(r"^# # (?:Lesson )?(?:\d+[.:]\s*)?(.+)$", self.script(), re.MULTILINE)
        return heading[1].strip() if heading else self.path.stem

    @property
    def exercises(self) -> tuple[str, ...]:
        """The names of the exercises, in order."""
        return NAMES.get(self.number, ())

    def script(self) -> str:
        """The lesson as it is written."""
        return self.path.read_text("utf-8")

    def notebook(self) -> str:
        """The lesson as a notebook (.ipynb), its cells not yet run."""
        import jupytext

        read = jupytext.reads(self.script(), fmt="py:percent")
        text: str = jupytext.writes(read, fmt="ipynb")
        return text


def all_lessons() -> list[Lesson]:
    """The lessons, by number."""
    return [Lesson(int(path.name[:2]), path) for path in sorted(_folder().glob("[0-9][0-9]_*.py"))]


def find_lesson(number: int) -> Lesson:
    """The lesson of this number.

    Raises:
        LessonError: naming the lessons there are.
    """
    lessons = all_lessons()
    for lesson in lessons:
        if lesson.number == number:
            return lesson
    raise LessonError(f"there is no lesson {number}; there are {', '.join(str(lesson.number) for lesson in lessons)}")


def _folder() -> Path:
    """Beside this file, where a wheel puts them; at the top of the repository, where a checkout has them."""
    here = Path(__file__).parent
    places = (here / "scripts", here.parents[2] / "lessons")
    for place in places:
        if place.is_dir():
            return place
    raise LessonError(f"the lessons are not where they were installed: {places[0]}; install clearhead again")
