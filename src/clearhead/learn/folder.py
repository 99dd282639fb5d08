"""The learner's folder: the lesson as notebook and script, and the file to write in, which is never overwritten."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from clearhead._files import write_whole
from clearhead.errors import LessonError
from clearhead.learn.exercises import exercises_of
from clearhead.learn.lessons import Lesson
from clearhead.learn.progress import progress

__all__ = ["default_folder", "exercise_file", "in_notebook", "program", "reset", "write"]

EXERCISES = "exercises.py"

_HEADER = '''"""Exercises of lesson {number}: {title}.

Write what is missing, save this file, and run:
    {command}
Stuck? Add --hint. One way to write it: add --solution. From the beginning: add --reset.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
'''


def default_folder(lesson: Lesson) -> Path:
    """Where the lesson goes if no folder is named: the current folder where it is the lesson's, else one in it."""
    named = Path(f"clearhead-lesson-{lesson.number}")
    return Path() if _is_here(lesson) or Path.cwd().name == named.name else named


def write(lesson: Lesson, folder: Path) -> dict[str, bool]:
    """Write the lesson into the folder; what is there already stays as it is.

    Returns: for each file's name, whether it was written (True) or was there (False).

    Raises:
        LessonError: where the folder cannot be made or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise LessonError(f"{folder} is a file: name a folder with --folder")
    if not folder.parent.is_dir():
        raise LessonError(f"there is no folder {folder.parent} to make {folder.name} in")
    contents = {f"{lesson.path.stem}.ipynb": lesson.notebook, f"{lesson.path.stem}.py": lesson.script}
    if lesson.exercises:
        contents[EXERCISES] = partial(_exercises, lesson)
    done = {name: not os.path.lexists(folder / name) for name in contents}
    try:
        folder.mkdir(exist_ok=True)
        for name in contents:
            if done[name]:
                write_whole(folder / name, contents[name]())
    except OSError as error:
        raise LessonError(f"cannot write to the folder {folder}: {error.strerror or error}") from error
    return done


def _exercises(lesson: Lesson) -> str:
    stubs = (f"\n\n{exercise.stub}\n" for exercise in exercises_of(lesson.number))
    command = f"{program('clearhead')} check {lesson.number}"
    return _HEADER.format(number=lesson.number, title=lesson.title, command=command) + "".join(stubs)


def program(name: str) -> str:
    """How to call it from any folder: by its name if that finds the one beside this Python, else by its path."""
    path = Path(sys.executable).parent / name
    found = shutil.which(name)
    return name if found and Path(found).absolute() == path else shlex.quote(path.as_posix())


def reset(lesson: Lesson, file: Path) -> Path | None:
    """Start the exercises anew; the file as it was stays beside it under a new name.

    Returns: that name; None where nothing was written yet, and nothing is to be kept.
    """
    if file.read_bytes() == _exercises(lesson).encode():
        return None
    number = 1
    while os.path.lexists(kept := file.with_name(f"{file.stem}-old-{number}.py")):
        number += 1
    os.replace(file, kept)
    write_whole(file, _exercises(lesson))
    return kept


def exercise_file(lesson: Lesson, folder: Path | None) -> Path:
    """The file to check: in this folder, else where `clearhead learn` would write it here, or wrote it last.

    Raises:
        LessonError: where there is none; it says where was looked.
    """
    if not lesson.exercises:
        raise LessonError(f"lesson {lesson.number} has no exercises")
    if folder is not None and folder.is_file():
        raise LessonError(f"{folder} is a file: name its folder with --folder")
    if folder is not None:
        places = [folder]
    else:
        last = progress()[lesson.number].folder
        places = [default_folder(lesson), *([Path(last)] if last else [])]
    for place in places:
        if (place / EXERCISES).is_file():
            return (place / EXERCISES).resolve()
    looked = " or ".join(dict.fromkeys(str((place / EXERCISES).absolute()) for place in places))
    raise LessonError(
        f"there is no file {looked}. The check reads {EXERCISES} and nothing else: write it with "
        f"{program('clearhead')} learn {lesson.number}, or name its folder with --folder"
    )


def _is_here(lesson: Lesson) -> bool:
    """Whether the current folder's exercises are this lesson's, by their first line."""
    try:
        return f"Exercises of lesson {lesson.number}: " in Path(EXERCISES).read_text("utf-8")
    except (OSError, ValueError):
        return False


def in_notebook(name: str, lesson: Lesson, folder: Path) -> str | None:
    """The learner's notebook or script (no check reads it) if it defines this name and the lesson itself does not."""
    definition = re.compile(rf"^\s*(?:def|class) {re.escape(name)}\b", re.MULTILINE)
    if definition.search(lesson.path.read_text("utf-8")):
        return None
    for suffix in (".ipynb", ".py"):
        file = folder / f"{lesson.path.stem}{suffix}"
        try:
            text = file.read_text("utf-8")
            if definition.search(_code(json.loads(text)) if suffix == ".ipynb" else text):
                return file.name
        except (OSError, ValueError, LookupError, TypeError):  # not there, or no notebook
            continue
    return None


def _code(notebook: Any) -> str:
    return "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
