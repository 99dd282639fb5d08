"""Other libraries beside ours: each in a process of the environment that `make peers` makes, told when to run.

PEERS_PYTHON names another python that has them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = os.environ.get("PEERS_PYTHON", str(HERE.parent / ".venv-peers" / "bin" / "python"))


class PeerError(RuntimeError):
    """What a library said that did not run."""


class Peer:
    """A way of `_theirs.py`, prepared; a call runs it there once. Time is ours: telling it takes 0.1 ms."""

    def __init__(self, way: str, *given: object, what: str = "run") -> None:
        source = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
        command, pipe = [PYTHON, str(HERE / "_theirs.py"), way, json.dumps(given), what], subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
            )
        except OSError as error:
            raise PeerError(f"{PYTHON}: {error.strerror}") from None
        self._answer()

    def __call__(self, *given: object) -> Any:
        print(json.dumps(given), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline() or '{"error": "it ended without a word"}')
        if "error" in said:
            self.close()
            raise PeerError(said["error"])
        return said["found"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def peers(ways: dict[str, tuple[object, ...]]) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """The ways that can be run, prepared, and why the others cannot."""
    ready: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name, (way, *given) in ways.items():
        try:
            ready[name] = Peer(str(way), *given)
        except PeerError as error:
            missing[name] = str(error)
    try:
        yield ready, missing
    finally:
        for peer in ready.values():
            peer.close()


def peak_of_peer(way: str, *given: object) -> int | None:
    """The most bytes that a run takes above what was there before, in a fresh process."""
    peer = Peer(way, *given, what="peak")
    try:
        found: int | None = peer()
        return found
    finally:
        peer.close()


def save(model: Any, tokenizer: Any, folder: str) -> None:
    """As a folder that every library can read."""
    from transformers import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
