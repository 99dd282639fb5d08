"""The cache folder: entries appear whole or not at all, and are checked before they are used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from clearhead._format import size
from clearhead.errors import ModelError

_LAYOUT = 1  # raise it when what an entry holds changes
_MANIFEST = "clearhead.json"
_WORK = ".converting-"
_DAY = 86_400.0


def root() -> Path:
    """The folder for converted models: ``$CLEARHEAD_CACHE`` if set, else the user's cache folder."""
    chosen = os.environ.get("CLEARHEAD_CACHE")
    if chosen:
        return Path(os.path.expanduser(chosen)) / "models"  # not Path's own, which raises for an unknown ~user
    from platformdirs import user_cache_path

    return user_cache_path("clearhead") / "models"


def entry_for(*files: Path) -> Path:
    """Where what is made of these files belongs: named by their content and the library that reads them.

    Time: one read of the files (0.07 s for 98 MB).
    """
    key = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            while block := handle.read(2**22):
                key.update(block)
    key.update(f"{_LAYOUT} {version('transformers')}".encode())
    return root() / f"{files[0].stem}-{key.hexdigest()[:16]}"


def has_entry(*files: Path) -> bool:
    """Whether that was made before. Time: one read of the files, for their key; of the entry nothing is read."""
    try:
        return (entry_for(*files) / _MANIFEST).is_file()
    except (PackageNotFoundError, ImportError, OSError):  # without those, or unreadable: nothing was made
        return False


def intact(entry: Path) -> bool:
    """Whether every file of the entry is there with the size and the CRC-32 that were written.

    Time: one read of the entry, which loading needs anyhow (0.14 s for 540 MB in the page cache).
    """
    try:
        expected = json.loads((entry / _MANIFEST).read_text("utf-8"))
        return bool(expected == _checksums(entry))
    except (OSError, ValueError):  # not there, or not readable as what was written: not intact
        return False


@contextmanager
def workspace() -> Iterator[Path]:
    """A new folder beside the entries, gone at the end whatever happens; or `ModelError`."""
    parent = root()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=parent))
    except OSError as error:
        raise ModelError(
            f"the converted model cannot be kept in {parent}: {error.strerror}. "
            "Set CLEARHEAD_CACHE to a folder that can be written to."
        ) from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def require_space(nbytes: int) -> None:
    """`ModelError` unless the cache's disk has room for this many bytes and a little more."""
    folder = root()
    free = shutil.disk_usage(folder).free
    if free < nbytes + 32 * 2**20:
        raise ModelError(
            f"the converted model takes {size(nbytes)}, and {folder} has {size(free)} free. "
            "Make room, or set CLEARHEAD_CACHE to a folder on another disk."
        )


def publish(work: Path, entry: Path) -> None:
    """Make the finished work the entry, in one step; another process's intact entry is left as it is."""
    (work / _MANIFEST).write_text(json.dumps(_checksums(work)), "utf-8")
    try:
        os.replace(work, entry)
    except OSError:  # a folder that is not empty stands there already
        if intact(entry):
            return
        with workspace() as aside:
            os.replace(entry, aside / "damaged")
        os.replace(work, entry)


def _checksums(folder: Path) -> dict[str, list[int]]:
    files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
    return {path.name: [path.stat().st_size, _crc(path)] for path in files}


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as handle:
        while block := handle.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _sweep(parent: Path) -> None:
    """Remove what a killed process left, once it is a day old (a younger one may still be at work)."""
    for work in parent.glob(f"{_WORK}*"):
        if time.time() - work.stat().st_mtime > _DAY:
            shutil.rmtree(work, ignore_errors=True)
