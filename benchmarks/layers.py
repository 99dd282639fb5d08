"""One attention layer, forward and backward: clearhead's against other ways to write it.

768 wide, 12 heads, 1,024 tokens, batch 2, float32, causal. `bare` is PyTorch's fused function between four linears,
which is as little as there can be. Then the forward pass alone, in which FlexAttention takes part, compiled: on the CPU
it has no other, and it needs a C++ compiler. Memory is the most bytes of tensors that were alive at once beyond the
layer and its input; of what FlexAttention's compiled code takes nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from _report import COLUMNS, Report, row
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from clearhead._measuring import alternate
from clearhead.nn import Attention
from clearhead.testing.memory import Allocations

WIDTH, HEADS, TOKENS, BATCH = 768, 12, 1024, 2
FLEX = "FlexAttention, compiled"


class Bare(nn.Module):
    """Four linears and the fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(linear(x)) for linear in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Flex(Bare):
    """The same with FlexAttention, compiled, which computes no block above the diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = torch.compile(flex_attention)
        self.block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(linear(x)) for linear in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v, block_mask=self.block_mask).transpose(1, 2).flatten(2))


class Explicit(Bare):
    """The textbook's design: scores, a mask kept as a buffer, softmax, and the product with the values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.triu(torch.ones(TOKENS, TOKENS), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(linear(x)) for linear in (self.q, self.k, self.v))
        scores = q @ k.mT
        scores.masked_fill_(self.mask.bool(), -torch.inf)
        weights = torch.softmax(scores / q.shape[-1] ** 0.5, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def contestants() -> dict[str, Callable[[Tensor], Tensor]]:
    """Each a function of x that gives the output; weights are random and their own."""
    ours, module = (
        Attention(WIDTH, WIDTH, TOKENS, num_heads=HEADS),
        nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    )
    hidden = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), diagonal=1)
    return {
        "bare": Bare(),
        "clearhead forward": ours,
        "clearhead attend": lambda x: ours.attend(x)[0],
        "nn.MultiheadAttention, weights": lambda x: module(x, x, x, attn_mask=hidden, average_attn_weights=False)[0],
        "explicit mask and softmax": Explicit(),
    }


def step(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    layer(x).sum().backward()


def measured(
    ways: dict[str, Callable[[], object]], seconds: float, *, uncounted: Collection[str] = ()
) -> list[list[str]]:
    """Rows of the table, memory first: whatever is allocated once is there before anything is counted."""
    peaks: dict[str, int | None] = dict.fromkeys(ways)
    for name in ways.keys() - set(uncounted):
        ways[name]()
        with Allocations() as allocations:
            ways[name]()
        peaks[name] = allocations.peak
    return [row(name, timing, peaks[name]) for name, timing in alternate(ways, seconds=seconds).items()]


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    layers = contestants()
    with Report(__file__, "The layer to ship against its alternatives") as report:
        report.say("Forward and backward:")
        report.table(COLUMNS, measured({name: partial(step, layer, x) for name, layer in layers.items()}, 25))
        why, flex = compiled(x)
        with torch.no_grad():
            forward = {name: partial(layer, x) for name, layer in (layers | flex).items()}
            report.say("Forward alone:")
            report.table(COLUMNS, measured(forward, 15, uncounted=flex))
        if why:
            report.say(f"{FLEX}: not run ({why}).")


@torch.no_grad()
def compiled(x: Tensor) -> tuple[str, dict[str, Callable[[Tensor], Tensor]]]:
    """FlexAttention's layer, compiled, or why it cannot be."""
    layer = Flex()
    try:
        layer(x)
    except Exception as error:  # whatever the compiler says
        return f"{type(error).__name__}: {str(error).splitlines()[0]}", {}
    return "", {FLEX: layer}


if __name__ == "__main__":
    main()
