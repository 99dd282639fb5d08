"""Runs checks of a learner's code, which may do anything: a process for each, a time limit, and a bounded output."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from clearhead._format import size

__all__ = ["Outcome", "run"]

LIMIT = 20.0  # seconds for the learner's code; the exercises take less than one
_START = 180.0  # seconds until torch is imported, on a slow disk
_KEPT = 2_000  # bytes of output
_ENVIRONMENT = {
    "PYTHONIOENCODING": "utf-8:replace",
    "MPLBACKEND": "Agg",  # a window would wait to be closed
    "CUDA_VISIBLE_DEVICES": "",  # the inputs are on the CPU, and CUDA takes more than the memory that is allowed
}


@dataclass(frozen=True)
class Outcome:
    """What came of one exercise.

    Args:
        name: of the exercise.
        verdict: "passed", "wrong" (the check refused the answer), "unwritten", or "failed" (the code did not finish).
        message: what is wrong; empty if passed.
        printed: what the code printed, at most 2,000 bytes of it.
        loaded: whether the file could be read at all: if not, no other exercise of it can.
    """

    name: str
    verdict: str
    message: str
    printed: str
    loaded: bool

    @property
    def passed(self) -> bool:
        """Whether the answer is right."""
        return self.verdict == "passed"


def run(module: str, names: Sequence[str], file: Path, seed: int, *, limit: float = LIMIT) -> Iterator[Outcome]:
    """Check the exercises of this module and these names on the learner's file, in order.

    All processes start at once, since importing torch is what takes long, and then go one after the other. After an
    outcome that is not `loaded` there are no more.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        children = [_Child(module, name, file, seed, folder) for name in names]
        for child in children:
            stack.callback(child.end)
        for child in children:
            outcome = child.outcome(limit)
            yield outcome
            if not outcome.loaded:
                return


class _Child:
    """One process in a session of its own, so that what it starts can be ended with it and nothing else."""

    def __init__(self, module: str, name: str, file: Path, seed: int, folder: Path) -> None:
        self._name, self._state = name, folder / secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "clearhead.learn.child", module, name, str(file), str(self._state), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,  # where nothing is that could be imported in place of something else
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = _Output(self._process.stdout)

    def outcome(self, limit: float) -> Outcome:
        """Let it go, wait for it, end it."""
        self._wait(_START, until_ready=True)
        self._go()
        in_time = self._wait(limit)
        self.end()
        found, printed = self._read(), self._output.text()
        stage = found.get("stage")
        if stage == "done":
            return Outcome(self._name, found["verdict"], found["message"], printed, found["loaded"])
        if stage in ("loading", "running"):
            message = _ended(self._process.returncode) if in_time else _slow(limit, stage)
        else:
            message = f"The check could not start; Python ended with exit code {self._process.returncode}."
        return Outcome(self._name, "failed", message, printed, loaded=stage == "running")

    def _wait(self, seconds: float, *, until_ready: bool = False) -> bool:
        """Whether within that time it ended (or became ready)."""
        deadline = time.monotonic() + seconds
        while not (self._ended() or (until_ready and self._state.exists())):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _go(self) -> None:
        if self._state.exists():
            self._output.clear()  # what torch had to say
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()

    def _ended(self) -> bool:
        """Left unreaped where that can be, so that its number stays its own until its group is ended."""
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self._process.poll() is not None

    def end(self) -> None:
        """End it and what it started, if it was not ended before."""
        if self._process.returncode is None:
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group of ended processes
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._output.join(1)  # a process that left the group may hold the other end open

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._state.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found


class _Output(threading.Thread):
    """Reads all that is written, so that nobody has to wait, and keeps the beginning."""

    def __init__(self, pipe: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._pipe, self._kept, self._more = pipe, b"", 0
        self.start()

    def run(self) -> None:
        with self._pipe:
            while block := os.read(self._pipe.fileno(), 2**16):
                room = _KEPT - len(self._kept)
                self._kept += block[:room]
                self._more += len(block[room:])

    def clear(self) -> None:
        """Forget what came so far."""
        self._kept, self._more = b"", 0

    def text(self) -> str:
        """The beginning, and how much more there was."""
        more = f"\n… and {size(self._more)} more" if self._more else ""
        return self._kept.decode("utf-8", "replace").rstrip() + more


def _slow(limit: float, stage: str) -> str:
    if stage == "loading":
        return (
            f"Reading your file took more than {limit:g} s: what stands outside of functions and classes runs at once, "
            "and has to come to an end."
        )
    return (
        f"Your code was still running after {limit:g} s. Does a loop never end, or run over what one product could do?"
    )


def _ended(code: int) -> str:
    if code >= 0:
        return f"Your code ended Python (os._exit, exit code {code}) before there was a result."
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = " Most likely it took all the memory there is." if name == "SIGKILL" else ""
    return f"Your code made Python crash ({name}) before there was a result.{why}"
