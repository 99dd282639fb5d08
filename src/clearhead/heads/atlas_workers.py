"""Processes that share the batches of an atlas: those of torchrun, or some that are begun here."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from clearhead._progress import Progress
from clearhead.errors import RecordingError

if TYPE_CHECKING:
    from clearhead.heads.atlas_progress import Part

__all__ = ["ended_in_order", "gathered", "is_first", "is_shared", "shared", "spread", "wait"]

_spawned = False  # whether this process is one that `spread` has begun


def is_shared() -> bool:
    """Whether this process is one of several: of torchrun, or of a group that somebody has made."""
    if not dist.is_available():
        return False
    return bool(dist.is_initialized() or dist.is_torchelastic_launched())


def is_first() -> bool:
    """Whether this process speaks for all of torchrun's, or is the only one."""
    return int(os.environ.get("RANK", "0")) == 0 or not is_shared()


@contextmanager
def shared() -> Iterator[tuple[int, int]]:
    """Which of the processes this is, and how many there are; a group of torchrun's processes is made for the time."""
    ours = is_shared() and not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo")
    try:
        yield (dist.get_rank(), dist.get_world_size()) if is_shared() else (0, 1)
    finally:
        if ours:
            dist.destroy_process_group()


def wait() -> None:
    """Until all processes are here."""
    if is_shared():
        dist.barrier()


def gathered(part: Part) -> list[Part]:
    """The parts of all processes, in each of them."""
    if not is_shared():
        return [part]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return parts


@contextmanager
def ended_in_order() -> Iterator[None]:
    """In the block SIGTERM, which a worker gets when another has ended, ends it as an exception does: work is kept."""
    if _spawned:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        if _spawned:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def spread(
    workers: int, function: Callable[..., Any], given: tuple[Any, ...], settings: Mapping[str, Any], report: Progress
) -> Any:
    """function(*given, **settings) in several processes that make a group; what the first of them returns.

    What is given goes through a file, which the processes map into memory: they share the weights' pages.
    """
    with tempfile.TemporaryDirectory(prefix="clearhead-") as name:
        folder = Path(name)
        try:
            torch.save((function, given, dict(settings)), folder / "given")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RecordingError(
                f"workers={workers}: what is given cannot be sent to other processes: {error}. Use one."
            ) from error
        processes: Any = torch.multiprocessing
        said = processes.get_context("spawn").SimpleQueue()
        threads = max(1, torch.get_num_threads() // workers)
        running = processes.start_processes(
            _worker, (workers, threads, folder, said), nprocs=workers, join=False, start_method="spawn"
        )
        try:
            while not running.join(timeout=0.2):
                while not said.empty():
                    report(*said.get())
        except processes.ProcessRaisedException as error:
            raise _raised(folder) or error from None
        except processes.ProcessExitedException as error:
            raise RecordingError(
                f"a worker has ended before its work: {error}. Its progress is kept where a folder was named."
            ) from None
        except BaseException:
            for process in running.processes:
                process.join(5)  # Ctrl-C reaches the workers too: they write what they have done
                process.terminate()
            raise
        return pickle.loads((folder / "found").read_bytes())


def _worker(rank: int, workers: int, threads: int, folder: Path, said: Any) -> None:
    """One of the processes."""
    global _spawned
    _spawned = True
    torch.set_num_threads(threads)
    try:
        function, given, settings = torch.load(folder / "given", mmap=True, weights_only=False)  # of our own making
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=workers)
        report = (lambda *told: said.put(told)) if rank == 0 else None
        found = function(*given, **settings, on_progress=report)
        if rank == 0:
            (folder / "found").write_bytes(pickle.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        with suppress(Exception):
            (folder / f"error-{rank}").write_bytes(pickle.dumps(error))
        raise


def _raised(folder: Path) -> BaseException | None:
    """What a worker has raised; the others were ended for it."""
    for path in sorted(folder.glob("error-*")):
        with suppress(Exception):
            error: BaseException = pickle.loads(path.read_bytes())
            return error
    return None
