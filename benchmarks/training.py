"""Training a GPT of about 1 M parameters: clearhead's attention against a mask and a softmax written out.

The model that `clearhead train` makes (5 layers, 4 heads, 128 wide), 2,048 tokens a step, float32: one forward and
backward pass, with the same weights. Memory is the most bytes of tensors that were alive at once beyond the model and
its gradients.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch
from _report import COLUMNS, Report, row
from torch import Tensor, nn

from clearhead._measuring import alternate
from clearhead.models import GPT
from clearhead.models.commands import SIZES
from clearhead.nn import Attention
from clearhead.testing.memory import Allocations

TOKENS = 2048  # a step
CONTEXTS = (256, 1024)


class Explicit(nn.Module):
    """The same attention with its scores, a mask kept as a buffer, and a softmax."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.inner = attention
        n = attention.context_length
        self.register_buffer("mask", torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1))

    def forward(self, x: Tensor, *, padding: None, cache: None) -> Tensor:
        inner = self.inner
        split = (linear(x).unflatten(-1, (inner.num_heads, -1)).transpose(1, 2) for linear in self.projections)
        q, k, v = split
        positions = torch.arange(x.shape[1])
        q, k = (inner.rotary.rotate(one, positions) for one in (q, k))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(self.mask[: x.shape[1], : x.shape[1]], -torch.inf)
        return inner.out_proj((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return self.inner.W_query, self.inner.W_key, self.inner.W_value


def models(context: int) -> dict[str, GPT]:
    torch.manual_seed(0)
    ours = GPT(replace(SIZES["small"].config(256), context_length=context))
    theirs = copy.deepcopy(ours)
    for block in theirs.blocks:
        block.attention = Explicit(block.attention)
    return {"clearhead": ours, "explicit mask and softmax": theirs}


def step(model: GPT, ids: Tensor) -> Tensor:
    loss = model.loss(ids)
    loss.backward()
    return loss.detach()


def main() -> None:
    with Report(__file__, "Training a small GPT") as report:
        for context in CONTEXTS:
            ids = torch.randint(256, (TOKENS // context, context + 1))
            ways, peaks, losses = models(context), {}, []
            for name, model in ways.items():
                losses.append(step(model, ids))  # gradients are allocated once, before anything is counted
                with Allocations() as allocations:
                    step(model, ids)
                peaks[name] = allocations.peak
            times = alternate({name: partial(step, model, ids) for name, model in ways.items()}, seconds=30)
            fastest = {name: TOKENS / timing.best for name, timing in times.items()}
            speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in fastest.items())
            report.say(
                f"Context {context:,}. Tokens a second at best: {speeds}. Losses {losses[0]:.6f}, {losses[1]:.6f}."
            )
            report.table(COLUMNS, [row(name, timing, peaks[name]) for name, timing in times.items()])


if __name__ == "__main__":
    main()
