"""How far the learner is: a small JSON file in the user's data folder."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clearhead._files import write_whole

__all__ = ["Record", "progress", "update"]


@dataclass
class Record:
    """What is known of one lesson.

    Args:
        folder: that its files were last written into.
        passed: the exercises that have passed once.
        hints: how many hints were given for an exercise.
    """

    folder: str = ""
    passed: list[str] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)


def location() -> Path:
    """The file: in ``$CLEARHEAD_DATA`` if set, else in the user's data folder."""
    chosen = os.environ.get("CLEARHEAD_DATA")
    if chosen:
        return Path(os.path.expanduser(chosen)) / "progress.json"
    from platformdirs import user_data_path

    return user_data_path("clearhead") / "progress.json"


def progress() -> defaultdict[int, Record]:
    """What is known of every lesson, by its number."""
    return defaultdict(Record, _read() or {})


def update(lesson: int, change: Callable[[Record], None]) -> None:
    """Change what is known of the lesson; where the file cannot be written, say so and go on.

    The file is replaced whole: it is never seen half written.
    """
    records = _read()
    if records is None:
        return
    change(records.setdefault(lesson, Record()))
    content = {"lessons": {str(number): asdict(record) for number, record in sorted(records.items())}}
    try:
        location().parent.mkdir(parents=True, exist_ok=True)
        write_whole(location(), json.dumps(content, indent=1))
    except OSError as error:
        _say(f"your progress cannot be kept in {location()}: {error.strerror or error}")


def _read() -> dict[int, Record] | None:
    """What is known of every lesson; None if that cannot be read now, but may well be there."""
    try:
        return _parse(json.loads(location().read_text("utf-8")))
    except FileNotFoundError:
        return {}
    except OSError as error:
        _say(f"your progress cannot be read from {location()}: {error.strerror or error}")
        return None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # no JSON, or not what was written
        _set_aside()
        return {}


def _parse(content: Any) -> dict[int, Record]:
    """The records; raises one of several errors where anything is not what `update` wrote."""
    return {int(number): _record(**record) for number, record in content["lessons"].items()}


def _record(folder: str, passed: list[str], hints: dict[str, int]) -> Record:
    names = [folder, *passed, *hints]
    if not (isinstance(passed, list) and all(isinstance(name, str) for name in names)):
        raise TypeError
    return Record(folder, passed, {name: int(count) for name, count in hints.items()})


def _set_aside() -> None:
    damaged = location()
    kept = damaged.with_name(f"progress-damaged-{os.getpid()}.json")
    try:
        os.replace(damaged, kept)
    except OSError as error:
        _say(f"the file of your progress is damaged, {damaged}, and cannot be moved: {error.strerror or error}")
    else:
        _say(f"the file of your progress was damaged and is now {kept}; progress starts anew")


def _say(message: str) -> None:
    print(f"clearhead: {message}", file=sys.stderr)
