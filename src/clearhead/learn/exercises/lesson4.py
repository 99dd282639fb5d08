"""Lesson 4: no looking ahead, and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.learn.exercise import Exercise, Wrong
from clearhead.learn.exercises import judging, slips

__all__ = ["EXERCISES", "CausalAttention", "causal_weights", "drop_weights"]


def causal_weights(scores: Tensor) -> Tensor:
    """Weights of a text in which no word sees a later one.

    scores: (T, T), scaled already. Return (T, T): 0 above the diagonal, each row adds up to 1, however large the
    scores of later words are.
    """
    later = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
    return torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)


def drop_weights(weights: Tensor, p: float, training: bool) -> Tensor:
    """Dropout: while training, each weight is set to 0 with probability p, and the others grow by 1 / (1 - p).

    weights: (T, S). Return (T, S); outside training, the weights as they are. Try it without F.dropout.
    """
    if not training:
        return weights
    kept = torch.rand_like(weights) >= p
    return weights * kept / (1 - p)


class CausalAttention(nn.Module):
    """A layer in which no word sees a later one, with dropout on its weights while it is trained."""

    def __init__(self, d_in: int, d_out: int, dropout: float) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=False)
        self.W_key = nn.Linear(d_in, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=False)
        self.dropout = dropout  # a probability; self.training is True until layer.eval()

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, d_in), a batch of B texts. Return (B, T, d_out)."""
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        scores = q @ k.transpose(1, 2) / math.sqrt(k.shape[-1])  # (B, T, T)
        later = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
        weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
        out: Tensor = F.dropout(weights, self.dropout, self.training) @ v
        return out


# --- checks --------------------------------------------------------------------------------------------------------

CAUSAL_NAN = (
    "The answer holds NaN or infinity. Either a row had nothing left to see (can the first word see itself?), or -inf"
    " was multiplied by 0: put it in with masked_fill(later, -math.inf)."
)
UNDERFLOW = (
    "Right for small scores, NaN where a later word scores much higher. After the softmax the words that may be seen"
    " have nothing left (exp(-300) is 0), and 0/0 is NaN. Hide the scores before the softmax instead, with -inf."
)
NOT_LOW_ENOUGH = (
    "Hidden words get weight where all visible scores are very low. The number that stands for -inf is not low enough:"
    " use -math.inf itself."
)
EVAL_DROPOUT = (
    "Weights are dropped outside training too. Dropout is an exercise for training only: in evaluation the layer uses"
    " all it has learned: F.dropout(weights, p, self.training), or an nn.Dropout made in __init__."
)
EVAL_SCALED = (
    "Outside training the weights come back scaled. The factor 1 / (1 - p) is paid while training, so that evaluation"
    " needs none."
)
NOT_DROPPED = "Nothing is dropped while training. Each weight must become 0 with probability p."
NOT_RESCALED = (
    "The weights that stay are not scaled up. With a share p gone, rows would add up to 1 - p on average, and the layer"
    " would get less in training than in evaluation: multiply by 1 / (1 - p)."
)
BY_P = "The weights that stay are divided by p. A share 1 - p of them stays: divide by 1 - p."
KEPT_P = "A share p is kept, and 1 - p dropped: the wrong way round. p is the probability of being dropped."
RENORMALISED = (
    "After dropping, each row still adds up to exactly 1. Drop after the softmax, and do not divide by the row's sum:"
    " only on average do rows add up to 1."
)
WHOLE_LINES = "Whole rows or columns are dropped together. Draw a number for each weight on its own."
SAME_DRAW = "Two calls drop the same weights. Each call draws anew: set no seed inside."
DROPPED_ELSEWHERE = (
    "Something other than the weights is dropped. Apply dropout to the weights, after the softmax and before they mix"
    " the values."
)
KEYS_MIXED = "The keys are mixed. What a word gives is its value: weights @ v."
BATCH_MIXED = (
    "Texts of the batch influence each other. Transpose the last two dimensions only, k.transpose(1, 2), and let the"
    " softmax run over the last, dim=-1; dimension 0 is the texts."
)


def check_causal_weights(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless this is the softmax over keys s ≤ t, of any size of scores."""
    what = "shares of each row, (T, T)"
    sizes = judging.distinct(generator, 3, 4, 9)
    scores = [(judging.normal(generator, T, T),) for T in sizes]
    explain = partial(judging.explain_weights, causal=True)
    judging.judge(answer, scores, causal_weights, _causal_mistakes, what, nan=CAUSAL_NAN, explain=explain)
    high, low = (judging.normal(generator, sizes[0], sizes[0]) for _ in range(2))
    high, low = high + 300 * judging.later(high), low - 2000
    judging.judge(answer, [(high,)], causal_weights, lambda scores: [], what, nan=UNDERFLOW)
    judging.judge(answer, [(low,)], causal_weights, lambda s: [], what, nan=CAUSAL_NAN, explain=_explain_low)


def check_drop_weights(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless survivors grow by 1 / (1 - p) in training, and nothing happens outside it."""
    for _ in range(3):
        T, S = judging.distinct(generator, 2, 40, 60)
        p = 0.15 + 0.2 * float(torch.rand((), generator=generator))
        weights = judging.normal(generator, T, S).softmax(-1)
        still, first, second = (
            judging.tensor(judging.call(answer, weights, p, training), "the weights (T, S)")
            for training in (False, True, True)
        )
        before = weights.double()
        quiet = [(EVAL_SCALED, before / (1 - p)), (EVAL_SCALED, before * (1 - p))]
        if still.shape == weights.shape and bool((still == 0).any()):
            raise Wrong(EVAL_DROPOUT)
        judging.compare(still, before, quiet, "outside training, the weights as they are")
        judging.compare(first * 0, before * 0, [], "while training, (T, S)")  # the shape, and no NaN
        _check_dropped(before, first, p)
        if torch.equal(first, second):
            raise Wrong(SAME_DRAW)


def check_causal_attention(answer: Callable[..., Any], generator: torch.Generator) -> None:
    """Raise Wrong unless the layer is causal attention in evaluation, with dropout of its weights in training."""
    for _ in range(3):
        T = 5 + int(torch.randint(4, (), generator=generator))
        d_out, d_in, batch = T + 2, T + 4, 24
        projections = dict.fromkeys(("W_query", "W_key", "W_value"), (d_in, d_out))
        p = 0.15 + 0.2 * float(torch.rand((), generator=generator))
        sizes = {"d_in": d_in, "d_out": d_out, "dropout": p}
        layer, found = judging.build(answer, sizes, projections, generator)
        x = judging.normal(generator, batch, T, d_in)
        q, k, v = (x.double() @ W for W in found.values())
        weights = causal_weights(q @ k.mT / math.sqrt(d_out))
        _check_still(layer, x)
        judging.judge(
            layer,
            [(x,)],
            lambda x, found=found: _mixed(*(x @ W for W in found.values())),
            lambda x, found=found: _layer_mistakes(x, *found.values()),
            "one vector a word, (B, T, d_out)",
            nan=CAUSAL_NAN,
        )
        trained = judging.tensor(judging.call(layer.train(), x), "one vector a word while training too")
        _check_dropped(weights, trained @ torch.linalg.pinv(v), p)  # what the values were mixed with: T ≤ d_out


def _mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_weights(q @ k.mT / math.sqrt(q.shape[-1])) @ v


def _causal_mistakes(scores: Tensor) -> judging.Mistakes:
    return judging.mask_mistakes(scores) + judging.softmax_mistakes(scores, judging.later(scores))


def _explain_low(got: Tensor, scores: Tensor) -> None:
    if bool((got.triu(1).abs() > 1e-6).any()):
        raise Wrong(NOT_LOW_ENOUGH)


def _layer_mistakes(x: Tensor, W_query: Tensor, W_key: Tensor, W_value: Tensor) -> judging.Mistakes:
    q, k, v = x @ W_query, x @ W_key, x @ W_value
    wrong = judging.attention_mistakes(q, k, other_width=x.shape[-1], causal=True)
    return [
        *((message, weights @ v) for message, weights in wrong),
        (KEYS_MIXED, _mixed(q, k, k)),
        (judging.EXCHANGED, _mixed(k, q, v)),
        *((judging.NO_PROJECTION, _mixed(x, x, mixed)) for mixed in (v, x)),
    ]


def _check_still(layer: nn.Module, x: Tensor) -> None:
    """Evaluation has no chance in it, and no text of a batch knows of another."""
    first, second = (judging.tensor(judging.call(layer, x), "one vector a word, (B, T, d_out)") for _ in range(2))
    if first.shape == second.shape and not torch.allclose(first, second, equal_nan=True):
        raise Wrong(EVAL_DROPOUT)
    alone = judging.tensor(judging.call(layer, x[:1]), "one vector a word, (1, T, d_out)")
    if alone.shape == first[:1].shape and not torch.allclose(alone, first[:1], atol=1e-5, equal_nan=True):
        raise Wrong(BATCH_MIXED)


def _check_dropped(before: Tensor, after: Tensor, p: float) -> None:
    """Raise Wrong unless each weight of `after` is 0 or before / (1 - p), a share p of them 0."""
    seen = before > 0.02 if before.shape[-1] < 20 else before > 0
    ratio = torch.where(seen, after / before.clamp(min=1e-12), 0.0)
    gone = seen & (ratio.abs() < 0.02)
    stay = seen & ~gone
    share = float(gone.sum() / seen.sum())
    factors = ratio[stay]
    if share == 0 and torch.allclose(factors, torch.ones_like(factors), atol=0.02):
        raise Wrong(NOT_DROPPED)
    steady = bool(stay.any()) and float(factors.max() - factors.min()) < 0.02
    if not steady:
        sums = after.sum(-1)[after.abs().sum(-1) > 1e-6]
        raise Wrong(RENORMALISED if torch.allclose(sums, torch.ones_like(sums), atol=1e-3) else DROPPED_ELSEWHERE)
    _check_share(seen, gone, share, p)
    factor = float(factors.mean())
    if abs(factor - 1 / (1 - p)) > 0.02:
        raise Wrong(NOT_RESCALED if abs(factor - 1) < 0.02 else BY_P if abs(factor * p - 1) < 0.02 else _odd(factor, p))


def _check_share(seen: Tensor, gone: Tensor, share: float, p: float) -> None:
    rows = [(gone == seen).all(dim) | ~gone.any(dim) for dim in (-1, -2)]
    if any(bool(lines.all()) for lines in rows):
        raise Wrong(WHOLE_LINES)
    if abs(share - p) > 0.1:
        raise Wrong(KEPT_P if abs(share - (1 - p)) < 0.1 else f"A share of {share:.2f} is dropped, with p = {p:.2f}.")


def _odd(factor: float, p: float) -> str:
    right = f"with p = {p:.3f} it must be 1 / (1 - p) = {1 / (1 - p):.3f}"
    return f"The weights that stay are multiplied by {factor:.3f}; {right}."


EXERCISES = (
    Exercise(
        causal_weights,
        check_causal_weights,
        hints=(
            "exp of what gives exactly 0? Put that where a score must not count, and let the softmax do the rest.",
            "torch.ones(T, T, dtype=torch.bool).triu(diagonal=1) is True above the diagonal.",
            "scores.masked_fill(later, -math.inf), then the softmax with dim=-1.",
        ),
        slips=slips.PRODUCTS,
    ),
    Exercise(
        drop_weights,
        check_drop_weights,
        hints=(
            "Outside training there is nothing to do: return the weights.",
            "torch.rand_like(weights) draws a number from 0 to 1 for each weight. Which of them are kept?",
            "weights * (torch.rand_like(weights) >= p) keeps a share 1 - p; what must the rest be multiplied by?",
        ),
    ),
    Exercise(
        CausalAttention,
        check_causal_attention,
        hints=(
            "Project, score, scale, hide, softmax, drop, mix: one line each.",
            "A batch has a dimension in front: k.transpose(1, 2) turns the last two, where k.T would turn all.",
            "F.dropout(weights, self.dropout, self.training) does nothing after layer.eval().",
        ),
        slips=slips.BATCHES,
    ),
)
