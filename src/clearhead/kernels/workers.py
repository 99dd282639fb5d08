"""Threads that compute side by side, one a core, each with the matrix products of a single thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch

__all__ = ["alone", "together"]

_making = threading.Lock()


def together(tasks: Sequence[Callable[[], None]]) -> None:
    """Run the tasks side by side, in inference mode; when all have ended, raise what the first that failed raised."""
    if len(tasks) == 1:
        return _run(tasks[0])
    with _making:
        threads = _threads(len(tasks))
    running = [threads.submit(_run, task) for task in tasks]
    wait(running)
    for done in running:
        done.result()


def _run(task: Callable[[], None]) -> None:
    with torch.inference_mode():
        task()


def alone(n: int) -> ThreadPoolExecutor:
    """n threads, all of which have begun, and of which each computes with one thread of PyTorch.

    The number that PyTorch is told holds for the thread that tells it, and for every thread that begins later. So each
    tells it once, and a thread more puts back what the process had: what a thread finds that has just begun.
    """
    threads, all_there = ThreadPoolExecutor(n, thread_name_prefix="clearhead"), threading.Barrier(n)

    def begin() -> int:
        before = torch.get_num_threads()
        all_there.wait()
        torch.set_num_threads(1)
        return before

    before = [done.result() for done in [threads.submit(begin) for _ in range(n)]]
    back = threading.Thread(target=torch.set_num_threads, args=(before[0],))
    back.start()
    back.join()
    return threads


_threads = cache(alone)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a child process has none of its parent's threads
