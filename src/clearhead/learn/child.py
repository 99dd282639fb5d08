"""The process in which a learner's code runs: `running` starts it, one for each exercise, and watches it.

What came out is written into a file of which only the two processes know: whatever the code prints is only printed.
"""

from __future__ import annotations

import difflib
import faulthandler
import importlib
import json
import os
import random
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.learn.exercise import Exercise

_MEMORY = 2 * 2**30  # bytes that the learner's code may take beyond what Python and torch have taken
_LONGEST = 600  # characters of an error's message


def main(module: str, name: str, file: Path, state: Path, seed: int) -> None:
    """Import what is slow, wait for the word to start, check, write the verdict into `state`, and end at once."""
    exercise = next(e for e in importlib.import_module(module).EXERCISES if e.name == name)
    _write(state, stage="ready")
    _wait()
    _limit_memory()
    faulthandler.enable(all_threads=False)  # a crash says in which line of the learner's it happened
    sys.argv, sys.path[:0] = [str(file)], [str(file.parent)]
    os.chdir(file.parent)
    _write(state, stage="done", **_judge(exercise, file, state, seed))
    sys.stdout.flush()
    _end()


def _write(state: Path, **found: Any) -> None:
    part = state.with_suffix(".part")
    part.write_text(json.dumps(found), "utf-8")
    os.replace(part, state)


def _wait() -> None:
    """Until the parent says go. From then on stdin is empty, and if the parent ends, so does this process."""
    lifeline = os.dup(0)
    os.read(lifeline, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the other end is closed
    _end()


def _end() -> None:
    """At once, and with all that the code started: its threads and processes may never end by themselves."""
    if hasattr(os, "killpg") and os.getsid(0) == os.getpid():  # the session that was made for this process
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _limit_memory() -> None:
    """Where the system can tell and hold it, which is Linux."""
    try:
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return
    for limit, most in ((resource.RLIMIT_AS, taken + _MEMORY), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _judge(exercise: Exercise, file: Path, state: Path, seed: int) -> dict[str, Any]:
    """The verdict on the learner's answer; whatever the code raises is caught here."""
    import torch

    from clearhead.learn.exercise import Wrong

    random.seed(seed)
    torch.manual_seed(seed)
    loaded, verdict, message = False, "passed", ""
    try:
        _write(state, stage="loading")
        module = _load(file)
        loaded = True
        _write(state, stage="running")
        exercise.check(_answer(exercise, module, file), torch.Generator().manual_seed(seed))
    except Wrong as wrong:
        verdict, message = "wrong", str(wrong)
    except BaseException as error:  # sys.exit and the like: all that learners write ends here
        verdict, message = _verdict_on(error, exercise, file, "answer" if loaded else "file")
    return {"verdict": verdict, "message": message, "loaded": loaded}


def _load(file: Path) -> ModuleType:
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    sys.modules[file.stem] = module  # where dataclasses and pickle look
    exec(compile(file.read_bytes(), str(file), "exec", dont_inherit=True), module.__dict__)
    return module


def _answer(exercise: Exercise, module: ModuleType, file: Path) -> Any:
    from clearhead.learn.exercise import Wrong

    kind = "class" if isinstance(exercise.solution, type) else "function"
    answer = getattr(module, exercise.name, None)
    if answer is None:
        near = difflib.get_close_matches(exercise.name, vars(module), n=1)
        rest = f" There is {near[0]}: it has to be called {exercise.name}." if near else " Was it renamed or deleted?"
        raise Wrong(f"There is no {kind} {exercise.name} in {file.name}.{rest}")
    if isinstance(answer, type) != (kind == "class") or not callable(answer):
        arrived = "a class" if isinstance(answer, type) else f"of type {type(answer).__name__}"
        raise Wrong(f"{exercise.name} should be a {kind}, and is {arrived}.")
    return answer


def _verdict_on(error: BaseException, exercise: Exercise, file: Path, what: str) -> tuple[str, str]:
    """In words, with the last line of the learner's own that was reached."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == file.parent]
    if isinstance(error, SyntaxError) and not frames:
        where = f"\n{_line(file, error.lineno, error.text)}" if error.lineno else ""
        return "failed", f"Python cannot read your file: {error.msg}{where}"
    if not frames:
        return "failed", f"The check could not use your {what}. {_text(error)}"
    first, last = frames[0], frames[-1]
    if isinstance(error, NotImplementedError) and "NotImplementedError" in (last.line or ""):
        other = f"{last.name}, which {exercise.name} calls: " if last.name != first.name else ""
        return "unwritten", f"Not written yet: {other}{file.name}, line {last.lineno}."
    shown = f"{_reason(error)}\n{_line(Path(last.filename), last.lineno or 0, last.line)}"
    return "failed", f"{shown}\n{exercise.remark(shown)}".rstrip()


def _reason(error: BaseException) -> str:
    text = _text(error)
    if isinstance(error, SystemExit):
        return "Your code called sys.exit() or exit(), which ends Python before there is a result."
    if isinstance(error, EOFError):
        return f"Your code asked for input, and nobody is there to answer. {text}"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return f"Your code asked for more memory than the {_MEMORY // 2**30} GB it may have. {text}"
    if isinstance(error, RecursionError):
        return f"Your code calls itself without end. {text}"
    return f"Your code raised {text}"


def _line(file: Path, number: int, text: str | None) -> str:
    return f"{file.name}, line {number}: {(text or '').strip()[:120]}"


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # an exception class of the learner's own
        text = ""
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
