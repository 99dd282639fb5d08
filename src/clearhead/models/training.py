"""The training loop: AdamW, a warm-up, clipped gradients, and checkpoints from which a run goes on exactly.

Step n is a function of the weights, the optimizer's state and n alone: its batch is `batches(n)`, and whatever is drawn
in it (dropout, the batch itself) comes of a generator seeded from (seed, n). So a run that was killed repeats the steps
since its last checkpoint and goes on as if nothing had happened; and a longer run begins with the steps of a shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from clearhead._checks import check_count, finite_number
from clearhead.errors import ModelError
from clearhead.models.checkpoints import Checkpoints

__all__ = ["fit", "rate_at"]

Batch = TypeVar("Batch")


def fit(
    model: nn.Module,
    loss: Callable[[Batch], Tensor],
    batches: Callable[[int], Batch],
    *,
    steps: int,
    rate: float = 1e-3,
    warmup: int = 100,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train the model, in place, and return the loss of every step, those before a resumption included.

    Args:
        loss: the loss of a batch, a scalar, for example `model.loss`.
        batches: the batch of step n, from 0; it may draw from PyTorch's generator, which is seeded for the step.
        steps: how many in all; a run that resumes does what is missing.
        rate: the largest learning rate, reached after `warmup` steps: see `rate_at`.
        weight_decay: of matrices; biases, gains and other vectors have none. clip: longest gradient.
        seed: of all that is drawn. The generators of the caller are as before afterwards.
        checkpoints: where the run is kept, and resumes from; it then may be killed at any moment.
        on_step: called with the number of steps done and the loss of the last.

    Raises: ModelError where the loss is not finite, or a checkpoint does not fit or cannot be written. What was kept
    before that stays. Cost: memory for gradients and two numbers more a parameter.
    Source: Loshchilov and Hutter 2019 (AdamW).

    >>> model = nn.Linear(1, 1)
    >>> loss = lambda x: (model(x) - 3 * x).square().mean()
    >>> losses = fit(model, loss, lambda n: torch.randn(8, 1), steps=60, rate=1.0)
    >>> losses[-1] < 0.1 * losses[0]
    True
    """
    check_count("fit", "steps", steps, at_least=0)
    check_count("fit", "seed", seed, at_least=0)
    for name, value in {"rate": rate, "weight_decay": weight_decay, "clip": clip}.items():
        finite_number("fit", name, value)
    optimizer = _adamw(model, weight_decay)
    losses = [] if checkpoints is None else checkpoints.resume(model, optimizer)
    with _training(model):
        for n in range(len(losses), steps):
            _seed((seed * 1_000_003 + n) % 2**32)  # of larger seeds, the CPU's generator drops bits
            found = loss(batches(n))
            losses.append(_finite(found.item(), n))
            found.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            for group in optimizer.param_groups:
                group["lr"] = rate_at(n, rate, warmup)
            optimizer.step()
            optimizer.zero_grad()
            if checkpoints is not None and checkpoints.is_due(n + 1, steps):
                checkpoints.save(model, optimizer, losses)
            if on_step is not None:
                on_step(n + 1, losses[-1])
    return losses


def rate_at(n: int, rate: float, warmup: int) -> float:
    """The learning rate of step n: it grows for `warmup` steps, then falls as 1/√n, however many steps there will be.

        rate · min((n + 1) / warmup, √(warmup / (n + 1)))

    Source: Vaswani et al. 2017, equation 3.

    >>> [rate_at(n, 1.0, 4) for n in (0, 3, 15)]
    [0.25, 1.0, 0.5]
    """
    done = (n + 1) / max(1, warmup)
    return rate * min(done, 1 / math.sqrt(done))


def _adamw(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Training mode, and generators that are as before afterwards."""
    mode, devices = model.training, {p.device.index for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices):
        model.train()
        try:
            yield
        finally:
            model.train(mode)


def _seed(seed: int) -> None:
    """As torch.manual_seed, which without a GPU in use keeps a traceback of each call."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _finite(loss: float, n: int) -> float:
    if not math.isfinite(loss):
        raise ModelError(
            f"the loss of step {n + 1} is {loss}: the weights have run away. Causes: (a) the learning rate is too high:"
            " lower it, or give the warm-up more steps; (b) the batch holds numbers that are not finite."
        )
    return loss
