"""Which kernel answers a question, and why; tests can force one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

# From the fastest to the slowest, wherever more than one can answer. Measured with one thread, in times of one call of
# F.scaled_dot_product_attention (9 heads, 4,096 tokens, width 64, causal, float32): for entropy 0.66, 1.0, 2.5; for A X
# (not of cpu) 1.0, 2.2; for Aᵀ Y 1.7, 2.8.
KERNELS = {
    "cpu": "compiled loops over each block of scores while it is in cache",
    "fused": "PyTorch's fused kernel, or an identity over it",
    "tiles": "PyTorch, tile by tile",
}
_forced: ContextVar[str | None] = ContextVar("clearhead_kernel", default=None)


@dataclass(frozen=True)
class Path:
    """A kernel, and why it is taken."""

    kernel: str  # one of KERNELS; or "dots", where a few scores answer
    why: str

    def __str__(self) -> str:
        return f"{self.kernel:6}{self.why}"


class Plan(dict[str, Path]):
    """The path of each question; as text, a line each."""

    def __repr__(self) -> str:
        return "\n".join(f"{question:12}{path}" for question, path in self.items())


def fastest(**against: str | None) -> Path:
    """The fastest kernel that nothing speaks against, and what speaks against those that are faster.

    Kernels that cannot answer the question at all are not named; tiles always can.
    """
    reasons: list[str] = []
    for kernel in (name for name in KERNELS if name in against):
        reason = against[kernel]
        if reason is None:
            return _because(kernel, reasons)
        reasons.append(reason)
    return _because("tiles", reasons)


def _because(kernel: str, reasons: list[str]) -> Path:
    told = "; ".join(dict.fromkeys(reasons))
    return Path(kernel, f"{KERNELS[kernel]}: {told}" if told else KERNELS[kernel])


def forced() -> str | None:
    """The kernel that is forced here, if any."""
    return _forced.get()


@contextmanager
def force(kernel: str) -> Iterator[None]:
    """Take this kernel in the block wherever it can answer: "tiles", or "cpu" or "fused" however small the map is."""
    if kernel not in KERNELS:
        raise ValueError(f"force({kernel!r}): expected {', '.join(map(repr, KERNELS))}.")
    token = _forced.set(kernel)
    try:
        yield
    finally:
        _forced.reset(token)
