"""Threads that compute side by side, one a core, each with the matrix products of a single thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch

_one_by_one = threading.Lock()


def together(tasks: Sequence[Callable[[], None]]) -> None:
    """Run the tasks side by side, in inference mode; when all have ended, raise what the first that failed raised."""
    if len(tasks) == 1:
        return _run(tasks[0])
    running = [_threads().submit(_run, task) for task in tasks]
    wait(running)
    for done in running:
        done.result()


def _run(task: Callable[[], None]) -> None:
    with torch.inference_mode():
        task()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="clearhead", initializer=_compute_alone)


def _compute_alone() -> None:
    """Let PyTorch use one thread inside this one, and as many as before everywhere else.

    The number that is set holds for the thread that sets it, and for every thread that begins later. So it is set once
    a thread, and a third thread puts back what the process had: what a thread that has just begun finds.
    """
    with _one_by_one:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        back = threading.Thread(target=torch.set_num_threads, args=(before,))
        back.start()
        back.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a child process has none of its parent's threads
