"""Small maps in float64 that want gradients, and the same by the textbook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import masks, reference
from clearhead.kernels import gradients

__all__ = ["KINDS", "B", "D", "G", "H", "S", "T", "check", "entropy", "few", "qk", "random"]

B, H, G, T, S, D = 2, 4, 2, 9, 13, 3


@contextmanager
def few(weights: int) -> Iterator[None]:
    """Maps of up to so many weights keep their tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "FEW", weights)
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def qk() -> list[Tensor]:
    return [random(B, H, T, D).requires_grad_(), random(B, G, S, D).requires_grad_()]


def entropy(a: Tensor) -> Tensor:
    seen = a > 0
    return -(a * torch.where(seen, a, 1).log()).sum(-1)


REAL = torch.arange(S) >= torch.tensor([6, 0])[:, None]  # left padding: the first text's first queries see nothing
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments of SoftmaxMap, and of the textbook
    "all seen": ({}, {}),
    "padded, causal": (
        {"mask": masks.causal() & masks.padding(keys=REAL)},
        {"mask": reference.causal(T, S) & REAL[:, None, None]},
    ),
    "sinks and window": (
        {"mask": masks.first_tokens(2) & masks.causal() | masks.sliding_window(3), "scale": 0.7},
        {"mask": reference.causal(T, S) & (torch.arange(S) < 2) | reference.sliding_window(T, S, 3), "scale": 0.7},
    ),
    "soft-capped": ({"softcap": 1.2}, {"softcap": 1.2}),
}


def check(ours: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    """The same numbers and the same gradients."""
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-13)
    weight = random(*want.shape, seed=5)
    got, exact = (
        torch.autograd.grad(out, inputs, weight, allow_unused=True, retain_graph=True) for out in (ours, want)
    )
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-11, atol=1e-13)
