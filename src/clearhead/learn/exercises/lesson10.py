"""Lesson 10: a GPT from these parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.learn.exercise import Exercise
from clearhead.learn.exercises import judging
from clearhead.nn import MultiHeadAttention

__all__ = ["EXERCISES", "block", "next_losses", "next_shares"]


def block(x: Tensor, norm1: nn.Module, attention: nn.Module, norm2: nn.Module, mlp: nn.Module) -> Tensor:
    """One block of a GPT: attention of the normed stream is added to it, then the MLP of what that gave, normed.

    x: (B, T, d). The others are layers to call, each (B, T, d) → (B, T, d). Return (B, T, d).
    """
    x = x + attention(norm1(x))
    out: Tensor = x + mlp(norm2(x))
    return out


def next_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """How badly each token but the first is foretold of those before it: -log p, where p is its share by softmax.

    logits: (T, V); row t scores what comes after token t. ids: (T,), whole numbers below V. Return (T - 1,).
    """
    return F.cross_entropy(logits[:-1], ids[1:], reduction="none")


def next_shares(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    """The share of each token when the next one is drawn: softmax of logits / temperature, among the top_k likeliest.

    logits: (V,), of which no two are equal. Return (V,): 0 for all but top_k tokens, and 1 together.
    """
    least = logits.topk(top_k).values[-1]
    return torch.softmax((logits / temperature).masked_fill(logits < least, -math.inf), dim=-1)


# --- checks --------------------------------------------------------------------------------------------------------

NO_STREAM = "The stream itself is missing: what a layer brings is added to x, x + …, and does not take its place."
NO_STREAM_LAST = "The MLP's result takes the place of the stream. It is added: x + mlp(norm2(x))."
NO_NORM = "A layer reads x without its norm: attention(norm1(x)) and mlp(norm2(x))."
NORM_AFTER = "The norm came after. It stands before the layer, and what is added is not normed: attention(norm1(x))."
SIDE_BY_SIDE = "The MLP reads x as it came in. It reads what attention has made of it: the new x."
NORMED_STREAM = "The normed x became the stream. Only the layer reads it: what is added to is x itself."
NORMS_EXCHANGED = "The norms are exchanged, or one is used twice: norm1 is attention's, norm2 the MLP's."
MLP_FIRST = "The MLP came first: attention, then the MLP."

NOT_NEXT = "Row t is held against token t, which the model has read. It foretells token t + 1: logits[:-1], ids[1:]."
BACKWARDS = "Row t + 1 is held against token t, the wrong way round: logits[:-1] foretell ids[1:]."
SIGN = "The sign is missing: log p is below 0, and a loss is -log p."
NO_LOG = "This is p or 1 - p. A loss is -log p, which grows without end as p goes to 0."
NO_SOFTMAX = "These are scores. First a softmax over the row, then -log of the token's share."
TWICE = "The softmax is taken twice: F.cross_entropy takes logits, and has the softmax inside."
BASE_2 = "This is the logarithm to base 2. log is the natural one."
MEAN = "This is one number, the mean. Return the loss of each token: reduction='none'."

NO_TEMPERATURE = "The temperature does nothing: divide logits by it before the softmax."
INVERTED = "The logits are multiplied by the temperature. Divide: a low temperature makes the likeliest token likelier."
AFTER_SOFTMAX = "The shares are divided by the temperature, and do not add up to 1: divide logits, before the softmax."
ALL = "All tokens may be drawn. Hide all but the top_k likeliest, with -inf before the softmax."
LOST = "Tokens are set to 0 after the softmax, and shares no longer add up to 1. Hide them before, with -inf."
ONE_OFF = "One token too many or too few: the top_k-th likeliest may still be drawn, and no other after it."
UNLIKELIEST = "These are the least likely tokens. topk(top_k) has the largest; the others are hidden."
SORTED = "The shares are in the order of their size. Share n belongs to token n: keep the places."
ZERO_SCORE = "Hidden logits are 0, and exp(0) = 1, so they may still be drawn. exp gives 0 only for -inf."


def check_block(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is a pre-norm block."""
    inputs = []
    for _ in range(3):
        B, T, D = judging.distinct(generator, 3, 2, 6)
        parts = [nn.LayerNorm(2 * D), MultiHeadAttention(2 * D, 2 * D, T, 0.0, 2), nn.LayerNorm(2 * D)]
        layers = [*parts, nn.Sequential(nn.Linear(2 * D, 3 * D), nn.GELU(), nn.Linear(3 * D, 2 * D))]
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            nn.init.normal_(parameter, generator=generator)
        inputs.append((judging.normal(generator, B, T, 2 * D).double(), *(layer.double() for layer in layers)))
    judging.judge(answer, inputs, block, _block_mistakes, "the stream after the block, (B, T, d)")


def check_next_losses(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless row t is held against token t + 1."""
    what = "a loss for each token but the first, (T - 1,)"
    for _ in range(3):
        T, V = judging.distinct(generator, 2, 4, 9)
        logits, ids = 2 * judging.normal(generator, T, V), torch.randint(V, (T,), generator=generator)
        first = judging.call(answer, logits, ids)
        judging.refuse_constant(first, judging.call(answer, logits.roll(1, 0) / 2, ids))
        wide = logits.double()
        judging.compare(judging.tensor(first, what), next_losses(wide, ids), _loss_mistakes(wide, ids), what)


def check_next_shares(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is the softmax of logits / temperature among the top_k likeliest."""
    inputs = []
    for temperature in (0.5, 0.8, 1.7):
        top_k, V = sorted(judging.distinct(generator, 2, 3, 9))
        logits = torch.linspace(-2, 2, V) + 0.1 * torch.rand(V, generator=generator)
        inputs.append((logits[torch.randperm(V, generator=generator)], temperature, top_k))
    judging.judge(answer, inputs, next_shares, _share_mistakes, "a share for each token, (V,)")


def _block_mistakes(x: Tensor, norm1: Any, attention: Any, norm2: Any, mlp: Any) -> judging.Mistakes:
    y = x + attention(norm1(x))
    with_raw, normed = x + attention(x), norm1(x)
    after = norm1(with_raw)
    found = [
        (NO_STREAM, mlp(norm2(attention(norm1(x))))),
        (NO_STREAM, attention(norm1(x)) + mlp(norm2(attention(norm1(x))))),
        (NO_STREAM_LAST, mlp(norm2(y))),
        (NO_NORM, with_raw + mlp(with_raw)),
        (NO_NORM, y + mlp(y)),
        (NO_NORM, with_raw + mlp(norm2(with_raw))),
        (NORM_AFTER, norm2(after + mlp(after))),
        (NORM_AFTER, x + norm1(attention(x)) + norm2(mlp(x + norm1(attention(x))))),
        (SIDE_BY_SIDE, y + mlp(norm2(x))),
        (NORMED_STREAM, _on(norm2(normed + attention(normed)), mlp)),
        (NORMED_STREAM, _on(norm2(y), mlp)),
        (NORMED_STREAM, normed + attention(normed) + mlp(norm2(normed + attention(normed)))),
        (NORMS_EXCHANGED, block(x, norm2, attention, norm1, mlp)),
        (NORMS_EXCHANGED, block(x, norm1, attention, norm1, mlp)),
        (NORMS_EXCHANGED, block(x, norm2, attention, norm2, mlp)),
        (MLP_FIRST, block(x, norm2, mlp, norm1, attention)),
        (MLP_FIRST, block(x, norm1, mlp, norm2, attention)),
    ]
    return [(message, wrong.detach()) for message, wrong in found]


def _on(x: Tensor, layer: Any) -> Tensor:
    added: Tensor = x + layer(x)
    return added


def _loss_mistakes(logits: Tensor, ids: Tensor) -> judging.Mistakes:
    right, shares = next_losses(logits, ids), logits.softmax(-1)
    own = F.cross_entropy(logits, ids, reduction="none")
    p = (-right).exp()
    return [
        (NOT_NEXT, own),
        (NOT_NEXT, own[:-1]),
        (NOT_NEXT, own[1:]),
        (NOT_NEXT, own.mean()),
        (BACKWARDS, F.cross_entropy(logits[1:], ids[:-1], reduction="none")),
        (SIGN, -right),
        (NO_LOG, p),
        (NO_LOG, -p),
        (NO_LOG, 1 - p),
        (NO_SOFTMAX, logits[torch.arange(len(ids) - 1), ids[1:]]),
        (NO_SOFTMAX, -logits[torch.arange(len(ids) - 1), ids[1:]]),
        (TWICE, next_losses(shares, ids)),
        (BASE_2, right / math.log(2)),
        (MEAN, right.mean()),
        (MEAN, right.sum()),
    ]


def _share_mistakes(logits: Tensor, temperature: float, top_k: int) -> judging.Mistakes:
    right, shares = next_shares(logits, temperature, top_k), (logits / temperature).softmax(-1)
    least = logits.topk(top_k).values[-1]
    return [
        (NO_TEMPERATURE, next_shares(logits, 1.0, top_k)),
        (NO_TEMPERATURE, logits.softmax(-1)),
        (INVERTED, next_shares(logits, 1 / temperature, top_k)),
        (INVERTED, (logits * temperature).softmax(-1)),
        (AFTER_SOFTMAX, next_shares(logits, 1.0, top_k) / temperature),
        (ALL, shares),
        (LOST, shares.masked_fill(logits < least, 0.0)),
        (ONE_OFF, next_shares(logits, temperature, top_k - 1)),
        (ONE_OFF, next_shares(logits, temperature, top_k + 1)),
        (UNLIKELIEST, judging.hide(logits / temperature, logits > logits.sort().values[top_k - 1]).softmax(-1)),
        (SORTED, right.sort(descending=True).values),
        (SORTED, (logits.topk(top_k).values / temperature).softmax(-1)),
        (ZERO_SCORE, (logits / temperature).masked_fill(logits < least, 0.0).softmax(-1)),
    ]


EXERCISES = (
    Exercise(
        block,
        check_block,
        hints=(
            "Twice the same: norm, layer, and what comes out is added to what went in.",
            "The second time round, x is what the first time gave: x = x + attention(norm1(x)).",
        ),
    ),
    Exercise(
        next_losses,
        check_next_losses,
        hints=(
            "The last row foretells what is not there, and the first token is foretold of nothing: leave both out.",
            "torch.log_softmax(logits, dim=-1) has log p of every token. Of row t, that of ids[t + 1] counts.",
            "F.cross_entropy(rows, tokens, reduction='none') does both.",
        ),
    ),
    Exercise(
        next_shares,
        check_next_shares,
        hints=(
            "Like the mask of lesson 4: what may not be drawn gets -inf, then the softmax.",
            "logits.topk(top_k).values[-1] is the least of those that may be drawn.",
        ),
    ),
)
