"""Small q, k and v for attention that is written by hand, and any function of them as a recorded model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clearhead.recording import Recording, record

__all__ = ["LATER", "PADDED", "B", "D", "H", "K", "Q", "Run", "T", "V", "dense", "randn", "recorded"]

B, H, T, D = 2, 3, 7, 4
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDED = torch.arange(T).expand(B, T) >= torch.tensor([[T], [4]])  # (B, T), the last keys of the second entry


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


Q, K, V = (randn(B, H, T, D, seed=n) for n in range(3))


class Run(nn.Module):
    """Some function of tensors, as a model."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*(arg.clone() for arg in args))


def recorded(function: Callable[..., Tensor], *args: Tensor) -> Recording:
    """The recording of a call whose output is that of the unobserved function, bit for bit."""
    model = Run(function)
    plain, state = model(*args), torch.get_rng_state()
    with record(model) as recording:
        out = model(*args)
    assert torch.equal(out, plain)
    assert torch.equal(torch.get_rng_state(), state) or "drop" in function.__name__
    return recording


def dense(scores: Tensor) -> Tensor:
    return scores.softmax(-1).nan_to_num(0.0)
