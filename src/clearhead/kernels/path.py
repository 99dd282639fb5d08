"""Which kernel answers a question, and why; tests can force one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_forced: ContextVar[str | None] = ContextVar("clearhead_kernel", default=None)


@dataclass(frozen=True)
class Path:
    """A kernel, and why it is taken."""

    kernel: str  # "cpu" or "tiles", modules of clearhead.kernels; "dots", where a few scores answer
    why: str

    def __str__(self) -> str:
        return f"{self.kernel:6}{self.why}"


class Plan(dict[str, Path]):
    """The path of each question; as text, a line each."""

    def __repr__(self) -> str:
        return "\n".join(f"{question:12}{path}" for question, path in self.items())


def forced() -> str | None:
    """The kernel that is forced here, if any."""
    return _forced.get()


@contextmanager
def force(kernel: str) -> Iterator[None]:
    """Take this kernel in the block wherever it can answer: "tiles", or "cpu" however small the map is."""
    if kernel not in ("tiles", "cpu"):
        raise ValueError(f"force({kernel!r}): expected 'tiles' or 'cpu'.")
    token = _forced.set(kernel)
    try:
        yield
    finally:
        _forced.reset(token)
