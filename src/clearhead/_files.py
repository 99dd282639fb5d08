"""Writing files, and telling whether they are as they were written."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

__all__ = ["FIGURES", "checksum", "why_no_folder", "write_whole"]

FIGURES = (".svg", ".png", ".pdf")  # the endings of the files that a figure may be written to


def why_no_folder(folder: Path) -> str | None:
    """Why no new folder of this name can be filled; None where it can be, or is there and empty."""
    if folder.is_dir() and not any(folder.iterdir()):
        return None if os.access(folder, os.W_OK | os.X_OK) else f"cannot write to the folder {folder}: name another"
    if folder.exists() or folder.is_symlink():
        return f"{folder} is there already: name a new folder, or remove it first"
    above = folder.absolute().parent
    if not above.is_dir():
        return f"cannot make the folder {folder}: there is no folder {above}"
    return None if os.access(above, os.W_OK | os.X_OK) else f"cannot write to the folder {above}: name one elsewhere"


def checksum(told: object) -> str:
    """Of what JSON holds: kept beside it, it says later whether anything of it was damaged."""
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def write_whole(target: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all, whatever interrupts; OSError where it cannot be written.

    A link is followed. What is no file, a pipe or a device, is written into and not replaced.
    """
    content = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    part = target.with_name(f".clearhead-{secrets.token_hex(8)}")
    try:
        with part.open("xb") as file:  # "x": new, with the rights that the umask leaves
            file.write(content)
        os.replace(part, target)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename2 is None:
            error.filename = str(target)  # whoever named it knows nothing of a part
        raise
