"""What is done of an atlas, in a folder: a file for each process that worked on it, each whole or not there.

A file says which batches are in its tallies and, by a digest, what all batches up to there were. Files are never
changed by a later run, which adds its own: so nothing is lost, and nothing is counted twice, whenever it is killed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clearhead._files import checksum, write_whole
from clearhead.errors import RecordingError
from clearhead.heads.tally import Tally, added

__all__ = ["Part", "Progress", "together"]

_TALLIES = ("layers", "uniform")
_NAME = re.compile(r"part-(\d{4,})-(\d{4,})\.json")


@dataclass(frozen=True)
class Part:
    """What one process has done: of the batches before `upto` those with number % step == offset.

    Batches that an earlier part holds are left out. digest: of all batches before `upto`.
    """

    step: int
    offset: int
    upto: int = 0
    digest: str = ""
    batches: int = 0
    windows: int = 0
    tokens: int = 0
    layers: Sequence[Tally] = ()
    uniform: Sequence[Tally] = ()

    def has(self, batch: int) -> bool:
        """Whether it, or a part before it, holds this batch."""
        return batch < self.upto and batch % self.step == self.offset

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return vars(self) | {name: [tally.as_dict() for tally in getattr(self, name)] for name in _TALLIES}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Part:
        """The part that `as_dict` told of."""
        return cls(**dict(told) | {name: tuple(map(Tally.from_dict, told[name])) for name in _TALLIES})


def together(parts: Iterable[Part]) -> Part:
    """All that is in the parts, under the name of the last; in whichever order, the same numbers."""
    first, *others = [part for part in parts if part.batches]
    whole = first
    for part in others:
        whole = replace(
            part,
            batches=whole.batches + part.batches,
            windows=whole.windows + part.windows,
            tokens=whole.tokens + part.tokens,
            layers=added(whole.layers, part.layers),
            uniform=added(whole.uniform, part.uniform),
        )
    return whole


class Progress:
    """A folder of parts, which all belong to one model, one tokenizer and one way of cutting."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Read the parts that are there. Raises RecordingError where they are of something else, or damaged."""
        self._folder, self._facts = folder, dict(facts)
        folder.mkdir(parents=True, exist_ok=True)
        names = {path: _NAME.fullmatch(path.name) for path in sorted(folder.iterdir())}
        found = {path: match for path, match in names.items() if match}
        self.parts = [self._read(path) for path in found]
        self._run = 1 + max((int(match[1]) for match in found.values()), default=0)

    def write(self, part: Part) -> None:
        """Put a part of this run in the folder, in the place of what it was before."""
        if not part.batches:
            return
        known = part.as_dict()
        told = {"facts": self._facts, "check": checksum(known), "part": known}
        name = f"part-{self._run:04}-{part.offset:04}.json"
        write_whole(self._folder / name, json.dumps(told, allow_nan=False, separators=(",", ":")))

    def _read(self, path: Path) -> Part:
        try:
            told = json.loads(path.read_text("ascii"))
            facts = told["facts"]
            other = {name for name in {*facts, *self._facts} if facts.get(name) != self._facts.get(name)}
            if told["check"] != checksum(told["part"]):
                raise ValueError("its numbers do not agree with its checksum")
            if not other:
                return Part.from_dict(told["part"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordingError(
                f"{path} is no progress of an atlas, or damaged: {error}. Remove it, or name another folder."
            ) from error
        said = ", ".join(f"{name} {facts.get(name)!r} there, {self._facts.get(name)!r} here" for name in sorted(other))
        raise RecordingError(
            f"{self._folder} holds the progress of another atlas ({said}). Go on with the same model and the same"
            " settings, or name another folder; nothing was changed."
        )
