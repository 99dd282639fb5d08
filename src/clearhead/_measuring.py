"""Several ways to the same end, measured beside one another: time in turns, memory in a process of its own."""

from __future__ import annotations

import gc
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

from clearhead._format import size

FEWEST = 3  # rounds, however long they take
LIBRARIES = ("torch", "numpy", "numba", "transformers")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Timing:
    """Seconds of one way in each round, and of the first way in the same rounds."""

    seconds: tuple[float, ...]
    beside: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """Seconds of the shortest round."""
        return min(self.seconds)

    @property
    def ratio(self) -> float:
        """Time as a multiple of the first way's in the same round, the median over rounds."""
        return statistics.median(own / first for own, first in zip(self.seconds, self.beside, strict=True))

    @property
    def least(self) -> float:
        """The shortest time as a multiple of the first way's shortest."""
        return self.best / min(self.beside)


def alternate(
    ways: Mapping[str, Callable[[], object]], *, rounds: int = 15, seconds: float = 60.0, warm: bool = True
) -> dict[str, Timing]:
    """Time the ways in turns, there and back, so that whatever else the machine does meets all alike.

    Args:
        ways: what to call, by name; the others are compared with the first.
        rounds: so often each is timed, or as often as `seconds` allow, but at least three times.
        warm: whether each is called once before.
    """
    for way in ways.values() if warm else ():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    order, start = list(ways), time.perf_counter()
    for n in range(rounds):
        for name in order:
            times[name].append(_timed(ways[name]))
        order.reverse()
        if n + 1 >= FEWEST and time.perf_counter() - start > seconds:
            break
    first = tuple(times[next(iter(ways))])
    return {name: Timing(tuple(found), first) for name, found in times.items()}


def _timed(run: Callable[[], object]) -> float:
    gc.collect()  # what the turn before left is not this one's to clear away
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_of_child(prepare: Callable[..., Callable[[], object]], *given: object) -> int | None:
    """The most bytes that a call takes above what was there before, in a fresh process; None where nobody counts them.

    The process calls `prepare(*given)`, a function that it can import, and measures what that returns: inputs are
    there then, and libraries loaded.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_peak, prepare, given).result()


def _peak(prepare: Callable[..., Callable[[], object]], given: Iterable[object]) -> int | None:
    run = prepare(*given)
    gc.collect()
    before = _resident_and_peak(forget=True)
    kept = run()
    after = _resident_and_peak()
    del kept  # only now: it belongs to what the call takes
    return None if before is None or after is None else max(0, after[1] - before[0])


def _resident_and_peak(*, forget: bool = False) -> tuple[int, int] | None:
    """Bytes of this process, now and at most since it began, or since the peak was forgotten."""
    if _STATUS.exists():
        if forget:
            Path("/proc/self/clear_refs").write_text("5")
        found = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE))
        return 1024 * int(found["VmRSS"]), 1024 * int(found["VmHWM"])
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return most, most


def machine() -> str:
    """Processor, cores in use, memory and versions, in one line."""
    import torch

    parts = [_processor(), f"{torch.get_num_threads()} threads"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        parts.append(size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    parts.append(f"Python {platform.python_version()}")
    return ", ".join(parts + [f"{name} {version}" for name in LIBRARIES if (version := version_of(name))])


def version_of(library: str) -> str | None:
    """Which version is installed; None if it is not."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.processor() or platform.machine()
